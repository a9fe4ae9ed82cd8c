"""A block drafter as a trainable module, with parameters named as in the files, computed over whole texts.

A block follows an anchor, a position whose token is known. Its first input is the anchor's token, the others are mask tokens. In
every layer the keys and values are those of the target's hidden states at all positions before the anchor, and of the block
itself, all of which each of its positions attends to (DFlash, section 3; DSpark adds the Markov and the confidence head). Knows
no loss and no data.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig

from foresay.models.blocks.config import BlockConfig
from foresay.models.heads.module import FeedForward, RMSNorm, layer_shape, rotary_embedding


class BlockModule(nn.Module):
    """The layers and heads of a block drafter. B texts of S positions, A anchors each, T positions of a block, width D, K
    tokens."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        shape, width = layer_shape(config.layer), config.hidden_size
        self.fc = nn.Linear(len(config.hidden_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList(
            [BlockLayer(shape, normalizes=config.normalizes_queries) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None
        self.lm_head: nn.Linear | None = None
        """[K, D]; None to use the target's rows of the tokens that it can draft."""
        self.embed_tokens: nn.Embedding | None = None
        """[V, D]; None to use the target's."""
        self.rotary = rotary_embedding(config.layer)

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
        visible = torch.arange(num_positions, device=device) < anchors[..., None]
        x = embedded.reshape(batch, num_anchors * length, -1)
        for layer in self.block_layers:
            x = layer(x, context, before, inside, visible, length)
        out: torch.Tensor = self.norm(x).view(batch, num_anchors, length, -1)
        return out


class MarkovHead(nn.Module):
    """Scores of a token after the previous one, of low rank: W2 W1[token]."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a token's acceptance, from the block's output and, if configured, the previous token's Markov embedding."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        extra = config.markov_rank if config.confidence_reads_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)


class BlockLayer(nn.Module):
    """Attention over the context and a block, followed by a gated feed-forward network."""

    def __init__(self, shape: LlamaConfig, *, normalizes: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape, normalizes=normalizes)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor],
        inside: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        length: int,
    ) -> torch.Tensor:
        """Transform the states of blocks x [B, A * T, D].

        context: [B, S, D]. before, inside: cosines and sines of the context's and the blocks' positions. visible: [B, A, S] bool.
        """
        x = x + self.self_attn(self.input_layernorm(x), context, before, inside, visible, length)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    """Attention of a block's positions to the context before its anchor and to the whole block."""

    def __init__(self, shape: LlamaConfig, *, normalizes: bool) -> None:
        super().__init__()
        width, dim = shape.hidden_size, int(shape.head_dim or shape.hidden_size // shape.num_attention_heads)
        self.heads, self.key_heads, self.dim = shape.num_attention_heads, shape.num_key_value_heads, dim
        self.q_proj = nn.Linear(width, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, self.key_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, self.key_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, shape.rms_norm_eps) if normalizes else None
        self.k_norm = RMSNorm(dim, shape.rms_norm_eps) if normalizes else None

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor],
        inside: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        length: int,
    ) -> torch.Tensor:
        """See BlockLayer.forward."""
        batch, count = x.shape[:2]
        anchors, group = count // length, self.heads // self.key_heads
        query = self._turned(self.q_proj(x), self.heads, self.q_norm, inside)
        key = self._turned(self.k_proj(x), self.key_heads, self.k_norm, inside)
        old = self._turned(self.k_proj(context), self.key_heads, self.k_norm, before)
        value, old_value = (self._split(self.v_proj(one), self.key_heads) for one in (x, context))
        # queries that share a key head are folded into rows: [B, key heads, A, group * T, dim]
        folded = query.view(batch, self.key_heads, group, anchors, length, self.dim).transpose(2, 3).flatten(3, 4)
        own_keys, own_values = (one.view(batch, self.key_heads, anchors, length, self.dim) for one in (key, value))
        scale = self.dim**-0.5
        far = (folded.flatten(2, 3) @ old.transpose(2, 3) * scale).view(*folded.shape[:4], -1)
        far = far.masked_fill(~visible[:, None, :, None], -torch.inf)
        near = folded @ own_keys.transpose(3, 4) * scale
        weights = torch.softmax(torch.cat([far, near], -1), -1)
        seen = old.shape[2]
        attended = (weights[..., :seen].flatten(2, 3) @ old_value).view(folded.shape) + weights[..., seen:] @ own_values
        unfolded = attended.view(batch, self.key_heads, anchors, group, length, self.dim).transpose(2, 3)
        joint = unfolded.reshape(batch, self.heads, count, self.dim).transpose(1, 2).reshape(batch, count, -1)
        out: torch.Tensor = self.o_proj(joint)
        return out

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, self.dim).transpose(1, 2)

    def _turned(
        self, x: torch.Tensor, heads: int, norm: nn.RMSNorm | None, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return normalized and rotated queries or keys, [B, heads, positions, dim]."""
        split = self._split(x, heads)
        split = split if norm is None else norm(split)
        cos, sin = (one[:, None].to(split.dtype) for one in rotary)
        low, high = split.chunk(2, -1)
        return split * cos + torch.cat([-high, low], -1) * sin
