"""A draft head as a LanguageModel with its own slot cache, scoring the target's vocabulary.

Owns the forward pass, which uses the compiled CPU kernels if available and PyTorch operations otherwise. The drafter supplies the
hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.continuation import Branching, Continuation, Drawn
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.chain import Limits, NativeChain, Start, table_of
from foresay.models.cpu.gated_layer import GatedLayer, Norm
from foresay.models.cpu.layers import FirstLayerNorms, FlatTokens, NativeLayers
from foresay.models.cpu.product import NativeProduct, Product
from foresay.models.heads.config import LAST, NEXT
from foresay.models.heads.files import Head, check_target
from foresay.models.huggingface import attention, linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.fused import padded
from foresay.models.huggingface.linears import MakeProduct, unquantized
from foresay.models.huggingface.operations import RotaryTable, attend, causal_mask, feed_forward, rotary_of
from foresay.threads import all_threads

FEATURE_ROWS = 16
"""Positions whose features one PyTorch product on the CPU computes; always the same number, see `HeadModel.features`."""


class HeadModel(LanguageModel):
    """A draft head, bound to the target that it was trained for.

    Its input at each position is a pair: a token, and in `ModelInput.features` [B, T, D] the features of the target's hidden
    states at the previous position, or the head's own output there.
    """

    def __init__(self, head: Head, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized) -> None:
        """name: of the target, for errors. make: builds the products. Raises ConfigError if the head does not fit the target."""
        config, self.target = head.config, target
        width = int(target.model.config.get_text_config(decoder=True).hidden_size)
        self.hidden_layers = check_target(config, target.vocab_size, width, target.num_layers, name)
        """Layers of the target whose hidden states it reads."""
        if len(self.hidden_layers) != head.module.num_states:
            raise ConfigError(
                f"the head's fc.weight reads {head.module.num_states} hidden states, but {len(self.hidden_layers)} layers are "
                "configured; eagle_aux_hidden_state_layer_ids in its config.json must list one for each"
            )
        self.vocab_size, self.max_length, self.device = target.vocab_size, target.max_length, target.device
        self.dtype, self._make = target.model.dtype, make
        self._subset = (
            None if head.token_ids is None else VocabularySubset.of(head.token_ids.to(self.device), self.vocab_size)
        )
        module = head.module
        self._fc = self._product(module.fc.weight)
        self._layer, self._norm = self._build_layer(head), self._norm_of(module.norm)
        first = module.layer
        self._token_norm, self._feature_norm = self._norm_of(first.input_layernorm), self._norm_of(first.hidden_norm)
        self._norm_before_residual = config.norm_before_residual
        self._rotary = module.rotary.to(self.device)
        self._rotary_table = RotaryTable(self._rotary)
        self._embed = (
            target.model.get_input_embeddings()
            if module.embed_tokens is None
            else module.embed_tokens.to(self.device, self.dtype)
        )
        self._head = self._product(self._head_weight(head))
        self._native = self._compiled(str(config.layer.get("hidden_act", "silu")))
        self._chain = self._compiled_chain()
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

    def _build_layer(self, head: Head) -> GatedLayer:
        layer = head.module.layer
        attn, mlp = layer.self_attn, layer.mlp
        return GatedLayer(
            kind="full_attention",
            before_attention=None,
            qkv=self._product(attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight),
            heads=(attn.heads, attn.key_heads),
            dim=attn.dim,
            q_norm=None,
            k_norm=None,
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

    def _head_weight(self, head: Head) -> torch.Tensor:
        if head.module.lm_head is not None:
            return head.module.lm_head.weight
        return target_rows(self.target, head.token_ids)

    def _compiled(self, activation: str) -> NativeLayers | None:
        if self.device.type != "cpu" or not isinstance(self._head, NativeProduct):
            return None
        try:
            first_norms = FirstLayerNorms((self._token_norm, self._feature_norm), self._norm_before_residual)
            return NativeLayers([self._layer], self._norm, activation, 1.0, self.dtype, first_norms=first_norms)
        except LookupError:
            return None

    def _compiled_chain(self) -> NativeChain | None:
        table = table_of(self._embed)
        if self._native is None or table is None or not isinstance(self._head, NativeProduct):
            return None
        if self._subset is None and self._head.out_features > self.vocab_size:
            return None
        return NativeChain(
            self._native, table, self._head, None if self._subset is None else self._subset.token_ids, self.dtype
        )

    @property
    def drafts_at_once(self) -> bool:
        """True if `draft_at_once` is possible."""
        return self._chain is not None and self._rotary_table.until(0) is not None

    def draft_at_once(
        self,
        known: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        limits: Limits,
        rule: Continuation | Branching,
    ) -> Drawn | None:
        """Draft likeliest tokens after the known ones in one call, with the bits of single passes; None if it is not possible.

        known: [N] int64, at least one token. features: [N, D], those before each. cache: of one row, to which these pairs are
        added. rule: of a chain or of a tree.
        """
        until = cache.lengths[0] + len(known) + limits.most
        rotary = None if self._chain is None else self._rotary_table.until(until)
        if self._chain is None or rotary is None:
            return None
        out = self._chain.draft(Start(known, features, rotary), cache, limits, rule)
        cache.lengths[0] += len(known)
        return out

    @property
    def width(self) -> int:
        """Size D of the head's own hidden states."""
        return int(self._norm.weight.shape[0])

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        native = self._native is not None
        joint = native or self.device.type != "cpu"
        return Capabilities(trees=True, num_layers=LAST, prefill_together=joint, ragged=native, own_threads=native)

    def new_cache(self) -> SlotCache:
        """Return a cache without rows."""
        return SlotCache() if self._native is None else self._native.new_cache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert isinstance(cache, SlotCache)
        cache.add_rows(len(rows) - first)

    def joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the target's hidden states, given as layer -> [..., H], as one vector for each position, [..., L * H]."""
        return torch.cat([hidden[layer].to(self.device, self.dtype) for layer in self.hidden_layers], -1)

    @torch.inference_mode()
    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the features [..., D] of the target's hidden states, [..., L * H]; see `joined`."""
        if self._native is not None or self.device.type != "cpu":
            out: torch.Tensor = self._fc(joint)
            return out
        # PyTorch's summation order depends on the number of rows: a fixed number makes the bits independent of it
        flat = joint.reshape(-1, joint.shape[-1])
        filled = F.pad(flat, (0, 0, 0, -len(flat) % FEATURE_ROWS))
        with all_threads():
            parts = [self._fc(part) for part in filled.view(-1, FEATURE_ROWS, flat.shape[-1])]
        return torch.cat([*parts, flat[:0, : self.width]])[: len(flat)].view(*joint.shape[:-1], self.width)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass over pairs; see LanguageModel.forward. The output always contains the hidden states NEXT and LAST."""
        assert isinstance(cache, SlotCache) and model_input.features is not None
        batch, columns = model_input.token_ids.shape
        if self._native is None and self.device.type == "cpu" and (batch > 1 or columns == 1):
            return self._row_by_row(model_input, cache)
        at = cache.begin_pass(model_input.first_row, batch, columns, self.device, model_input.parents)
        embedded = self._embed(model_input.token_ids)
        if self._native is not None:
            x, normed = self._by_kernels(self._native, embedded, model_input, at, cache)
        else:
            with attention.during(at):
                x, normed = self._by_operations(embedded, model_input.features, at, cache)
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        hidden = {NEXT: x, LAST: normed}
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, hidden)
        return ModelOutput(self._head(model_input.scored(normed)), hidden, subset=self._subset)

    def _row_by_row(self, model_input: ModelInput, cache: SlotCache) -> ModelOutput:
        """Run a pass row by row with at least two columns, so that a row's bits do not depend on the batch or pass size."""
        outputs = []
        for i, count in enumerate(model_input.num_tokens):
            one = model_input.part(i, i + 1)
            assert one.features is not None
            if model_input.token_ids.shape[1] > 1:
                outputs.append(self.forward(one, cache))
                continue
            pair = dataclasses.replace(
                one,
                token_ids=one.token_ids.expand(1, 2),
                features=one.features.expand(1, 2, -1),
                parents=None,
                num_tokens=[count],
            )
            twice = self.forward(pair, cache)
            scores = None if twice.logits is None else twice.logits[:, :1]
            outputs.append(ModelOutput(scores, {n: states[:, :1] for n, states in twice.hidden.items()}))
        hidden = {n: torch.cat([one.hidden[n] for one in outputs]) for n in (NEXT, LAST)}
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, hidden)
        scores = torch.cat([one.logits for one in outputs if one.logits is not None])
        return ModelOutput(scores, hidden, subset=self._subset)

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
        normed, _ = native.run(flat, tokens, cache, {self._layer.kind: self._rotary_table(tokens.positions)}, (), read)
        return padded(flat.to(self.dtype), real, shape), padded(normed, real, shape)

    def _by_operations(
        self, embedded: torch.Tensor, features: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._feature_norm(features)
        read = torch.cat([self._token_norm(embedded), normed], -1)
        x = normed if self._norm_before_residual else features
        positions = at.positions if at.positions.shape[0] == x.shape[0] else at.positions.expand(x.shape[0], -1)
        rotary = rotary_of(*self._rotary(x, positions))
        write = partial(cache.write, 0, at=at)
        x = attend(self._layer, x, read, write, rotary, causal_mask(None, x.dtype))
        x = feed_forward(self._layer, x)
        return x, self._norm(x)


class DenseProduct:
    """A product computed by PyTorch from the unpacked weight."""

    bias: torch.Tensor | None = None

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.bits, self.nbytes = 8.0 * weight.element_size(), weight.numel() * weight.element_size()
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        return F.linear(x, self._weight)

    def dense(self) -> torch.Tensor:
        """Return the weight [out, in]."""
        return self._weight


def target_rows(target: CausalModel, token_ids: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """Return the rows [K, H] of a target's output layer for some tokens, or all rows for None.

    Raises UnsupportedModelError if the target has no output layer over its whole vocabulary.
    """
    layer = target.model.get_output_embeddings()
    weight = None if layer is None else linears.weight_of(layer)
    if weight is None or target.subset is not None:
        raise UnsupportedModelError(
            f"{type(target.model).__name__} has no output layer over its whole vocabulary to share"
        )
    return weight if token_ids is None else weight[torch.as_tensor(token_ids, device=weight.device)]
