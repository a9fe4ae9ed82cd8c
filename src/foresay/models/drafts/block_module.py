"""The weights of a block drafter (DFlash, DFlash2; DSpark) and the pass that trains them.

A block follows an anchor, a position whose token is known. In training the blocks of many anchors of a text are computed at once;
each sees the context before its anchor and itself. Knows no loss, no data and no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig

from foresay.models.drafts.block_config import BlockConfig, Sight
from foresay.models.drafts.layers import (
    Attend,
    DraftModule,
    DynamicConvolution,
    FeedForward,
    Projections,
    RMSNorm,
    Rotary,
)
from foresay.models.drafts.path import path_head


class Seen(NamedTuple):
    """The context of blocks in training, which is the same in all layers."""

    context: torch.Tensor
    """[B, S, D]."""
    before: Rotary
    """Cosines and sines of the context's positions."""
    anchors: torch.Tensor
    """[B, A] int64, positions."""
    length: int
    """Positions of a block, T."""

    def visible(self, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which context positions [B, A, 1 or T, S] and which of the block [T, T] its positions attend to, bool."""
        at = torch.arange(self.length, device=self.anchors.device)
        far = torch.arange(self.context.shape[1], device=self.anchors.device) < self.anchors[..., None, None]
        near = (at <= at[:, None]) if sight.causal else torch.ones_like(at[:, None] <= at)
        if sight.window is not None:
            first = self.anchors[..., None] + at - sight.window + 1
            far = far & (torch.arange(self.context.shape[1], device=at.device) >= first[..., None])
            near = near & (at > at[:, None] - sight.window)
        return far, near


class BlockModule(DraftModule):
    """The layers and heads of a block drafter. B texts of S positions, A anchors each, T positions of a block, width D."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.layer, len(config.hidden_layers) * config.hidden_size)
        shape, width = self.shape, config.hidden_size
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList(
            [
                BlockLayer(shape, sight, config.convolution, normalizes=config.normalizes_queries)
                for sight in config.sights
            ]
        )
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.path = path_head(config)
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None

    @property
    def block_layers(self) -> list[BlockLayer]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Return the context features [..., D] of the target's hidden states, [..., number of layers * D]."""
        out: torch.Tensor = self.hidden_norm(self.fc(states))
        return out

    def blocks(self, states: torch.Tensor, embedded: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return the outputs of blocks after the last norm, [B, A, T, D].

        states: [B, S, number of layers * D], the target's hidden states of whole texts. embedded: [B, A, T, D], the embeddings of
        the anchors' tokens and of mask tokens. anchors: [B, A] int64, positions.
        """
        batch, num_positions = states.shape[:2]
        num_anchors, length = embedded.shape[1:3]
        context = self.features(states)
        device = states.device
        before = self.rotary(context, torch.arange(num_positions, device=device)[None])
        positions = (anchors[..., None] + torch.arange(length, device=device)).view(batch, -1)
        inside = self.rotary(context, positions)
        x, seen = embedded.reshape(batch, num_anchors * length, -1), Seen(context, before, anchors, length)
        for layer in self.block_layers:
            x = layer(x, inside, partial(_over_context, layer, seen), length)
        out: torch.Tensor = self.norm(x).view(batch, num_anchors, length, -1)
        return out


class ConfidenceHead(nn.Module):
    """The logit of a token's acceptance, from the block's output and, if configured, the previous token's Markov embedding."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        extra = config.path.rank if config.path is not None and config.confidence_reads_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)


class BlockLayer(nn.Module):
    """Attention over the context and a block, followed by a gated feed-forward network, both in convolutions or not."""

    def __init__(self, shape: LlamaConfig, sight: Sight, taps: tuple[int, int] | None, *, normalizes: bool) -> None:
        """taps: see BlockConfig.convolution."""
        super().__init__()
        self.sight, width = sight, shape.hidden_size
        self.input_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.self_attn = Projections(shape, width, normalizes=normalizes)
        self.post_attention_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)
        self.attention_conv = None if taps is None else DynamicConvolution(width, *taps)
        self.mlp_conv = None if taps is None else DynamicConvolution(width, *taps)

    def forward(self, x: torch.Tensor, rotary: Rotary, attend: Attend, length: int) -> torch.Tensor:
        """Transform the states of blocks x [B, A * T, D]. length: positions of a block, T."""
        attention = partial(self.self_attn, rotary=rotary, attend=attend)
        x = x + _convolved(self.attention_conv, attention, self.input_layernorm(x), length)
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x), length)


def _convolved(
    conv: DynamicConvolution | None, sublayer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, length: int
) -> torch.Tensor:
    """Return a sublayer's output for x [B, A * T, D], with convolutions over the positions of each block around it."""
    if conv is None:
        return sublayer(x)
    formula, blocks = conv.convolution(), x.view(len(x), -1, length, x.shape[-1])
    read, delta = formula.around(blocks)
    return formula.after(sublayer(read.flatten(1, 2)).view_as(blocks), delta).flatten(1, 2)


def _over_context(
    layer: BlockLayer, seen: Seen, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend from a block's positions to the context before its anchor and to the whole block; see Attend."""
    context, before, _, length = seen
    in_context, in_block = seen.visible(layer.sight)
    old, old_value = layer.self_attn.keys(context, before), layer.self_attn.values(context)
    batch, heads, count, dim = query.shape
    key_heads, anchors = key.shape[1], count // length
    group = heads // key_heads
    # queries that share a key head are folded into rows: [B, key heads, A, group * T, dim]
    folded = query.view(batch, key_heads, group, anchors, length, dim).transpose(2, 3).flatten(3, 4)
    own_keys, own_values = (one.view(batch, key_heads, anchors, length, dim) for one in (key, value))
    far = (folded.flatten(2, 3) @ old.transpose(2, 3) * dim**-0.5).unflatten(2, (anchors, -1))
    in_context = in_context.expand(-1, -1, length, -1).repeat(1, 1, group, 1)
    far = far.masked_fill(~in_context[:, None], -torch.inf)
    near = folded @ own_keys.transpose(3, 4) * dim**-0.5
    near = near.masked_fill(~in_block.repeat(group, 1), -torch.inf)
    weights = torch.softmax(torch.cat([far, near], -1), -1)
    width = old.shape[2]
    attended = (weights[..., :width].flatten(2, 3) @ old_value).view(folded.shape) + weights[..., width:] @ own_values
    unfolded = attended.view(batch, key_heads, anchors, group, length, dim).transpose(2, 3)
    return unfolded.reshape(batch, heads, count, dim)
