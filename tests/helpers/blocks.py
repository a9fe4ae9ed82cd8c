"""A block drafter with random weights, and what an independent reading of its layout computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.block import BlockModule
from foresay.models.drafts.config import BlockConfig
from foresay.models.huggingface.causal import CausalModel


def random_block(
    target: CausalModel,
    *,
    layers: tuple[int, ...] = (1, 2),
    depth: int = 2,
    ids: Sequence[int] | None = None,
    size: int = 5,
    rank: int = 6,
    confidence: bool = True,
    from_anchor: bool = True,
    normalizes: bool = True,
    seed: int = 0,
    gain: float = 3.0,
    **changes: Any,
) -> StoredDraft:
    """Random weights, large enough that draft tokens differ."""
    config = target.model.config.get_text_config(decoder=True)
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
    count = target.vocab_size if ids is None else len(ids)
    made = BlockConfig(
        layer=layer,
        num_layers=depth,
        vocab_size=target.vocab_size,
        draft_vocab_size=count,
        hidden_layers=layers,
        block_size=size,
        mask_token_id=target.vocab_size - 1,
        markov_rank=rank if from_anchor else 0,
        has_confidence=confidence and from_anchor,
        confidence_reads_markov=confidence and from_anchor and rank > 0,
        from_anchor=from_anchor,
        normalizes_queries=normalizes,
    )
    torch.manual_seed(seed)
    module = BlockModule(made)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= gain
    return StoredDraft(made, module, None if ids is None else torch.tensor(sorted(ids)))


def reference_block(
    weights: dict[str, torch.Tensor], config: dict[str, Any], states: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """The layout read once more, in float64 and one position after the other: the outputs of one block, [T, D].

    states: [n, L * H], the target's hidden states of the positions before the anchor. embedded: [T, H], the anchor's embedding
    and those of mask tokens.
    """
    w = {name: value.double() for name, value in weights.items()}
    heads, shared, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def turned(x: torch.Tensor, position: int, name: str) -> torch.Tensor:
        x = norm(x, name) if f"{name}.weight" in w else x
        angles = position / config["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
        low, high = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    features = norm(states.double() @ w["fc.weight"].T, "hidden_norm")
    x, start = embedded.double(), len(features)
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}"
        own = norm(x, f"{name}.input_layernorm")
        keys, values = [], []
        for position, one in enumerate([*features, *own]):
            key = (w[f"{name}.self_attn.k_proj.weight"] @ one).view(shared, dim)
            keys.append(turned(key, position, f"{name}.self_attn.k_norm"))
            values.append((w[f"{name}.self_attn.v_proj.weight"] @ one).view(shared, dim))
        attended = []
        for offset, one in enumerate(own):
            query = (w[f"{name}.self_attn.q_proj.weight"] @ one).view(heads, dim)
            query = turned(query, start + offset, f"{name}.self_attn.q_norm")
            parts = []
            for h in range(heads):
                mine = h // (heads // shared)
                scores = torch.stack([query[h] @ key[mine] for key in keys]) / dim**0.5
                parts.append(torch.softmax(scores, 0) @ torch.stack([value[mine] for value in values]))
            attended.append(w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(parts))
        x = x + torch.stack(attended)
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = y @ w[f"{name}.mlp.gate_proj.weight"].T, y @ w[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "norm")
