"""Latency of draft models with equal parameters, from deep and narrow to shallow and wide, with random weights.

    python benchmarks/depth.py [--parameters 1e8] [--depths 48 24 12 6 3] [--repeats 9] [--device cpu] [--write]

Random weights take as long as trained ones. "Decoding Speculative Decoding" (Yan et al. 2024) finds that the depth of a draft
model determines its latency: each layer costs several kernel launches and waits, at any width. A pass reads the same weights
whatever the depth, so the floor is the same; only the overhead of each layer differs.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from common import CONTEXT, Figures, arguments, log, parsed, publish
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.models.hardware import Hardware
from foresay_lab.measure.profile import measure

HEAD_WIDTH = 64
LEGEND = {"depth_share": ("R^2 of latency as a linear function of depth", "")}


def shape(layers: int, parameters: float) -> tuple[int, int]:
    """Hidden and feed-forward size with which the layers have about 12 * hidden^2 parameters each, `parameters` in total."""
    hidden = max(1, round((parameters / (12 * layers)) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH
    inner = round((parameters / layers - 4 * hidden**2) / (3 * hidden) / HEAD_WIDTH) * HEAD_WIDTH
    return hidden, max(HEAD_WIDTH, inner)


def model_of(layers: int, hidden: int, inner: int, device: torch.device) -> Any:
    """A random Llama of this shape, in the device's native dtype."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_WIDTH,
        num_key_value_heads=hidden // HEAD_WIDTH,
        max_position_embeddings=4096,
    )
    with device:
        return LlamaForCausalLM(config).to(Hardware(device).native_dtype).eval()


def main() -> int:
    parser = arguments(__doc__, repeats=9, quick=False)
    parser.add_argument("--parameters", type=float, default=1e8, help="of each model, embeddings not counted")
    parser.add_argument("--depths", type=int, nargs="+", default=[48, 24, 12, 6, 3], help="numbers of layers")
    parser.add_argument("--device", default="cpu")
    args = parsed(parser)
    times: dict[int, float] = {}
    figures: Figures = {}
    for layers in args.depths:
        hidden, inner = shape(layers, args.parameters)
        count = layers * (4 * hidden**2 + 3 * hidden * inner)
        if abs(count / args.parameters - 1) > 0.2:
            parser.error(f"--depths {layers} allows no {args.parameters:.3g} parameters in heads of width {HEAD_WIDTH}")
        target = foresay.load(model_of(layers, hidden, inner, torch.device(args.device)), drafter="none")
        found = measure(target, batches=(1,), columns=(1,), contexts=(CONTEXT,), repeats=args.repeats, fills=())
        times[layers] = found.timings[0].seconds
        log(
            f"{layers:3} layers, width {hidden:5}, {count / 1e6:.0f} M parameters: {1e3 * times[layers]:.2f} ms a token"
        )
        figures[f"ms_{layers}_layers"] = 1e3 * times[layers]
    if len(times) > 2:
        figures["depth_share"] = statistics.correlation(list(times), list(times.values())) ** 2
    return publish("depth", figures, args, legend=LEGEND, model=f"random Llamas of {args.parameters:.3g} parameters")


if __name__ == "__main__":
    sys.exit(main())
