"""A block drafter bound to its target, with its own slot cache.

The cache has the keys and values of the target's hidden states: one slot for each committed position but the last. A block is
computed in the slots after them, and its entries are overwritten later. Owns the forward pass, which uses the compiled CPU
kernels if available and PyTorch operations otherwise. The drafter supplies the hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import KVCache, LanguageModel, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError
from foresay.models.blocks.files import Block, check_block
from foresay.models.blocks.module import BlockLayer
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.gated_layer import GatedLayer, Norm
from foresay.models.cpu.layers import FlatTokens, NativeLayers
from foresay.models.cpu.product import NativeProduct, Product
from foresay.models.heads.model import FEATURE_ROWS, DenseProduct, target_rows
from foresay.models.huggingface import attention, linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import MakeProduct, unquantized
from foresay.models.huggingface.operations import RotaryTable, attend, feed_forward, rotary_of
from foresay.threads import all_threads

LAST = 1
"""Key of the hidden states that the output layer reads."""


class BlockModel(LanguageModel):
    """A block drafter, bound to the target that it was trained for. B rows, T positions of a block, width D, K tokens."""

    def __init__(self, block: Block, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized) -> None:
        """name: of the target, for errors. make: builds the products. Raises ConfigError if the drafter does not fit the
        target."""
        config, module, self.target = block.config, block.module, target
        width = int(target.model.config.get_text_config(decoder=True).hidden_size)
        check_block(config, target.vocab_size, width, target.num_layers, name)
        self.config, self.hidden_layers, self.width = config, config.hidden_layers, width
        self.vocab_size, self.max_length, self.device = target.vocab_size, target.max_length, target.device
        self.dtype, self._make = target.model.dtype, make
        self.subset = (
            None if block.token_ids is None else VocabularySubset.of(block.token_ids.to(self.device), self.vocab_size)
        )
        self._fc, self._feature_norm = self._product(module.fc.weight), self._norm_of(module.hidden_norm)
        layers = module.block_layers
        self._layers, self._norm = [self._layer(one) for one in layers], self._norm_of(module.norm)
        attentions = [layer.self_attn for layer in layers]
        self._context = self._product(*(one.weight for a in attentions for one in (a.k_proj, a.v_proj)))
        """Keys and values of the context features in all layers, in one product."""
        self._key_norms = [None if a.k_norm is None else self._norm_of(a.k_norm) for a in attentions]
        self._rotary = module.rotary.to(self.device)
        self._rotary_table = RotaryTable(self._rotary)
        own = module.embed_tokens
        self._embed = target.model.get_input_embeddings() if own is None else own.to(self.device, self.dtype)
        head = target_rows(target, block.token_ids) if module.lm_head is None else module.lm_head.weight
        if len(head) != config.draft_vocab_size:
            raise ConfigError(
                f"the block drafter drafts {config.draft_vocab_size} tokens, but the output layer of {name!r} has "
                f"{len(head)} rows"
            )
        self._head = self._product(head)
        markov = module.markov_head
        self._markov_rows = None if markov is None else markov.markov_w1.weight.detach().to(self.device, self.dtype)
        self._markov = None if markov is None else self._product(markov.markov_w2.weight)
        confidence = module.confidence_head
        self._confidence = None
        if confidence is not None:
            weight, bias = confidence.proj.weight, confidence.proj.bias
            self._confidence = weight[0].detach().to(self.device).float(), float(bias.detach()[0])
        self._native = self._compiled(str(config.layer.get("hidden_act", "silu")))
        self.num_parameters = sum(weight.numel() for weight in module.parameters())

    def _product(self, *weights: torch.Tensor) -> Product:
        weight = torch.cat([one.detach().to(self.device, self.dtype) for one in weights])
        quantized = self._make is not unquantized
        if self.device.type == "cpu" and (quantized or linears.available(self.dtype, self.device)):
            return self._make(weight, None)
        return DenseProduct(weight)

    def _norm_of(self, norm: torch.nn.Module) -> Norm:
        assert isinstance(norm, torch.nn.RMSNorm) and norm.weight is not None
        return Norm(norm.weight.detach().to(self.device, self.dtype).contiguous(), float(norm.eps or 0.0))

    def _layer(self, layer: BlockLayer) -> GatedLayer:
        attn, mlp = layer.self_attn, layer.mlp
        return GatedLayer(
            kind="full_attention",
            before_attention=self._norm_of(layer.input_layernorm),
            qkv=self._product(attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight),
            heads=(attn.heads, attn.key_heads),
            dim=attn.dim,
            q_norm=None if attn.q_norm is None else self._norm_of(attn.q_norm),
            k_norm=None if attn.k_norm is None else self._norm_of(attn.k_norm),
            wide_norm=False,
            rotates=True,
            window=None,
            scaling=attn.dim**-0.5,
            softcap=None,
            output=self._product(attn.o_proj.weight),
            after_attention=None,
            before_mlp=self._norm_of(layer.post_attention_layernorm),
            gate_up=self._product(mlp.gate_proj.weight, mlp.up_proj.weight),
            activation=mlp.activation,
            down=self._product(mlp.down_proj.weight),
            after_mlp=None,
        )

    def _compiled(self, activation: str) -> NativeLayers | None:
        products = (self._head, self._context, self._fc, self._markov or self._head)
        if self.device.type != "cpu" or not all(isinstance(one, NativeProduct) for one in products):
            return None
        try:
            return NativeLayers(self._layers, self._norm, activation, 1.0, self.dtype)
        except LookupError:
            return None

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        native = self._native is not None
        return Capabilities(trees=True, num_layers=LAST, ragged=native, own_threads=native)

    def new_cache(self) -> SlotCache:
        """Return a cache without rows."""
        return SlotCache() if self._native is None else self._native.new_cache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert isinstance(cache, SlotCache)
        cache.add_rows(len(rows) - first)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Not supported: blocks are computed by `run_block`."""
        raise NotImplementedError

    def joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the target's hidden states, given as layer -> [..., D], as one vector for each position, [..., L * D]."""
        return torch.cat([hidden[layer].to(self.device, self.dtype) for layer in self.hidden_layers], -1)

    @torch.inference_mode()
    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the context features [n, D] of the target's hidden states, [n, L * D]; see `joined`."""
        return self._feature_norm(self._in_parts(self._fc, joint))

    def _in_parts(self, product: Product, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [n, in], on a CPU without kernels in parts of a fixed size, so that bits do not depend on n."""
        if self._native is not None or self.device.type != "cpu":
            return product(x)
        filled = F.pad(x, (0, 0, 0, -len(x) % FEATURE_ROWS))
        with all_threads():
            parts = [product(part) for part in filled.view(-1, FEATURE_ROWS, x.shape[-1])]
        return torch.cat([*parts, x.new_empty(0, product.out_features)])[: len(x)]

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
        joint = self._in_parts(self._context, features).to(self.dtype).view(len(features), -1, 2, heads, dim)
        keys = joint[:, :, 0]
        normed = [keys[:, i] if norm is None else norm(keys[:, i]) for i, norm in enumerate(self._key_norms)]
        cos, sin = (one[:, None] for one in self._cos_sin(positions))
        turned = torch.stack([_rotate(one.float(), cos, sin).to(self.dtype) for one in normed])
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
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = self._in_parts(self._head, flat)
        return found.view(*hidden.shape[:-1], -1)

    @torch.inference_mode()
    def after(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the logits that the Markov head adds after previous tokens, [...] int64 -> [..., K]; None without one."""
        if self._markov is None or self._markov_rows is None:
            return None
        rows = self._markov_rows[tokens]
        return self._in_parts(self._markov, rows.reshape(-1, rows.shape[-1])).view(*tokens.shape, -1)

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


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [n, heads, dim] by cosines and sines [n, 1, dim]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
