"""A block drafter (DFlash, DFlash2; DSpark) bound to its target, with its own slot cache; block_module.py has the weights.

A block follows an anchor, a position whose token is known. Its first input is the anchor's token, the others are mask tokens. In
every layer the keys and values are those of the target's hidden states at all positions before the anchor, and of the block
itself, all of which each of its positions attends to, unless the layer has a window or is causal. DSpark adds the Markov and the
confidence head, DFlash2 convolutions inside the block and a candidate selector (path.py). The cache has one slot for each
committed position but the last; a block is computed in the slots after them, and its entries are overwritten later. Knows no loss
and no data; the drafter supplies the hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.devices import is_remote, moved
from foresay.decoding.protocols import KVCache, ModelInput, ModelOutput
from foresay.errors import ConfigError
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.flat_tokens import FlatTokens
from foresay.models.cpu.layers import NativeLayers
from foresay.models.drafts.base import LAST, StoredDraft, over_cache
from foresay.models.drafts.block_config import BlockConfig, Sight
from foresay.models.drafts.block_module import BlockLayer, BlockModule
from foresay.models.drafts.blocks import DraftsBlocks
from foresay.models.drafts.layers import rotate
from foresay.models.drafts.path import MarkovHead, Step
from foresay.models.gpu.capture import capture_on
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import MakeProduct, unquantized
from foresay.models.layer import Convolution, Layer

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.flat import Buffers
    from foresay.models.gpu.layers import PagedLayers, Turns
    from foresay.models.gpu.pages import PagePool
    from foresay.models.gpu.passes import PagedPasses, States


class BlockModel(DraftsBlocks):
    """A block drafter, bound to the target that it was trained for. B rows, T positions of a block, width D, K tokens."""

    config: BlockConfig

    def __init__(
        self, block: StoredDraft, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized
    ) -> None:
        """See DraftModel."""
        super().__init__(block, target, name=name, make=make)
        config, module = block.config, block.module
        assert isinstance(module, BlockModule) and isinstance(config, BlockConfig)
        self.config, self._feature_norm = config, self._norm_of(module.hidden_norm)
        if (found := self._head.out_features) != config.draft_vocab_size:
            text = f"differs from the {found} rows of the output layer of {name!r}"
            raise ConfigError(text, param="draft_vocab_size", value=config.draft_vocab_size)
        layers = module.block_layers
        self._layers = [self._block_layer(one) for one in layers]
        attentions = [layer.self_attn for layer in layers]
        self._context = self._product(*(one.weight for a in attentions for one in (a.k_proj, a.v_proj)))
        """Keys and values of the context features in all layers, in one product."""
        self._key_norms = [None if a.k_norm is None else self._norm_of(a.k_norm) for a in attentions]
        self._path = None if module.path is None else copy.deepcopy(module.path).to(self.device, self.dtype)
        self.state_size = 0 if self._path is None else self._path.state_size
        weights = [] if self._path is None else self._path.requires_grad_(False).products()
        self._of_path = {id(weight): self._product(weight) for weight in weights}
        confidence = module.confidence_head
        self._confidence = None
        if confidence is not None:
            weight, bias = confidence.proj.weight, confidence.proj.bias
            self._confidence = weight[0].detach().to(self.device).float(), float(bias.detach()[0])
        products = (self._context, self._fc, *self._of_path.values(), *_projections(self._layers))
        activation = str(config.layer.get("hidden_act", "silu"))
        self._native = self._compiled(self._layers, activation, products)
        self.paged = self._on_pages(self._layers, activation, self._states, features=False)
        self._module = self._run_module(module)
        self._context_passes = self._over_context(self.paged) if self.paged else None

    def _states(self, layers: PagedLayers, at: Buffers, pool: PagePool, turns: Mapping[str, Turns]) -> States:
        """Run a pass over pages."""
        normed, _ = layers.run(self._embed(at.token_ids) * self.config.embedding_scale, at, pool, turns)
        return normed, {LAST: normed}

    def _over_context(self, block: PagedPasses) -> PagedPasses:
        """Return passes that write keys and values of context features to the block's pages."""
        from foresay.models.gpu.passes import MAX_ROWS, PagedPasses
        from foresay.models.gpu.rows import place

        table = self._rotary_table.until(self.max_length)
        assert table is not None
        turns = table[0].to(self.device), table[1].to(self.device)

        def states(at: Buffers, pool: PagePool, wanted: Sequence[int]) -> States:
            assert at.features is not None
            seen, dim = at.visible, self._layers[0].dim
            joint = self.multiplied(self._context, at.features).view(len(at.features), len(self._layers), -1, dim)
            for i, norm in enumerate(self._key_norms):
                pair = None if norm is None else ((norm.float32(), norm.eps),) * 2
                place(
                    joint[:, i].contiguous(),
                    pool.keys[i],
                    pool.values[i],
                    turns,
                    seen.positions,
                    at.slots,
                    seen.rows,
                    seen.pages,
                    pair,
                )
            return at.features, {}

        decoder = replace(block.decoder, states=states, features=True)
        return PagedPasses(
            decoder,
            block.pool,
            rows=MAX_ROWS,
            max_length=self.max_length,
            device=self.device,
            capture=capture_on(self.device),
        )

    def _block_layer(self, layer: BlockLayer) -> Layer:
        convs = [
            None
            if one is None
            else Convolution(self._product(one.kernel_projection.weight), self._plain(one.base_kernel))
            for one in (layer.attention_conv, layer.mlp_conv)
        ]
        return replace(
            self._layer_of(layer.self_attn, layer.mlp, layer.post_attention_layernorm, layer.input_layernorm),
            window=layer.sight.window,
            causal=layer.sight.causal,
            attention_conv=convs[0],
            mlp_conv=convs[1],
        )

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        return self._capabilities(is_native=self._native is not None)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Not supported: blocks are computed by `run_block`."""
        raise NotImplementedError

    @torch.inference_mode()
    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the context features [n, D] of the target's hidden states, [n, L * D]; see `joined`."""
        return self._feature_norm(self.multiplied(self._fc, joint))

    @torch.inference_mode()
    def add_context(self, features: Sequence[torch.Tensor | None], cache: KVCache) -> None:
        """See DraftsBlocks."""
        if self._context_passes is not None:
            self._add_to_pages(self._context_passes, features, cache)
            return
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

    def _add_to_pages(self, passes: PagedPasses, features: Sequence[torch.Tensor | None], cache: KVCache) -> None:
        counts = [0 if one is None else len(one) for one in features]
        if not any(counts):
            return
        padded = torch.zeros(len(counts), max(counts), self.width, dtype=self.dtype, device=self.device)
        for row, one in enumerate(features):
            if one is not None:
                padded[row, : len(one)] = one
        ids = torch.zeros(padded.shape[:2], dtype=torch.int64, device=self.device)
        with passes.pool.lock:
            passes.flat(ModelInput(ids, counts, features=padded), cast(Any, cache), scored=False, captured=True)

    def _context_states(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of context features [n, D] in all layers, [L, key heads, n, dim] each."""
        layer = self._layers[0]
        heads, dim = layer.heads[1], layer.dim
        joint = self.multiplied(self._context, features).to(self.dtype).view(len(features), -1, 2, heads, dim)
        keys = joint[:, :, 0]
        normed = [keys[:, i] if norm is None else norm(keys[:, i]) for i, norm in enumerate(self._key_norms)]
        cos, sin = (one[:, None] for one in self._cos_sin(positions))
        turned = torch.stack([rotate(one.float(), cos, sin).to(self.dtype) for one in normed])
        return turned.transpose(1, 2), joint[:, :, 1].permute(1, 2, 0, 3)

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, [n, R] float32 each."""
        if not is_remote(self.device):
            return self._rotary_table(positions)
        cos, sin = self._rotary(torch.empty(0, device=self.device), positions[None])
        return cos[0].float(), sin[0].float()

    @torch.inference_mode()
    def run_block(self, tokens: Sequence[int], lengths: Sequence[int], cache: KVCache) -> torch.Tensor:
        """See DraftsBlocks."""
        batch, columns = len(tokens), max(lengths)
        ids = torch.full((batch, columns), self.config.mask_token_id, dtype=torch.int64)
        ids[:, 0] = torch.tensor(tokens)
        if self.paged is not None:
            return self._block_on_pages(self.paged, moved(ids, self.device), lengths, cache)
        assert isinstance(cache, SlotCache)
        return self._block(ids.to(self.device), lengths, cache)

    def _block_on_pages(
        self, passes: PagedPasses, ids: torch.Tensor, lengths: Sequence[int], cache: KVCache
    ) -> torch.Tensor:
        from foresay.models.gpu.passes import in_rows

        shape, before = (ids.shape[0], ids.shape[1]), list(cache.lengths)
        if not any(lengths):
            return torch.zeros(*shape, self.width, dtype=self.dtype, device=self.device)
        given = ModelInput(ids, lengths, hidden_layers=(LAST,))
        with passes.pool.lock:
            columns, (_, hidden) = passes.flat(given, cast(Any, cache), scored=False, captured=True)
            cache.truncate(before)  # a block is written over
            return in_rows(hidden[LAST], columns, shape)

    def _block(self, ids: torch.Tensor, lengths: Sequence[int], cache: SlotCache) -> torch.Tensor:
        batch, columns = ids.shape
        at = cache.begin_pass(0, batch, columns, self.device)
        counts = torch.tensor(lengths, device=self.device)
        real = torch.arange(columns, device=self.device) < counts[:, None]
        ends = at.slots[:, :1] + counts[:, None] - 1
        embedded = self._embed(ids) * self.config.embedding_scale
        if self._native is not None:
            return self._by_kernels(self._native, embedded, at, real, ends, cache)
        with attention.during(at):
            return self._by_module(embedded, at, ends, cache)

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
        tokens = replace(FlatTokens.of(at, real), ends=ends.expand(at.slots.shape)[real].contiguous())
        normed, _ = native.run(embedded[real].float(), tokens, cache, {self._layers[0].kind: turns}, ())
        out[real] = normed.to(self.dtype)
        return out

    def _by_module(self, embedded: torch.Tensor, at: Placement, ends: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        assert self._module is not None
        x, rotary = embedded, self._rotary(embedded, at.positions)
        masks = {sight: _mask(sight, ends, x.dtype) for sight in set(self.config.sights)}
        for index, layer in enumerate(self._module.block_layers):
            x = layer(x, rotary, over_cache(cache, index, at, masks[layer.sight]), at.columns)
        out: torch.Tensor = self._module.norm(x)
        return out

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """See DraftsBlocks."""
        return self.config.scaled(self.multiplied(self._head, hidden))

    @torch.inference_mode()
    def after(
        self,
        scores: torch.Tensor,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        index: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftsBlocks."""
        if self._path is None:
            return scores, state
        at = Step(scores, hidden, previous, self._embed(previous), index, state)
        return self._path.step(at, lambda weight, x: self.multiplied(self._of_path[id(weight)], x))

    @torch.inference_mode()
    def acceptance(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """See DraftsBlocks."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        logits = (hidden.float() * weight[: self.width]).sum(-1) + bias
        if self.config.confidence_reads_markov and isinstance(self._path, MarkovHead):
            logits = logits + (self._path.markov_w1.weight[tokens].float() * weight[self.width :]).sum(-1)
        return torch.sigmoid(logits)


def _projections(layers: Sequence[Layer]) -> Iterator[Any]:
    """The products of the layers' convolutions."""
    for layer in layers:
        yield from (one.projection for one in (layer.attention_conv, layer.mlp_conv) if one is not None)


def _mask(sight: Sight, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of the current pass over blocks whose last positions are ends [B, 1]."""

    def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        out = (key <= ends[:, :, None, None]).expand(-1, -1, query.shape[2], -1)
        out = out & (key <= query) if sight.causal else out
        return out if sight.window is None else out & (key > query - sight.window)

    out: torch.Tensor = attention.additive_mask(mask_function=seen, dtype=dtype)
    return out
