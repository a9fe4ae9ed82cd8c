"""Passes and speculative steps on a GPU, over models of real shapes with random weights, as ratios to their floors.

    python benchmarks/gpu.py [--small] [--device cuda|cpu] [--steps N] [--write]

A target shaped like a Llama of 7 billion weights and a draft of three layers, both in bf16, both handed over as objects. Passes
are captured as graphs where the device takes them (FORESAY_GRAPHS=0 leaves them as they are). `--small` is the same run over
shapes that fit anywhere; it is the default without a GPU, where passes are repeated from the same buffers instead of captured.
Random models agree by chance alone, so a speculative step here is one draft chain, one pass of the target and one token. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from speed import section
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.lab.measure.roofline import floor
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.graphs import GraphedPasses

WANTED = {
    "plain_step_over_floor": 1.35,
    "columns8_over_1": 1.15,
    "batch32_over_1": 1.4,
    "draft_ms_per_token": 0.5,
    "speculative_step_over_plain": 1.5,
}
CONTEXT, GAMMA = 128, 5


@dataclass(frozen=True)
class Shapes:
    """(layers, hidden, feed-forward, heads) of the target and the draft, and their vocabulary."""

    target: tuple[int, int, int, int]
    draft: tuple[int, int, int, int]
    vocabulary: int


LARGE = Shapes((32, 4096, 11008, 32), (3, 1024, 2816, 16), 32000)
SMALL = Shapes((4, 256, 688, 4), (2, 128, 344, 2), 4096)


def model_of(shape: tuple[int, int, int, int], vocabulary: int, device: torch.device) -> LlamaForCausalLM:
    """A random Llama in bf16, made where it is to be."""
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


def seconds(device: torch.device, body: Callable[[], Any], repeats: int) -> float:
    """The median time of a body, the device's work included."""
    took = []
    for _ in range(repeats):
        wait(device)
        began = perf_counter()
        body()
        wait(device)
        took.append(perf_counter() - began)
    return statistics.median(took)


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step(model: CausalModel, batch: int, columns: int, repeats: int) -> float:
    """Seconds of a pass over rows with CONTEXT tokens each."""
    cache = model.new_cache()
    prompt = torch.randint(5, 1000, (batch, CONTEXT), device=model.device)
    rows = [Row(i, prompt[i].tolist(), foresay.SamplingParams(), limit=256) for i in range(batch)]
    model.admit(Rows(rows), 0, cache)
    model.forward(ModelInput(prompt, [CONTEXT] * batch), cache)
    model_input = ModelInput(prompt[:, :columns].contiguous(), [columns] * batch)

    def one() -> None:
        model.forward(model_input, cache)
        cache.truncate([CONTEXT] * batch)

    for _ in range(4):  # seen once, captured, compared twice
        one()
    return seconds(model.device, one, repeats)


def per_step(generator: foresay.Generator, steps: int) -> float:
    """Seconds of a step of whole decoding, prompt excluded: two lengths are compared."""
    prompt = list(range(5, 5 + CONTEXT))
    times, counts = [], []
    for new in (steps // 4, steps):
        params = foresay.SamplingParams(max_new_tokens=new)
        generator.generate([prompt], params)
        began = perf_counter()
        result = generator.generate([prompt], params)[0]
        times.append(perf_counter() - began)
        counts.append(len(result.steps))
    return (times[1] - times[0]) / (counts[1] - counts[0])


def measured(shapes: Shapes, device: torch.device, repeats: int) -> dict[str, float]:
    """The figures, each said as it comes."""
    target, draft = (model_of(s, shapes.vocabulary, device) for s in (shapes.target, shapes.draft))
    plain = foresay.load(target, drafter="none")
    speculating = foresay.load(target, draft, num_draft_tokens=GAMMA)
    model: Any = plain.target.model
    if device.type == "cpu":
        model.use_fused()
        model.graphs = GraphedPasses(model.lean.by_operations, lambda run: run, device)
    bound = floor(model)
    assert bound is not None
    one = step(model, 1, 1, repeats)
    out = {
        "weights_gb": bound.weight_bytes / 1e9,
        "bandwidth_gb_per_s": bound.bytes_per_s / 1e9,
        "plain_step_ms": 1e3 * one,
        "plain_step_over_floor": one / bound.seconds(1, CONTEXT),
        "columns8_over_1": step(model, 1, 8, repeats) / one,
        "batch32_over_1": step(model, 32, 1, repeats) / one,
        "replays": float(0 if model.graphs is None else model.graphs.replays),
    }
    drafts: Any = foresay.load(draft, drafter="none").target.model
    out["draft_ms_per_token"] = 1e3 * step(drafts, 1, 1, repeats)
    alone = per_step(plain, repeats)
    out["plain_decoding_ms"] = 1e3 * alone
    out["speculative_step_over_plain"] = per_step(speculating, repeats) / alone
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="shapes that fit anywhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=64, help="of each figure")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    device = torch.device(args.device)
    shapes = SMALL if args.small or args.device == "cpu" else LARGE
    torch.manual_seed(0)
    figures = measured(shapes, device, args.steps)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, small shapes, nothing captured"
    lines = [f"{where}, torch {torch.__version__}", "", "| figure | measured | wanted on one H200 |", "|---|---|---|"]
    lines += [f"| {k} | {v:.3f} | {f'<= {WANTED[k]:g}' if k in WANTED else ''} |" for k, v in figures.items()]
    print("\n".join(lines))
    if args.write:
        section(Path(__file__).with_name("RESULTS.md"), "gpu", "\n".join(lines))
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
