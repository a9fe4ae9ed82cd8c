"""A block drafter with random weights, and what an independent reading of its layout computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.block_config import MARKOV, BlockConfig, PathShape, Sight
from foresay.models.drafts.block_module import BlockModule
from foresay.models.huggingface.causal import CausalModel
from helpers.heads import Layout


def random_block(
    target: CausalModel,
    *,
    layers: tuple[int, ...] = (1, 2),
    depth: int = 2,
    ids: Sequence[int] | None = None,
    size: int = 5,
    rank: int = 6,
    path: PathShape | None = None,
    taps: tuple[int, int] | None = None,
    sights: Sequence[Sight] | None = None,
    confidence: bool = True,
    from_anchor: bool = True,
    normalizes: bool = True,
    seed: int = 0,
    gain: float = 3.0,
    scales: Mapping[str, float] | None = None,
    **changes: Any,
) -> StoredDraft:
    """Random weights, large enough that draft tokens differ. rank: of a Markov head, if there is no other `path`."""
    markov = from_anchor and rank > 0 and path is None
    path = PathShape("vanilla", rank) if markov else path
    confidence = confidence and from_anchor and (rank == 0 or (path is not None and path.kind in MARKOV))
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
        sights=tuple(sights or [Sight()] * depth),
        vocab_size=target.vocab_size,
        draft_vocab_size=count,
        hidden_layers=layers,
        block_size=size,
        mask_token_id=target.vocab_size - 1,
        path=path,
        convolution=taps,
        has_confidence=confidence,
        confidence_reads_markov=confidence and rank > 0,
        from_anchor=from_anchor,
        normalizes_queries=normalizes,
        **(scales or {}),
    )
    torch.manual_seed(seed)
    module = BlockModule(made)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name or "conv" in name:  # convolutions start as the identity
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= gain
    return StoredDraft(made, module, None if ids is None else torch.tensor(sorted(ids)))


def reference_block(
    weights: dict[str, torch.Tensor], config: dict[str, Any], states: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """The layout read once more, in float64: the outputs of one block, [T, D].

    states: [n, L * H], the target's hidden states of the positions before the anchor. embedded: [T, H], the anchor's embedding
    and those of mask tokens.
    """
    own, fields = Layout(weights, config), {**config, **config.get("dflash_config", {})}

    def kernels(x: torch.Tensor, name: str) -> torch.Tensor | None:
        """[T, 2, taps, D] for the inputs of a sublayer."""
        base = own.weights.get(f"{name}.base_kernel")
        if base is None:
            return None
        deltas = own.product(x, f"{name}.kernel_projection").view(len(x), 2, base.shape[1], -1)
        return base + deltas.repeat_interleave(fields["conv_group_size"], -1)

    def convolved(x: torch.Tensor, of: torch.Tensor | None, side: int) -> torch.Tensor:
        if of is None:
            return x
        return torch.stack(
            [sum(of[i, side, t] * x[i - t] for t in range(min(i + 1, of.shape[2]))) for i in range(len(x))]
        )

    features = own.norm(own.features(states), "hidden_norm")
    x, at = embedded.double() * fields.get("input_embedding_scale", 1.0), torch.arange(len(features) + len(embedded))
    place = at[len(features) :, None]
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}"
        slides = config["layer_types"][index] == "sliding_attention"
        causal = not config["sliding_window_non_causal"] if slides else config["is_causal"]
        seen = (at > place - config["sliding_window"]) if slides else torch.ones(len(x), len(at), dtype=torch.bool)
        read = own.norm(x, f"{name}.input_layernorm")
        taps = kernels(read, f"{name}.attention_conv")
        read = convolved(read, taps, 0)
        attended = own.attended(
            read, torch.cat([features, read]), f"{name}.self_attn", seen & (at <= place) if causal else seen
        )
        x = x + convolved(attended, taps, 1)
        y = own.norm(x, f"{name}.post_attention_layernorm")
        taps = kernels(y, f"{name}.mlp_conv")
        x = x + convolved(own.gated(convolved(y, taps, 0), f"{name}.mlp"), taps, 1)
    return own.norm(x, "norm")


def reference_path(
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    unary: torch.Tensor,
    hidden: torch.Tensor,
    before: Sequence[int],
    embedded: torch.Tensor,
) -> torch.Tensor:
    """The scores of the tokens of a block given those before them, [T, K], read once more in float64, token after token.

    unary: [T, K], the scores of the outputs `hidden` [T, D]. before: T tokens, the anchor first. embedded: [T, D], of them.
    """
    w = {name: value.double() for name, value in weights.items()}
    fields = {**config, **config.get("dflash_config", {})}
    unary, hidden, embedded, out = unary.double(), hidden.double(), embedded.double(), []
    state = torch.zeros(fields.get("gru_hidden_dim") or fields.get("markov_rank") or 0, dtype=torch.float64)
    for t, token in enumerate(before):
        if "candidate_selector.successor_codebook" in w:
            best = unary[t].topk(fields["selector_top_k"]).indices
            gate = w["candidate_selector.hidden_projection.weight"] @ hidden[t]
            edge = w["candidate_selector.successor_codebook"] @ (
                w["candidate_selector.predecessor_codebook"][token] * gate
            )
            scores = torch.full_like(unary[t], -torch.inf)
            scores[best] = (unary[t] + edge)[best]
            out.append(scores)
        elif "prefix_gru.weight_ih_l0" in w:
            r, z, n = (w["prefix_gru.weight_ih_l0"] @ embedded[t]).chunk(3)
            hr, hz, hn = (w["prefix_gru.weight_hh_l0"] @ state).chunk(3)
            z, new = torch.sigmoid(z + hz), torch.tanh(n + torch.sigmoid(r + hr) * hn)
            state = (1 - z) * new + z * state
            inner = w["embed_proj.0.weight"] @ torch.cat([hidden[t], state])
            more = w["embed_proj.2.weight"] @ (inner * torch.sigmoid(inner))
            out.append(unary[t] + (more if t >= fields["pure_draft_prefix_len"] else 0))
        else:
            read = previous = w["markov_head.markov_w1.weight"][token]
            if fields["markov_head_type"] == "gated":
                gate = w["markov_head.gate_proj.weight"] @ torch.cat([hidden[t], previous])
                read = torch.sigmoid(gate + w["markov_head.gate_proj.bias"]) * previous
            elif fields["markov_head_type"] == "rnn":
                joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, previous, hidden[t]])
                keep, new, shown = (joint + w["markov_head.joint_proj.bias"]).chunk(3)
                keep, read = torch.sigmoid(keep), torch.tanh(shown)
                state = keep * state + (1 - keep) * torch.tanh(new)
            out.append(unary[t] + w["markov_head.markov_w2.weight"] @ read)
    return torch.stack(out)
