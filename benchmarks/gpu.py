"""Forward passes and speculative steps on a GPU, over models of real shapes with random weights, as ratios to their floors.

    python benchmarks/gpu.py [--small] [--device cuda|cpu] [--steps N] [--write]

A target with the shapes of a Llama of 7 billion weights and a draft of three layers, both in bf16 and passed as objects. Passes
are captured as CUDA graphs: the script sets FORESAY_GRAPHS=1 unless it is set. `--small` uses shapes that fit anywhere; it is
the default without a GPU, where passes are repeated from the same buffers instead of captured. Random models agree by chance
alone, so that a speculative step here is one draft chain, one pass of the target and one token.
"""

from __future__ import annotations

import os
import sys
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
from foresay.models.huggingface.graphs import SWITCH, GraphedPasses

GAMMA = 5
LEGEND = {
    "weights_gb": ("weights, GB", ""),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "plain_step_ms": ("pass over 1 row x 1 token, ms", ""),
    "plain_step_over_floor": ("the same over weight bytes / memory bandwidth", "<= 1.35"),
    "tokens8_over_1": ("pass over 8 tokens / over 1", "<= 1.15"),
    "batch32_over_1": ("pass over 32 rows / over 1", "<= 1.4"),
    "replays": ("passes that were replayed", ""),
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


def step(model: CausalModel, batch: int, tokens: int, repeats: int) -> float:
    """Median seconds of a pass over rows with CONTEXT tokens each, the device's work included."""
    prompt = random_prompt(batch, model.device, 1000)
    passes = [(model, filled(model, prompt), ModelInput(prompt[:, :tokens].contiguous(), [tokens] * batch))]

    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    pass_seconds(passes, 4, wait)  # seen once, captured, compared twice
    return pass_seconds(passes, repeats, wait)[0]


def per_step(generator: foresay.Generator, steps: int) -> float:
    """Seconds of a decoding step without the prompt, from the difference of two output lengths."""
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


def figures_of(shapes: Shapes, device: torch.device, repeats: int) -> Figures:
    target, draft = (model_of(s, shapes.vocabulary, device) for s in (shapes.target, shapes.draft))
    plain = foresay.load(target, drafter="none")
    speculating = foresay.load(target, draft, num_draft_tokens=GAMMA)
    model: Any = plain.target.model
    if device.type == "cpu":
        model.use_fused()
        model.graphs = GraphedPasses(model.fused.by_operations, lambda run: run, device)
    bound = floor(model)
    assert bound is not None
    one = step(model, 1, 1, repeats)
    out: Figures = {
        "weights_gb": bound.weight_bytes / 1e9,
        "bandwidth_gb_per_s": bound.bytes_per_s / 1e9,
        "plain_step_ms": 1e3 * one,
        "plain_step_over_floor": one / bound.seconds(1, CONTEXT),
        "tokens8_over_1": step(model, 1, 8, repeats) / one,
        "batch32_over_1": step(model, 32, 1, repeats) / one,
        "replays": 0 if model.graphs is None else model.graphs.replays,
    }
    drafts: Any = foresay.load(draft, drafter="none").target.model
    alone = per_step(plain, repeats)
    return out | {
        "draft_ms_per_token": 1e3 * step(drafts, 1, 1, repeats),
        "plain_decoding_ms": 1e3 * alone,
        "speculative_step_over_plain": per_step(speculating, repeats) / alone,
    }


def main() -> int:
    parser = arguments(__doc__, quick=False)
    parser.add_argument("--small", action="store_true", help="shapes that fit anywhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=64, help="timed passes of each figure (default: 64)")
    args = parsed(parser)
    os.environ.setdefault(SWITCH, "1")
    if args.device == "cpu":
        os.environ["FORESAY_NATIVE"] = "0"  # PyTorch operations, as on a GPU
    shapes = SMALL if args.small or args.device == "cpu" else LARGE
    figures = figures_of(shapes, torch.device(args.device), args.steps)
    for key, value in figures.items():
        log(f"  {key}: {value:.3f}")
    captured = args.device == "cuda" and os.environ[SWITCH] == "1" and figures["replays"]
    model = f"random Llama {'small shapes' if shapes is SMALL else 'of 7B'} in bf16, on {args.device}, "
    model += "passes captured as CUDA graphs" if captured else "passes not captured"
    return publish("gpu", figures, args, legend=LEGEND, model=model)


if __name__ == "__main__":
    sys.exit(main())
