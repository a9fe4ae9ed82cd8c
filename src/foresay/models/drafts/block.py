"""A block drafter (DFlash; DSpark): a trainable module, and the same bound to its target with its own slot cache.

A block follows an anchor, a position whose token is known. Its first input is the anchor's token, the others are mask tokens. In
every layer the keys and values are those of the target's hidden states at all positions before the anchor, and of the block
itself, all of which each of its positions attends to. DSpark adds the Markov and the confidence head. The cache has one slot for
each committed position but the last; a block is computed in the slots after them, and its entries are overwritten later. Knows no
loss and no data; the drafter supplies the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import KVCache, ModelInput, ModelOutput
from foresay.errors import ConfigError
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.layers import FlatTokens, NativeLayers
from foresay.models.drafts.base import LAST, DraftModel, StoredDraft
from foresay.models.drafts.config import BlockConfig
from foresay.models.drafts.layers import DraftModule, FeedForward, Projections, RMSNorm, Rotary, rotate
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import MakeProduct, unquantized
from foresay.models.huggingface.operations import attend, feed_forward, rotary_of


class Seen(NamedTuple):
    """The context of blocks in training, which is the same in all layers."""

    context: torch.Tensor
    """[B, S, D]."""
    before: Rotary
    inside: Rotary
    """Cosines and sines of the context's and of the blocks' positions."""
    visible: torch.Tensor
    """[B, A, S] bool, the positions before each anchor."""
    length: int
    """Positions of a block, T."""


class BlockModule(DraftModule):
    """The layers and heads of a block drafter. B texts of S positions, A anchors each, T positions of a block, width D."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.layer, len(config.hidden_layers) * config.hidden_size)
        shape, width = self.shape, config.hidden_size
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList(
            [BlockLayer(shape, normalizes=config.normalizes_queries) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
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
        visible = torch.arange(num_positions, device=device) < anchors[..., None]
        x, seen = embedded.reshape(batch, num_anchors * length, -1), Seen(context, before, inside, visible, length)
        for layer in self.block_layers:
            x = layer(x, seen)
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
        self.self_attn = BlockAttention(shape, shape.hidden_size, normalizes=normalizes)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Transform the states of blocks x [B, A * T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), seen)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BlockAttention(Projections):
    """Attention of a block's positions to the context before its anchor and to the whole block."""

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Attend from the states of blocks x [B, A * T, D]."""
        context, before, inside, visible, length = seen
        batch, count = x.shape[:2]
        anchors, group = count // length, self.heads // self.key_heads
        query, key, old = self.queries(x, inside), self.keys(x, inside), self.keys(context, before)
        value, old_value = self.values(x), self.values(context)
        # queries that share a key head are folded into rows: [B, key heads, A, group * T, dim]
        folded = query.view(batch, self.key_heads, group, anchors, length, self.dim).transpose(2, 3).flatten(3, 4)
        own_keys, own_values = (one.view(batch, self.key_heads, anchors, length, self.dim) for one in (key, value))
        scale = self.dim**-0.5
        far = (folded.flatten(2, 3) @ old.transpose(2, 3) * scale).view(*folded.shape[:4], -1)
        far = far.masked_fill(~visible[:, None, :, None], -torch.inf)
        near = folded @ own_keys.transpose(3, 4) * scale
        weights = torch.softmax(torch.cat([far, near], -1), -1)
        width = old.shape[2]
        attended = (weights[..., :width].flatten(2, 3) @ old_value).view(folded.shape) + weights[
            ..., width:
        ] @ own_values
        unfolded = attended.view(batch, self.key_heads, anchors, group, length, self.dim).transpose(2, 3)
        return self.joined(unfolded.reshape(batch, self.heads, count, self.dim))


class BlockModel(DraftModel):
    """A block drafter, bound to the target that it was trained for. B rows, T positions of a block, width D, K tokens."""

    def __init__(
        self, block: StoredDraft, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized
    ) -> None:
        """See DraftModel."""
        super().__init__(block, target, name=name, make=make)
        config, module = block.config, block.module
        assert isinstance(module, BlockModule) and isinstance(config, BlockConfig)
        self.config, self._feature_norm = config, self._norm_of(module.hidden_norm)
        if (found := self._head.out_features) != config.draft_vocab_size:
            raise ConfigError(
                f"the block drafter drafts {config.draft_vocab_size} tokens, but the output layer of {name!r} has {found} rows"
            )
        layers = module.block_layers
        self._layers = [
            self._layer_of(one.self_attn, one.mlp, one.post_attention_layernorm, one.input_layernorm) for one in layers
        ]
        attentions = [layer.self_attn for layer in layers]
        self._context = self._product(*(one.weight for a in attentions for one in (a.k_proj, a.v_proj)))
        """Keys and values of the context features in all layers, in one product."""
        self._key_norms = [None if a.k_norm is None else self._norm_of(a.k_norm) for a in attentions]
        markov = module.markov_head
        self._markov_rows = None if markov is None else markov.markov_w1.weight.detach().to(self.device, self.dtype)
        self._markov = None if markov is None else self._product(markov.markov_w2.weight)
        confidence = module.confidence_head
        self._confidence = None
        if confidence is not None:
            weight, bias = confidence.proj.weight, confidence.proj.bias
            self._confidence = weight[0].detach().to(self.device).float(), float(bias.detach()[0])
        products = (self._context, self._fc, self._markov or self._head)
        self._native = self._compiled(self._layers, str(config.layer.get("hidden_act", "silu")), products)

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        native = self._native is not None
        return Capabilities(trees=True, num_layers=LAST, ragged=native, own_threads=native)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Not supported: blocks are computed by `run_block`."""
        raise NotImplementedError

    @torch.inference_mode()
    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the context features [n, D] of the target's hidden states, [n, L * D]; see `joined`."""
        return self._feature_norm(self.in_parts(self._fc, joint))

    @torch.inference_mode()
    def add_context(self, features: Sequence[torch.Tensor | None], cache: KVCache) -> None:
        """Cache the keys and values of each row's next positions. features: [B], [n, D] each, or None for no position."""
        assert isinstance(cache, SlotCache)
        rows = [(row, one) for row, one in enumerate(features) if one is not None and len(one)]
        if not rows:
            return
        starts = [cache.lengths[row] for row, _ in rows]
        joint = torch.cat([one for _, one in rows])
        positions = torch.cat(
            [torch.arange(start, start + len(one)) for start, (_, one) in zip(starts, rows, strict=True)]
        ).to(self.device)
        keys, values = self._context_states(joint, positions)
        at = 0
        for start, (row, one) in zip(starts, rows, strict=True):
            count = len(one)
            slots = torch.arange(start, start + count, device=self.device)[None]
            cache.reserve(row, [start + count], start + count)
            index = torch.tensor([[row]], device=self.device)
            for layer in range(len(self._layers)):
                own_keys, own_values = (states[layer][None, :, at : at + count] for states in (keys, values))
                cache.tensors.write(layer, own_keys, own_values, index, slots)
            cache.lengths[row] = start + count
            at += count

    def _context_states(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of context features [n, D] in all layers, [L, key heads, n, dim] each."""
        layer = self._layers[0]
        heads, dim = layer.heads[1], layer.dim
        joint = self.in_parts(self._context, features).to(self.dtype).view(len(features), -1, 2, heads, dim)
        keys = joint[:, :, 0]
        normed = [keys[:, i] if norm is None else norm(keys[:, i]) for i, norm in enumerate(self._key_norms)]
        cos, sin = (one[:, None] for one in self._cos_sin(positions))
        turned = torch.stack([rotate(one.float(), cos, sin).to(self.dtype) for one in normed])
        return turned.transpose(1, 2), joint[:, :, 1].permute(1, 2, 0, 3)

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, [n, R] float32 each."""
        if self.device.type == "cpu":
            return self._rotary_table(positions)
        cos, sin = self._rotary(torch.empty(0, device=self.device), positions[None])
        return cos[0].float(), sin[0].float()

    @torch.inference_mode()
    def run_block(self, tokens: Sequence[int], lengths: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Return the outputs of a block after each row's context, [B, T, D] in the model's dtype.

        tokens: [B], each row's last committed token. lengths: [B], positions of each row's block, at most `block_size`; 0 for a
        row without a block, whose outputs are meaningless.
        """
        assert isinstance(cache, SlotCache)
        batch, columns = len(tokens), max(lengths)
        ids = torch.full((batch, columns), self.config.mask_token_id, dtype=torch.int64)
        ids[:, 0] = torch.tensor(tokens)
        if self._native is None and self.device.type == "cpu" and batch > 1:
            parts = [self._one_row(ids, lengths, row, cache) for row in range(batch)]
            return torch.cat([F.pad(one, (0, 0, 0, columns - one.shape[1])) for one in parts])
        return self._block(ids.to(self.device), lengths, 0, cache)

    def _one_row(self, ids: torch.Tensor, lengths: Sequence[int], row: int, cache: SlotCache) -> torch.Tensor:
        """Return the outputs of one row's block, [1, T, D]; operations over several rows sum in another order."""
        count = max(1, lengths[row])
        return self._block(ids[row : row + 1, :count].to(self.device), [lengths[row]], row, cache)

    def _block(self, ids: torch.Tensor, lengths: Sequence[int], first: int, cache: SlotCache) -> torch.Tensor:
        batch, columns = ids.shape
        at = cache.begin_pass(first, batch, columns, self.device)
        counts = torch.tensor(lengths, device=self.device)
        real = torch.arange(columns, device=self.device) < counts[:, None]
        ends = at.slots[:, :1] + counts[:, None] - 1
        at.ancestors = real[:, None].expand(-1, columns, -1)
        embedded = self._embed(ids)
        if self._native is not None:
            return self._by_kernels(self._native, embedded, at, real, ends, cache)
        with attention.during(at):
            return self._by_operations(embedded, at, ends, cache)

    def _by_kernels(
        self,
        native: NativeLayers,
        embedded: torch.Tensor,
        at: Placement,
        real: torch.Tensor,
        ends: torch.Tensor,
        cache: SlotCache,
    ) -> torch.Tensor:
        out = torch.zeros_like(embedded)
        if not bool(real.any()):
            return out
        turns = self._rotary_table(at.positions[real].contiguous())
        at.positions = ends.expand(at.slots.shape)  # the kernels attend to all positions up to this one
        tokens = FlatTokens.of(at, real)
        normed, _ = native.run(embedded[real].float(), tokens, cache, {self._layers[0].kind: turns}, ())
        out[real] = normed.to(self.dtype)
        return out

    def _by_operations(
        self, embedded: torch.Tensor, at: Placement, ends: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        x = embedded
        rotary = rotary_of(*self._rotary(x, at.positions))

        def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= ends[:, :, None, None]).expand(-1, -1, query.shape[2], -1)

        mask = attention.additive_mask(mask_function=seen, dtype=x.dtype)
        for index, layer in enumerate(self._layers):
            assert layer.before_attention is not None
            x = attend(layer, x, layer.before_attention(x), partial(cache.write, index, at=at), rotary, mask)
            x = feed_forward(layer, x)
        return self._norm(x)

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., K] of outputs [..., D], without those of the Markov head."""
        return self.in_parts(self._head, hidden)

    @torch.inference_mode()
    def after(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the logits that the Markov head adds after previous tokens, [...] int64 -> [..., K]; None without one."""
        if self._markov is None or self._markov_rows is None:
            return None
        return self.in_parts(self._markov, self._markov_rows[tokens])

    @torch.inference_mode()
    def acceptance(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the predicted acceptance [...] of tokens from outputs [..., D] after previous tokens; None without such a
        head."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        logits = (hidden.float() * weight[: self.width]).sum(-1) + bias
        if self.config.confidence_reads_markov and self._markov_rows is not None:
            logits = logits + (self._markov_rows[tokens].float() * weight[self.width :]).sum(-1)
        return torch.sigmoid(logits)
