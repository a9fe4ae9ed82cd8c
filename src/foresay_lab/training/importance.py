"""Importance of each layer, dimension, head and neuron of a Llama-like model, measured on text.

Owns the measures and the hooks that collect them. Layers: 1 - cosine similarity of a layer's input and output (Men et al. 2024).
Dimensions: mean magnitude of the norms' outputs. Heads and neurons: mean magnitude of the inputs of the projections after them
(Muralidharan et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from foresay.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Importance:
    """Measured importance; larger is more important. L layers, H dimensions, Q query heads, F neurons."""

    layers: torch.Tensor
    """[L]."""
    hidden: torch.Tensor
    """[H]."""
    heads: torch.Tensor
    """[L, Q]."""
    feed_forward: torch.Tensor
    """[L, F]."""
    num_tokens: int


@torch.no_grad()
def measure(model: Any, batches: Iterable[torch.Tensor], on_batch: Callable[[int], None] | None = None) -> Importance:
    """Run the model on token ids, [B, T] int64 each and without padding, and measure importance.

    on_batch: called with the number of tokens processed. Raises ConfigError for no text, and UnsupportedModelError for a family
    with another layer structure.
    """
    config, body = model.config, model.base_model
    layers = getattr(body, "layers", None)
    if layers is None or not all(_is_supported(one) for one in layers):
        text = f"models of the family {config.model_type!r} cannot be measured: their layers differ from Llama's"
        raise UnsupportedModelError(text)
    sums = _Sums(len(layers), config)
    handles = []
    for i, layer in enumerate(layers):
        handles += [
            layer.register_forward_hook(partial(sums.layer, i), with_kwargs=True),
            layer.self_attn.o_proj.register_forward_pre_hook(partial(sums.heads_of, i)),
            layer.mlp.down_proj.register_forward_pre_hook(partial(sums.neurons_of, i)),
        ]
        norms = [module for name, module in layer.named_children() if name.endswith("layernorm")]
        handles += [norm.register_forward_hook(sums.dimensions) for norm in norms]
    training = model.training
    model.eval()
    try:
        for ids in batches:
            body(input_ids=ids.to(model.device), use_cache=False)
            sums.tokens += ids.numel()
            if on_batch is not None:
                on_batch(sums.tokens)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    if not sums.tokens:
        raise ConfigError("is missing: importance is measured on it", param="text")
    count = sums.tokens
    means = sums.layers / count, sums.hidden / count, sums.heads / count, sums.feed_forward / count
    return Importance(*means, count)


def _is_supported(layer: Any) -> bool:
    """True if a layer has attention and one feed-forward network under Llama's names."""
    return hasattr(getattr(layer, "self_attn", None), "o_proj") and hasattr(getattr(layer, "mlp", None), "down_proj")


class _Sums:
    """Sums over tokens, in float64 on the CPU."""

    def __init__(self, count: int, config: Any) -> None:
        self.tokens = 0
        self.layers = torch.zeros(count, dtype=torch.float64)
        self.hidden = torch.zeros(config.hidden_size, dtype=torch.float64)
        self.heads = torch.zeros(count, config.num_attention_heads, dtype=torch.float64)
        self.feed_forward = torch.zeros(count, config.intermediate_size, dtype=torch.float64)

    def layer(self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        layer_input = args[0] if args else kwargs["hidden_states"]
        layer_output = out[0] if isinstance(out, tuple) else out
        similarity = torch.nn.functional.cosine_similarity(layer_input.float(), layer_output.float(), dim=-1)
        self.layers[index] += (1 - similarity).double().sum().cpu()

    def heads_of(self, index: int, module: Any, args: tuple[Any, ...]) -> None:
        inputs = args[0].float().flatten(0, -2)
        self.heads[index] += inputs.unflatten(-1, (self.heads.shape[1], -1)).norm(dim=-1).double().sum(0).cpu()

    def neurons_of(self, index: int, module: Any, args: tuple[Any, ...]) -> None:
        self.feed_forward[index] += args[0].float().flatten(0, -2).abs().double().sum(0).cpu()

    def dimensions(self, module: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        self.hidden += out.float().flatten(0, -2).abs().double().sum(0).cpu()
