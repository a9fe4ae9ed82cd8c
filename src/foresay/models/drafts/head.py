"""A draft head (EAGLE-3): a trainable module, and a LanguageModel with its own slot cache that scores the target's vocabulary.

The head predicts token i + 2 from a pair: the target's hidden states at position i and token i + 1. Drafting continues with the
head's own output instead of hidden states, and training unrolls it in the same way (EAGLE-3's training-time test): in step j, the
chain that starts at position i reads token i + 1 + j and its output of step j - 1, and attends to the first step's pairs up to
position i and to its own pairs of later steps. Knows no loss and no data; the drafter supplies the hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput
from foresay.decoding.stopping import StoppingRule
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.chain import NativeChain, Start, table_of
from foresay.models.cpu.flat_tokens import FlatTokens
from foresay.models.cpu.layers import NativeLayers
from foresay.models.cpu.product import NativeProduct
from foresay.models.drafts.base import LAST, NEXT, DraftModel, StoredDraft, over_cache
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.layers import Attend, DraftModule, FeedForward, Projections, RMSNorm, Rotary
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.fused import padded
from foresay.models.huggingface.linears import MakeProduct, unquantized
from foresay.models.huggingface.operations import causal_mask
from foresay.models.huggingface.paged_chains import PagedChains
from foresay.models.layer import Pair

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.flat import Buffers
    from foresay.models.gpu.layers import PagedLayers, Turns
    from foresay.models.gpu.pages import PagePool
    from foresay.models.gpu.passes import PagedPasses, States


class HeadModule(DraftModule):
    """The layers of a head. B texts, P pairs of each, hidden size D."""

    def __init__(self, config: HeadConfig, num_states: int) -> None:
        """num_states: number of the target's hidden states whose concatenation it reads."""
        width = config.target_hidden_size
        super().__init__(config.layer, num_states * width)
        self.norm_output, eps = config.norm_output, self.shape.rms_norm_eps
        self.input_norm = RMSNorm(num_states * width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(width, eps) for _ in range(num_states)]) if config.fc_norm else None
        first = _Layer(self.shape, config.norm_before_residual, config.window)
        self.layers = nn.ModuleList([first, *(_DeepLayer(self.shape) for _ in range(config.num_hidden_layers - 1))])
        self.norm = RMSNorm(config.hidden_size, eps)

    @property
    def layer(self) -> _Layer:
        """The first layer, which reads the pairs."""
        found = self.layers[0]
        assert isinstance(found, _Layer)
        return found

    @property
    def deeper(self) -> list[_DeepLayer]:
        """The layers after the first."""
        return [layer for layer in self.layers if isinstance(layer, _DeepLayer)]

    def run(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: Rotary, attends: Sequence[Attend]
    ) -> torch.Tensor:
        """Return the output [B, P, D] of all layers for hidden states and embeddings [B, P, D] each. attends: of each layer."""
        x: torch.Tensor = self.layer(hidden, embedded, rotary, attends[0])
        for layer, attend in zip(self.deeper, attends[1:], strict=True):
            x = layer(x, rotary, attend)
        return x

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features [..., D] of the target's hidden states, [..., num_states * target hidden size]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(states)
        return out

    def unrolled(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Return the inputs of the output layer, [B, P, D] for each step.

        states: [B, P, num_states * target hidden size], the target's at each position. embedded: [B, P + steps - 1, D], embedding
        of the token after each position. Positions after the end of a text may have any values; their outputs are meaningless.
        """
        out = self.features(states)
        count = states.shape[1]
        attends = [_Steps(self.layer.window) for _ in self.layers]
        normed: list[torch.Tensor] = []
        for step in range(steps):
            positions = torch.arange(step, step + count, device=states.device)[None]
            out = self.run(out, embedded[:, step : step + count], self.rotary(out, positions), attends)
            normed.append(self.norm(out))
            out = normed[-1] if self.norm_output else out
        return normed


class _Layer(nn.Module):
    """Attention over pairs, followed by a gated feed-forward network."""

    def __init__(self, shape: LlamaConfig, norm_before_residual: bool, window: int | None) -> None:
        super().__init__()
        width = shape.hidden_size
        self.norm_before_residual, self.window = norm_before_residual, window
        self.input_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.self_attn = Projections(shape, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """Return the output [B, P, D] for hidden states and embeddings [B, P, D] each."""
        normed = self.hidden_norm(hidden)
        attended = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), rotary, attend)
        x = (normed if self.norm_before_residual else hidden) + attended
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _DeepLayer(nn.Module):
    """A layer over the output of the one before it."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        width = shape.hidden_size
        self.input_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.self_attn = Projections(shape, width)
        self.post_attention_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """Transform hidden states [B, P, D]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Steps:
    """Attention of one step's pairs to the first step's pairs up to their position, and to their own chain's later pairs."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See Attend."""
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1 and self._window is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        scale, count, steps = query.shape[-1] ** -0.5, query.shape[2], len(self._keys)
        at = torch.arange(count, device=query.device)
        hidden = at > at[:, None]
        if self._window is not None:
            hidden = hidden | (at <= at[:, None] + steps - 1 - self._window)
        first = (query @ self._keys[0].transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
        own = [(query * one).sum(-1, keepdim=True) * scale for one in self._keys[1:]]
        if self._window is not None:
            own = [one if steps - 1 - i < self._window else one - torch.inf for i, one in enumerate(own, 1)]
        weights = torch.softmax(torch.cat([first, *own], -1), -1)
        attended = weights[..., :count] @ self._values[0]
        for step, one in enumerate(self._values[1:]):
            attended = attended + weights[..., count + step, None] * one
        return attended


class PairModel(DraftModel):
    """Layers over pairs, bound to the target that they were trained for.

    The input at each position is a pair: a token, and in `ModelInput.features` [B, T, D] the features of the target's hidden
    states at the previous position, or what stands for them.
    """

    def __init__(
        self, head: StoredDraft, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized
    ) -> None:
        """See DraftModel."""
        super().__init__(head, target, name=name, make=make)
        module, config = head.module, head.config
        assert isinstance(module, HeadModule) and isinstance(config, HeadConfig)
        first = module.layer
        pair = Pair(self._norm_of(first.input_layernorm), self._norm_of(first.hidden_norm), config.norm_before_residual)
        made = self._layer_of(first.self_attn, first.mlp, first.post_attention_layernorm)
        deeper = [
            self._layer_of(one.self_attn, one.mlp, one.post_attention_layernorm, one.input_layernorm)
            for one in module.deeper
        ]
        self._layers = [
            dataclasses.replace(one, window=config.window, pair=pair if one is made else None)
            for one in (made, *deeper)
        ]
        self._state_norms = [self._norm_of(one) for one in module.fc_norm or ()]
        self._joint_norm = None if module.input_norm is None else self._norm_of(module.input_norm)
        self._feeds_norm = config.norm_output
        activation = str(config.layer.get("hidden_act", "silu"))
        self._native = self._compiled(self._layers, activation, ())
        self.paged = self._on_pages(self._layers, activation, self._states, features=True)
        self._module = self._run_module(module)

    def _states(self, layers: PagedLayers, at: Buffers, pool: PagePool, turns: Mapping[str, Turns]) -> States:
        """Run a pass over pages."""
        from foresay.models.gpu.layers import STATES

        assert at.features is not None
        normed, found = layers.run(at.features, at, pool, turns, embedded=self._embed(at.token_ids))
        return normed, {NEXT: normed if self._feeds_norm else found[STATES], LAST: normed}

    @torch.inference_mode()
    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        if self._joint_norm is not None:
            joint = self._joint_norm(joint)
        if self._state_norms:
            parts = joint.chunk(len(self._state_norms), -1)
            joint = torch.cat([norm(part) for norm, part in zip(self._state_norms, parts, strict=True)], -1)
        return super().features(joint)

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        return self._capabilities(is_native=self._native is not None, alone=True)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass over pairs; see LanguageModel.forward. The output always contains the hidden states NEXT and LAST."""
        assert model_input.features is not None
        if self.paged is not None:
            scores, states = self.paged(dataclasses.replace(model_input, hidden_layers=(NEXT, LAST)), cast(Any, cache))
            return ModelOutput(scores, states, subset=self.subset)
        assert isinstance(cache, SlotCache)
        batch, columns = model_input.token_ids.shape
        at = cache.begin_pass(model_input.first_row, batch, columns, self.device, model_input.parents)
        embedded = self._embed(model_input.token_ids)
        if self._native is not None:
            x, normed = self._by_kernels(self._native, embedded, model_input, at, cache)
        else:
            with attention.during(at):
                x, normed = self._by_module(embedded, model_input.features, at, cache)
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        hidden = {NEXT: normed.to(self.dtype) if self._feeds_norm else x, LAST: normed}
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, hidden)
        return ModelOutput(self._head(model_input.scored(normed)), hidden, subset=self.subset)

    def _by_kernels(
        self, native: NativeLayers, embedded: torch.Tensor, model_input: ModelInput, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = model_input.features
        assert features is not None
        batch, columns = model_input.token_ids.shape
        shape = (batch, columns)
        if not any(model_input.num_tokens):
            return torch.zeros_like(features), torch.zeros_like(features)
        real = None
        if min(model_input.num_tokens) < columns:
            real = torch.arange(columns) < torch.tensor(model_input.num_tokens)[:, None]
        both = torch.cat([embedded, features], -1)
        read = (both.flatten(0, 1) if real is None else both[real]).float()
        flat = read[:, self.width :].clone(memory_format=torch.contiguous_format)  # the kernels overwrite it
        tokens = FlatTokens.of(at, real)
        normed, _ = native.run(
            flat, tokens, cache, {self._layers[0].kind: self._rotary_table(tokens.positions)}, (), read
        )
        return padded(flat.to(self.dtype), real, shape), padded(normed, real, shape)

    def _by_module(
        self, embedded: torch.Tensor, features: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._module
        assert module is not None
        positions = at.positions if len(at.positions) == len(features) else at.positions.expand(len(features), -1)
        mask = causal_mask(self._layers[0].window, features.dtype)
        attends = [over_cache(cache, layer, at, mask) for layer in range(len(self._layers))]
        x = module.run(features, embedded, self._rotary(features, positions), attends)
        return x, module.norm(x)


class HeadModel(PairModel, PagedChains):
    """A draft head: it reads its own output in place of the features of draft tokens."""

    def __init__(
        self, head: StoredDraft, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized
    ) -> None:
        """See DraftModel."""
        super().__init__(head, target, name=name, make=make)
        self._chain = self._compiled_chain()

    def _passes(self) -> PagedPasses | None:
        return self.paged

    def _chain_states(self) -> tuple[int, int | None]:
        return LAST, NEXT

    def _compiled_chain(self) -> NativeChain | None:
        table = table_of(self._embed)
        if not self._native or table is None or not isinstance(self._head, NativeProduct):
            return None
        if self.subset is None and self._head.out_features > self.vocab_size:
            return None
        ids = None if self.subset is None else self.subset.token_ids
        return NativeChain(self._native, table, self._head, ids, self.dtype, feeds_norm=self._feeds_norm)

    @property
    def drafts_at_once(self) -> bool:
        """True if `draft_at_once` is possible."""
        return self._chain is not None and self._rotary_table.until(0) is not None

    def draft_at_once(
        self,
        known: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        most: int,
        ends: Sequence[int],
        rule: StoppingRule,
    ) -> tuple[list[int], list[float]] | None:
        """Draft likeliest tokens in one call, with the bits of single passes: (ids, confidences), or None if it is not possible.

        known: [N] int64, at least one token. features: [N, D], those before each. cache: of one row, to which these pairs are
        added. most: tokens. ends: tokens after which nothing is drafted.
        """
        until = cache.lengths[0] + len(known) + most
        rotary = None if self._chain is None else self._rotary_table.until(until)
        if self._chain is None or rotary is None:
            return None
        out = self._chain.draft(Start(known, features, rotary), cache, most, ends, rule)
        cache.lengths[0] += len(known)
        return out
