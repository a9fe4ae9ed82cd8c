"""A head on hidden states, and what an independent reading of its layout computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.kinds import new_module
from foresay.models.huggingface.causal import CausalModel


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
    config = target.model.config
    layers = tuple(range(target.num_layers)) if layers is None else layers
    layer = {
        "hidden_size": config.hidden_size,
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
    size = target.vocab_size if ids is None else len(ids)
    made = kind(
        layer=layer,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        target_hidden_size=config.hidden_size,
        hidden_layers=layers,
        norm_before_residual=before,
        target="tiny",
        **(parts or {}),
    )
    torch.manual_seed(seed)
    module = new_module(made, len(layers))
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= gain
    return StoredDraft(made, module, None if ids is None else torch.tensor(sorted(ids)))


def reference_scores(
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    states: torch.Tensor,
    embedded: torch.Tensor,
    head: torch.Tensor,
) -> list[torch.Tensor]:
    """The layout read once more, in float64: a chain after a text.

    states: [n, 3 H] of a text's first n positions. embedded: [n + k, D], then k draft tokens. Gives the scores [K]
    after the text and after each draft token.
    """
    w = {name: value.double() for name, value in weights.items()}
    q_heads, k_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position / config["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
        cos, sin = angles.cos(), angles.sin()
        low, high = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def pair(feature: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        beside = norm(feature, "layers.0.hidden_norm")
        joint = torch.cat([norm(token, "layers.0.input_layernorm"), beside])
        position, name = len(keys), "layers.0.self_attn"
        first = max(0, position + 1 - (config.get("sliding_window") or 1 << 30))
        query = rotate((w[f"{name}.q_proj.weight"] @ joint).view(q_heads, dim), position)
        keys.append(rotate((w[f"{name}.k_proj.weight"] @ joint).view(k_heads, dim), position))
        values.append((w[f"{name}.v_proj.weight"] @ joint).view(k_heads, dim))
        out = []
        for h in range(q_heads):
            mine = h // (q_heads // k_heads)
            scores = torch.stack([query[h] @ key[mine] for key in keys[first:]]) / dim**0.5
            out.append(torch.softmax(scores, 0) @ torch.stack([value[mine] for value in values[first:]]))
        x = (beside if config["norm_before_residual"] else feature) + w[f"{name}.o_proj.weight"] @ torch.cat(out)
        y = norm(x, "layers.0.post_attention_layernorm")
        gate, up = w["layers.0.mlp.gate_proj.weight"] @ y, w["layers.0.mlp.up_proj.weight"] @ y
        return x + w["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    states = states.double()
    if "input_norm.weight" in w:
        states = norm(states, "input_norm")
    if "fc_norm.0.weight" in w:
        parts = states.chunk(sum("fc_norm" in name for name in w), -1)
        states = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
    features = states @ w["fc.weight"].T
    for i in range(len(features)):
        x = pair(features[i], embedded[i].double())
    out = [head.double() @ norm(x, "norm")]
    for token in embedded[len(features) :]:
        x = pair(norm(x, "norm") if config.get("norm_output") else x, token.double())
        out.append(head.double() @ norm(x, "norm"))
    return out
