"""The shape study: latency of draft models with equal numbers of parameters, from deep and narrow to shallow and wide.

Random weights take as long as trained ones. "Decoding Speculative Decoding" (Yan et al. 2024) finds that the depth of a draft
model determines its latency: each layer costs several kernel launches and waits, at any width. Owns the compared shapes. Does
not measure acceptance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from foresay.checks import check_float, check_int
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.lab.measure.profile import measure
from foresay.models.sources.load_options import check_device
from foresay.models.sources.reading import native_dtype
from foresay.models.sources.wrapping import wrap

DEPTHS = (48, 24, 12, 6, 3)
_HEAD = 64
"""Width of an attention head."""
_VOCAB = 32000


@dataclass(frozen=True, slots=True)
class Shape:
    """The depth and width of a decoder, and its time per token."""

    layers: int
    hidden: int
    intermediate: int
    parameters: int
    """Number of parameters without embeddings and head."""
    seconds: float = 0.0
    """Median time of a forward pass over one token at batch size 1; low and high are the quartiles."""
    low: float = 0.0
    high: float = 0.0


def shapes(parameters: float, depths: Sequence[int] = DEPTHS) -> list[Shape]:
    """Return one decoder per depth with about this many parameters, 12 * hidden^2 per layer.

    Raises ConfigError for a depth at which no width is within 20% of the parameters.
    """
    check_float("parameters", parameters, 1e5, 1e12)
    out = []
    for layers in depths:
        check_int("depth", layers, 1, 1000)
        hidden = max(1, round((parameters / (12 * layers)) ** 0.5 / _HEAD)) * _HEAD
        intermediate = max(_HEAD, round((parameters / layers - 4 * hidden**2) / (3 * hidden) / _HEAD) * _HEAD)
        count = layers * (4 * hidden**2 + 3 * hidden * intermediate)
        if abs(count / parameters - 1) > 0.2:
            raise ConfigError(
                f"depth={layers} does not allow {parameters:.3g} parameters with attention heads of width {_HEAD}; leave it out"
            )
        out.append(Shape(layers, hidden, intermediate, count))
    return out


def study(
    parameters: float = 1e8,
    *,
    depths: Sequence[int] = DEPTHS,
    device: str | torch.device = "cpu",
    repeats: int = 9,
    context: int = 128,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Shape]:
    """Time every shape on this machine, with foresay's engine.

    context: tokens of the row before a timed pass. on_progress: called with (shapes done, total shapes). Raises ConfigError
    as `shapes` does, and for a device that does not exist.
    """
    check_device(device)
    planned = shapes(parameters, depths)
    out = []
    for done, shape in enumerate(planned):
        on_progress(done, len(planned))
        out.append(_timed(shape, torch.device(device), repeats, context))
    on_progress(len(planned), len(planned))
    return out


def _timed(shape: Shape, device: torch.device, repeats: int, context: int) -> Shape:
    from dataclasses import replace

    from foresay.decoding.acceptance import Speculative
    from foresay.lengths import ConstantLength

    loaded = wrap("shape", random_model(shape, device), None, optimise=True)
    generator = Generator(loaded, lambda: None, Speculative(), ConstantLength(0), max_batch_size=1)
    profile = measure(generator, batches=(1,), columns=(1,), contexts=(context,), repeats=repeats, fills=())
    [timing] = profile.timings
    return replace(shape, seconds=timing.seconds, low=timing.low, high=timing.high)


def random_model(shape: Shape, device: torch.device) -> torch.nn.Module:
    """Return a Llama of this shape with random weights, in the device's native dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // _HEAD,
        num_key_value_heads=shape.hidden // _HEAD,
        max_position_embeddings=4096,
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model: torch.nn.Module = LlamaForCausalLM(config).to(native_dtype(device)).eval()
    return model


def depth_share(timed: Sequence[Shape]) -> float:
    """Return R^2 in [0, 1] of latency as a linear function of depth. Raises ConfigError for fewer than three shapes."""
    if len(timed) < 3:
        raise ConfigError("at least three depths are needed to relate latency to depth")
    correlation = statistics.correlation([s.layers for s in timed], [s.seconds for s in timed])
    return correlation**2
