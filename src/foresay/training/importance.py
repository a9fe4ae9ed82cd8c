"""How much each layer, dimension, head and neuron of a Llama-like model does, measured on text.

Owns the measures and how they are taken off a transformers model while it reads. Layers: one less the cosine between what a layer
reads and what it gives (Men et al. 2024). Dimensions: the mean size of what the norms give there; heads and neurons: the
mean size of what they give to the products behind them (Muralidharan et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from foresay.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Importance:
    """What was measured; larger is more important. L layers, H dimensions, Q query heads, F neurons."""

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
    """Read token ids, [B, T] int64 each, all real, and measure.

    on_batch: told how many tokens have been read. Raises ConfigError for no text, and UnsupportedModelError for a family whose
    layers are kept elsewhere.
    """
    config, body = model.config, model.base_model
    layers = getattr(body, "layers", None)
    if layers is None or not all(_known(one) for one in layers):
        raise UnsupportedModelError(
            f"models of the family {config.model_type!r} cannot be measured: their layers are not Llama's"
        )
    sums = _Sums(len(layers), config)
    handles = []
    for i, layer in enumerate(layers):
        handles += [
            layer.register_forward_hook(sums.layer(i), with_kwargs=True),
            layer.self_attn.o_proj.register_forward_pre_hook(sums.heads_of(i)),
            layer.mlp.down_proj.register_forward_pre_hook(sums.neurons_of(i)),
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
        raise ConfigError("there is no text to measure the model on")
    return Importance(
        sums.layers / sums.tokens,
        sums.hidden / sums.tokens,
        sums.heads / sums.tokens,
        sums.model_input / sums.tokens,
        sums.tokens,
    )


def _known(layer: Any) -> bool:
    """Whether a layer has attention and one feed-forward where Llama's has them."""
    return hasattr(getattr(layer, "self_attn", None), "o_proj") and hasattr(getattr(layer, "mlp", None), "down_proj")


class _Sums:
    """Sums over tokens, in float64 on the CPU."""

    def __init__(self, count: int, config: Any) -> None:
        self.tokens = 0
        self.layers = torch.zeros(count, dtype=torch.float64)
        self.hidden = torch.zeros(config.hidden_size, dtype=torch.float64)
        self.heads = torch.zeros(count, config.num_attention_heads, dtype=torch.float64)
        self.model_input = torch.zeros(count, config.intermediate_size, dtype=torch.float64)

    def layer(self, index: int) -> Callable[..., None]:
        def seen(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = out[0] if isinstance(out, tuple) else out
            near = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            self.layers[index] += (1 - near).double().sum().cpu()

        return seen

    def heads_of(self, index: int) -> Callable[..., None]:
        def seen(module: Any, args: tuple[Any, ...]) -> None:
            given = args[0].float().flatten(0, -2)
            self.heads[index] += given.unflatten(-1, (self.heads.shape[1], -1)).norm(dim=-1).double().sum(0).cpu()

        return seen

    def neurons_of(self, index: int) -> Callable[..., None]:
        def seen(module: Any, args: tuple[Any, ...]) -> None:
            self.model_input[index] += args[0].float().flatten(0, -2).abs().double().sum(0).cpu()

        return seen

    def dimensions(self, module: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        self.hidden += out.float().flatten(0, -2).abs().double().sum(0).cpu()
