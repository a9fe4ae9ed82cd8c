"""Recurrent and hybrid targets: what a pass over several tokens costs, and what drafts that copy gain on text that repeats.

    python benchmarks/recurrent.py [--only NAME ...] [--noise X] [--quick] [--repeats N] [--write]

No weights of such a model are needed. Each target has the layers of a published family at about half a billion parameters, with
random weights in bf16, and embeddings and an output layer that make it write cycles of tokens, from which `--noise` makes the
layers depart now and then. So every pass does the work of such a model, and the texts repeat as those of agents do. Greedy,
batch 1, prompts included.
"""

from __future__ import annotations

import sys
from functools import partial
from time import perf_counter
from typing import Any

import torch
from common import arguments, compared, log, measured, parsed, plain_of, publish, shown, table
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.generation.method import Method
from foresay.lab.bench.runners import MethodRunner, PromptBlock
from foresay.lab.data.items import PromptItem
from foresay.lab.data.requests import PromptRequest

VOCABULARY = 32_768
CYCLE = 64
"""Tokens after which a text repeats."""
CONTEXT = 128
SIZES = (1, 2, 3, 5, 9, 13)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "mamba2": {
        "hidden_size": 1024,
        "num_hidden_layers": 48,
        "num_heads": 32,
        "head_dim": 64,
        "expand": 2,
        "n_groups": 1,
    },
    "falcon_h1": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
    },
}
METHODS = (Method("suffix", "4"), Method("suffix", "12"), Method("suffix", "throughput"))
LEGEND = {
    "hybrid_target_speedup": ("slowest family, suffix drafts with adaptive lengths / plain", ">= 1.3"),
    **{f"{name}_speedup": (f"{name}, suffix drafts with adaptive lengths / plain", "") for name in FAMILIES},
    **{f"{name}_pass_share": (f"{name}, a pass over 5 tokens / over one", "") for name in FAMILIES},
}


def made(name: str, noise: float) -> Any:
    """A model of a family that writes cycles. noise: share of the layers' output in the final hidden state."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": VOCABULARY,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[name](**fields, **FAMILIES[name]), dtype=torch.bfloat16
    ).eval()
    ids = torch.arange(VOCABULARY)
    follows = ids - ids % CYCLE + (ids + 1) % CYCLE
    embeddings = torch.randn(VOCABULARY, model.config.hidden_size)
    with torch.inference_mode():
        model.get_output_embeddings().weight[follows] = embeddings.bfloat16()
        model.get_input_embeddings().weight.copy_(embeddings)
        seen = model(torch.randint(1, VOCABULARY, (4, 64)), output_hidden_states=True).hidden_states
        layers = (seen[-1].float() - seen[0].float()).norm(dim=-1).mean() / seen[0].float().norm(dim=-1).mean()
        model.get_input_embeddings().weight.copy_(embeddings * (layers / noise))
    return model


def pass_times(target: foresay.Generator, repeats: int) -> list[float]:
    """Median seconds of passes over SIZES tokens after CONTEXT tokens, in turn."""
    model, ids = target.target.model, torch.randint(1, VOCABULARY, (1, CONTEXT + max(SIZES)))
    cache: Any = model.new_cache()
    cache.add_rows(1)
    model.forward(ModelInput(ids[:, :CONTEXT], [CONTEXT]), cache)
    times: list[list[float]] = [[] for _ in SIZES]
    for _ in range(repeats):
        for size, spent in zip(SIZES, times, strict=True):
            began = perf_counter()
            model.forward(ModelInput(ids[:, CONTEXT : CONTEXT + size], [size]), cache)
            spent.append(perf_counter() - began)
            cache.truncate([CONTEXT])
    return [sorted(spent)[len(spent) // 2] for spent in times]


def prompts(count: int) -> list[PromptRequest]:
    """Prompts that contain one period of their cycle after some tokens that it does not contain."""
    out = []
    for index in range(count):
        start = CYCLE * (17 * index + 5)
        item = PromptItem(f"cycle-{index}", "", "cycles")
        out.append(PromptRequest(item.id, item.category, (*range(900, 932), *range(start, start + CYCLE)), item))
    return out


def main() -> int:
    parser = arguments(__doc__, parts=FAMILIES, repeats=3)
    parser.add_argument("--noise", type=float, default=1.0, help="the layers' share of the last hidden state")
    args = parsed(parser)
    block = PromptBlock(
        "cycles", prompts(1 if args.quick else 4), 1, foresay.SamplingParams(max_new_tokens=24 if args.quick else 128)
    )
    rows: list[tuple[object, ...]] = []

    def figures(name: str) -> dict[str, float]:
        model = made(name, args.noise)
        target = foresay.load(model, drafter="none", max_batch_size=1)
        times = pass_times(target, 2 if args.quick else 9)
        speeds = compared(
            plain_of(target), [MethodRunner(target, one) for one in METHODS], block, 1 if args.quick else args.repeats
        )
        parameters = sum(one.numel() for one in model.parameters()) / 1e6
        for one in METHODS:
            stats = speeds[one.name].stats
            rows.append((f"{name}, {parameters:.0f} M", one.name, f"{stats['block_efficiency']:.2f}", speeds[one.name]))
        log("  ms of passes: " + ", ".join(f"{size} {1e3 * s:.0f}" for size, s in zip(SIZES, times, strict=True)))
        costs.append((f"{name}, {parameters:.0f} M", *(shown(1e3 * one) for one in times)))
        return {
            f"{name}_pass_share": times[SIZES.index(5)] / times[0],
            f"{name}_speedup": speeds[METHODS[-1].name].gain,
        }

    costs: list[tuple[object, ...]] = []

    def written(found: dict[str, Any]) -> int:
        speeds = [found[key] for key in found if key.endswith("_speedup")]
        if speeds:
            found["hybrid_target_speedup"] = min(speeds)
        text = [
            table(("target", *(f"{size} tokens, ms" for size in SIZES)), costs),
            table(("target", "method", "tokens per pass", "over plain"), rows),
        ]
        return publish("recurrent", found, args, legend=LEGEND, model="random weights in bf16", text=text)

    return measured({name: partial(figures, name) for name in FAMILIES}, args.only, written)


if __name__ == "__main__":
    sys.exit(main())
