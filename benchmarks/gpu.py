"""Forward passes and speculative steps on a GPU, over models of real shapes with random weights, as ratios to their floors.

    python benchmarks/gpu.py [--small] [--device cuda|cpu] [--steps N] [--pages] [--write]

A target with the shapes of a Llama of 7 billion weights and a draft of three layers, both in bf16, with joined layers as loaded
checkpoints have them. Passes are captured as CUDA graphs unless FORESAY_GRAPHS=0 is set. `--small` uses shapes that fit anywhere;
it is the default without a GPU, where passes are repeated from the same buffers instead of captured. Random models agree by
chance alone, so that a speculative step here is one draft chain, one pass of the target and one token. `--pages` runs passes over
flat tokens and pages (FORESAY_PAGES=1).
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from common import CONTEXT, Figures, arguments, filled, log, parsed, pass_seconds, publish, random_prompt
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.lab.measure.roofline import floor
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.graphs import GraphedPasses
from foresay.models.huggingface.linears import join_layers

GAMMA = 5
WARM_UP, WARM_UP_RUNS, RUNS = 16, 2, 5
LEGEND = {
    "weights_gb": ("weights, GB", ""),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "plain_step_ms": ("pass over 1 row x 1 token, ms", ""),
    "plain_step_over_floor": ("the same over weight bytes / memory bandwidth", "<= 1.35"),
    "tokens8_over_1": ("pass over 8 tokens / over 1", "<= 1.15"),
    "batch32_over_1": ("pass over 32 rows / over 1", "<= 1.4"),
    "replays": ("passes that were replayed", ""),
    "captures_after_warm_up": ("passes captured while steps were timed", "0"),
    "same_bits_share": ("tokens whose scores have the same bits in passes over 1 and 8 rows", ""),
    "without_graphs": ("pass over 1 row x 1 token without graphs / with", ""),
    "draft_ms_per_token": ("pass of the draft, ms", "<= 0.5"),
    "plain_decoding_ms": ("step of plain decoding, ms", ""),
    "speculative_step_over_plain": ("speculative step with 5 draft tokens / plain step", "<= 1.5"),
}


@dataclass(frozen=True)
class Shapes:
    """(layers, hidden size, feed-forward size, heads) of the target and the draft, and their vocabulary size."""

    target: tuple[int, int, int, int]
    draft: tuple[int, int, int, int]
    vocabulary: int


LARGE = Shapes((32, 4096, 11008, 32), (3, 1024, 2816, 16), 32000)
SMALL = Shapes((4, 256, 688, 4), (2, 128, 344, 2), 4096)


def model_of(shape: tuple[int, int, int, int], vocabulary: int, device: torch.device) -> LlamaForCausalLM:
    """A random Llama in bf16, created on the device."""
    layers, hidden, inner, heads = shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        dtype=torch.bfloat16,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval()


def pass_times(model: CausalModel, shapes: Sequence[tuple[int, int]], repeats: int) -> list[float]:
    """Median seconds of passes over (rows, tokens per row) after CONTEXT tokens each, in turn, the device's work included."""
    passes = []
    for batch, tokens in shapes:
        prompt = random_prompt(batch, model.device, 1000)
        given = ModelInput(prompt[:, :tokens].contiguous(), [tokens] * batch)
        passes.append((model, filled(model, prompt), given))

    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    pass_seconds(passes, WARM_UP, wait)  # seen once, captured, compared twice; and a device at its full clock
    return pass_seconds(passes, repeats, wait)


def seconds_per_step(generators: Sequence[foresay.Generator], steps: int) -> list[float]:
    """Seconds of a decoding step of each without the prompt: differences of two output lengths, medians of runs in turn."""
    prompt = list(range(5, 5 + CONTEXT))
    lengths = (steps // 4, steps)

    def run(generator: foresay.Generator, new: int) -> tuple[float, int]:
        began = perf_counter()
        result = generator.generate([prompt], foresay.SamplingParams(max_new_tokens=new))[0]
        return perf_counter() - began, len(result.steps)

    took: list[list[float]] = [[] for _ in generators]
    for turn in range(WARM_UP_RUNS + RUNS):
        for times, generator in zip(took, generators, strict=True):
            (short, few), (long, many) = (run(generator, new) for new in lengths)
            if turn >= WARM_UP_RUNS:
                times.append((long - short) / (many - few))
    return [statistics.median(times) for times in took]


def same_bits(model: CausalModel) -> float:
    """Share of tokens whose scores are the same alone and in a pass over 8 rows of two tokens."""
    prompt = random_prompt(8, model.device, 1000)
    ids = prompt[:, :2].contiguous()
    together = model.forward(ModelInput(ids, [2] * 8), filled(model, prompt)).scores()
    same = 0
    for i in range(8):
        alone = model.forward(ModelInput(ids[i : i + 1, :1], [1]), filled(model, prompt[i : i + 1])).scores()
        same += torch.equal(alone[0, 0], together[i, 0])
    return same / 8


def figures_of(shapes: Shapes, device: torch.device, repeats: int) -> Figures:
    target, draft = (model_of(s, shapes.vocabulary, device) for s in (shapes.target, shapes.draft))
    for one in (target, draft):
        join_layers(one)
    plain = foresay.load(target, drafter="none")
    speculating = foresay.load(target, draft, num_draft_tokens=GAMMA)
    model: Any = plain.target.model
    if device.type == "cpu":
        model.use_fused()
        model.graphs = GraphedPasses(model.fused.by_operations, lambda run: run, device)
    bound = floor(model)
    assert bound is not None
    one, eight, batch = pass_times(model, [(1, 1), (1, 8), (32, 1)], repeats)
    out: Figures = {
        "weights_gb": bound.weight_bytes / 1e9,
        "bandwidth_gb_per_s": bound.bytes_per_s / 1e9,
        "plain_step_ms": 1e3 * one,
        "plain_step_over_floor": one / bound.seconds(1, CONTEXT),
        "tokens8_over_1": eight / one,
        "batch32_over_1": batch / one,
        "replays": getattr(model.paged or model.graphs, "replays", 0),
        "same_bits_share": same_bits(model),
    }
    if model.paged is None:
        graphs, model.graphs = model.graphs, None
        out["without_graphs"] = pass_times(model, [(1, 1)], repeats)[0] / one
        model.graphs = graphs
    drafts: Any = foresay.load(draft, drafter="none").target.model
    alone, together = seconds_per_step([plain, speculating], repeats)
    if model.paged is not None:
        captures = model.paged.captures
        seconds_per_step([plain], repeats)
        out["captures_after_warm_up"] = model.paged.captures - captures
    return out | {
        "draft_ms_per_token": 1e3 * pass_times(drafts, [(1, 1)], repeats)[0],
        "plain_decoding_ms": 1e3 * alone,
        "speculative_step_over_plain": together / alone,
    }


def main() -> int:
    parser = arguments(__doc__, quick=False)
    parser.add_argument("--small", action="store_true", help="shapes that fit anywhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=64, help="timed passes of each figure (default: 64)")
    parser.add_argument("--pages", action="store_true", help="run passes over flat tokens and pages")
    args = parsed(parser)
    if args.pages:
        os.environ["FORESAY_PAGES"] = "1"
    if args.device == "cpu":
        os.environ["FORESAY_NATIVE"] = "0"  # PyTorch operations, as on a GPU
    shapes = SMALL if args.small or args.device == "cpu" else LARGE
    figures = figures_of(shapes, torch.device(args.device), args.steps)
    for key, value in figures.items():
        log(f"  {key}: {value:.3f}")
    captured = args.device == "cuda" and figures["replays"]
    model = f"random Llama {'small shapes' if shapes is SMALL else 'of 7B'} in bf16, on {args.device}, "
    model += "passes captured as CUDA graphs" if captured else "passes not captured"
    return publish("gpu", figures, args, legend=LEGEND, model=model)


if __name__ == "__main__":
    sys.exit(main())
