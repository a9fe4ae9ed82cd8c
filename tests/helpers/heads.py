"""A head on hidden states, and what an independent reading of its layout computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.kinds import new_module
from foresay.models.huggingface.causal import CausalModel


def layer_of(target: CausalModel, **changes: Any) -> dict[str, Any]:
    """Fields of the layers of a draft for a target."""
    return {
        "hidden_size": target.model.config.get_text_config(decoder=True).hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        **changes,
    }


def stored(
    config: Any, make: Callable[[], torch.nn.Module], seed: int, gain: float, ids: Sequence[int] | None
) -> StoredDraft:
    """A draft with random weights times a gain. Norms and convolutions, which start as the identity, stay close to it."""
    torch.manual_seed(seed)
    module: Any = make()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name or "conv" in name:
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= gain
    return StoredDraft(config, module, None if ids is None else torch.tensor(sorted(ids)))


def random_head(
    target: CausalModel,
    *,
    layers: tuple[int, ...] | None = None,
    ids: Sequence[int] | None = None,
    before: bool = False,
    seed: int = 0,
    gain: float = 3.0,
    parts: Mapping[str, Any] | None = None,
    kind: type[HeadConfig] = HeadConfig,
    **changes: Any,
) -> StoredDraft:
    """Random weights, large enough that draft tokens differ. parts: other fields of the configuration."""
    layers, layer = tuple(range(target.num_layers)) if layers is None else layers, layer_of(target, **changes)
    made = kind(
        layer=layer,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        target_hidden_size=target.model.config.hidden_size,
        hidden_layers=layers,
        norm_before_residual=before,
        target="tiny",
        **(parts or {}),
    )
    return stored(made, lambda: new_module(made, len(layers)), seed, gain, ids)


class Reading:
    """A layout read once more, in float64, by the tensors and fields of its file."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self.weights = {name: value.double() for name, value in weights.items()}
        self.fields = {**config, **config.get("dflash_config", {})}
        self.dim = config["head_dim"]

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = self.weights[f"{name}.weight"]
        return x / (x.pow(2).mean(-1, keepdim=True) + self.fields["rms_norm_eps"]).sqrt() * scale

    def heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The heads of one position, [heads, dim]."""
        return self.product(name, x).view(-1, self.dim)

    def turned(self, layer: str, part: str, x: torch.Tensor, position: int) -> torch.Tensor:
        """The heads of queries "q" or of keys "k" of one position, [heads, dim]."""
        name, half = f"{layer}.self_attn.{part}", self.dim // 2
        x = self.heads(f"{name}_proj", x)
        x = self.norm(f"{name}_norm", x) if f"{name}_norm.weight" in self.weights else x
        angles = position / self.fields["rope_theta"] ** (torch.arange(0, self.dim, 2).double() / self.dim)
        apart = self.fields.get("rope_is_neox_style", True)  # pairs of the two halves; otherwise of neighbours
        low, high = (x[..., :half], x[..., half:]) if apart else (x[..., ::2], x[..., 1::2])
        pairs = low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()
        return torch.cat(pairs, -1) if apart else torch.stack(pairs, -1).flatten(-2)

    def attended(
        self, layer: str, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The output of the attention of one position, [D]."""
        parts = []
        for h, one in enumerate(query):
            mine = h // (len(query) // len(keys[0]))
            shares = torch.softmax(torch.stack([one @ key[mine] for key in keys]) / self.dim**0.5, 0)
            parts.append(shares @ torch.stack([value[mine] for value in values]))
        return self.product(f"{layer}.self_attn.o_proj", torch.cat(parts))

    def mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.product(f"{layer}.mlp.gate_proj", x), self.product(f"{layer}.mlp.up_proj", x)
        return self.product(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)


def reference_scores(
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    states: torch.Tensor,
    embedded: torch.Tensor,
    head: torch.Tensor,
) -> list[torch.Tensor]:
    """A chain after a text by another reading of the layout.

    states: [n, 3 H] of a text's first n positions. embedded: [n + k, D], then k draft tokens. Gives the scores [K]
    after the text and after each draft token.
    """
    of, layer = Reading(weights, config), "layers.0"
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def pair(feature: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        beside = of.norm(f"{layer}.hidden_norm", feature)
        joint = torch.cat([of.norm(f"{layer}.input_layernorm", token), beside])
        position = len(keys)
        first = max(0, position + 1 - (config.get("sliding_window") or 1 << 30))
        keys.append(of.turned(layer, "k", joint, position))
        values.append(of.heads(f"{layer}.self_attn.v_proj", joint))
        attended = of.attended(layer, of.turned(layer, "q", joint, position), keys[first:], values[first:])
        x = (beside if config["norm_before_residual"] else feature) + attended
        return x + of.mlp(layer, of.norm(f"{layer}.post_attention_layernorm", x))

    states = states.double()
    if "input_norm.weight" in weights:
        states = of.norm("input_norm", states)
    if "fc_norm.0.weight" in weights:
        parts = states.chunk(sum("fc_norm" in name for name in weights), -1)
        states = torch.cat([of.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
    features = of.product("fc", states)
    for feature, token in zip(features, embedded, strict=False):
        x = pair(feature, token.double())
    out = [head.double() @ of.norm("norm", x)]
    for token in embedded[len(features) :]:
        x = pair(of.norm("norm", x) if config.get("norm_output") else x, token.double())
        out.append(head.double() @ of.norm("norm", x))
    return out
