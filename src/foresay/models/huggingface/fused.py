"""A Llama-like decoder run without its modules, with as few operations as possible between matrix products.

On a CPU a small model spends most of a forward pass between its matrix products, on about forty small operations per layer and
the Python around them. Owns the pass over the layers that family_layers.py reads from their modules. Weights, in any format, are
shared with the transformers model; masks, attention and cache are the same as in any other pass. Results equal those of the
family's own code up to rounding, which `self_check` verifies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.flat_tokens import FlatTokens
from foresay.models.cpu.layers import NativeLayers
from foresay.models.cpu.product import NativeProduct
from foresay.models.families.table import family_of
from foresay.models.hardware import Hardware
from foresay.models.huggingface.family_layers import NotFusedError, layer_kinds, norm_of, read_layer
from foresay.models.huggingface.layer_inputs import layer_inputs_of
from foresay.models.huggingface.linears import product_of
from foresay.models.huggingface.operations import RotaryTable, attend, causal_mask, feed_forward, rotary_of

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.flat import Buffers
    from foresay.models.gpu.pages import PagePool
    from foresay.models.gpu.passes import Decoder, PagedPasses, States

logger = logging.getLogger("foresay")

_TRUSTED_PACKAGES = ("transformers.", "torch.nn.", "foresay.")
"""Packages whose modules are known to compute what their family defines."""


class FusedDecoder:
    """The layers and output head of a Llama-like model, over the weights of its modules."""

    def __init__(
        self, model: Any, cache_dtype: torch.dtype | None = None, *, position_limit: int | None = None
    ) -> None:
        """cache_dtype: of keys and values; None for the model's. position_limit: number of positions up to which rotary
        frequencies do not change; None if they never do. Raises NotFusedError if the model is not supported.
        """
        config, self._dtype, self._position_limit = model.config, model.dtype, position_limit
        self.cache_dtype: torch.dtype = cache_dtype or self._dtype
        family = family_of(config)
        if family is None:
            raise NotFusedError(f"fused layers do not support the family {config.model_type!r}")
        for part in model.modules():
            if (reason := _customization(part)) is not None:
                raise NotFusedError(reason)
        body = model.base_model
        kinds = layer_kinds(config)
        try:
            self._layers = [read_layer(layer, kind, config) for layer, kind in zip(body.layers, kinds, strict=False)]
            self._norm = norm_of(body.norm if hasattr(body, "norm") else body.embedding_norm)
            self._inputs = layer_inputs_of(body, norm_of)
        except AttributeError as error:
            raise NotFusedError(str(error)) from error
        self._embed = model.get_input_embeddings()
        self._rotary = body.pos_emb if hasattr(body, "pos_emb") else body.rotary_emb
        self._head = product_of(model.get_output_embeddings())
        self._by_kind = isinstance(getattr(self._rotary, "rope_type", None), dict)  # one for each kind of layer
        self._windows = {layer.kind: layer.window for layer in self._layers}
        self._half_turns = family.half_turns
        self._tables = {
            kind: RotaryTable(self._rotary, kind if self._by_kind else None, halves=self._half_turns)
            for kind in {layer.kind for layer in self._layers if layer.mixer is None}
            if self._rotary is not None
        }
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self._residual_scale = float(getattr(config, "residual_multiplier", 1.0))
        self._logits_scale = float(getattr(config, "logits_scaling", 1.0))
        self._final_softcap = getattr(config, "final_logit_softcapping", None)
        self._activation = str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))
        self._check_rotary(model)
        self.paged: PagedPasses | None = None
        """Passes over flat tokens and pages, in place of those over a SlotCache."""
        self._native = self._compiled()
        self.needs_kernels = not all(layer.is_plain for layer in self._layers)
        """True for layers that PyTorch's operations do not compute."""
        if self.needs_kernels and not (self.is_native or Hardware(model.device).gpu_kernels):
            raise NotFusedError("such layers are fused by the compiled kernels only, which do not run this model")

    def __call__(
        self, token_ids: torch.Tensor, at: Placement, cache: SlotCache, model_input: ModelInput
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run one forward pass over token_ids [B, T]; see `TransformersModel._call`."""
        if self._native is not None:
            return self._run_compiled(self._native, token_ids, at, cache, model_input)
        return self.by_operations(
            token_ids, at, cache, model_input.hidden_layers, model_input.logits is not Logits.NONE
        )

    def by_operations(
        self, token_ids: torch.Tensor, at: Placement, cache: SlotCache, wanted: Sequence[int], head: bool = True
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run the pass by PyTorch's operations, none of which depends on a value in a tensor.

        wanted: layers whose hidden states are returned. head: True to compute scores.
        """
        x = self._embed(token_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        positions = at.positions if at.positions.shape[0] == x.shape[0] else at.positions.expand(x.shape[0], -1)
        if self._position_limit is not None:  # padding may exceed it; it is never read
            positions = positions.clamp(max=self._position_limit - 1)
        turns = {kind: rotary_of(*self._cos_sin(x, positions, kind)) for kind in self._tables}
        masks = {kind: causal_mask(window, x.dtype) for kind, window in self._windows.items()}
        scale, states = self._layers[0].query_scale, {}  # that of all layers
        query_scales = None if scale is None else scale.at(positions)
        for i, layer in enumerate(self._layers):
            if i in wanted:
                states[i] = x
            read = x if layer.before_attention is None else layer.before_attention(x)
            x = attend(
                layer,
                x,
                read,
                partial(_write, cache, i, at),
                turns.get(layer.kind),
                masks[layer.kind],
                self._residual_scale,
                query_scales,
            )
            x = feed_forward(layer, x, self._residual_scale)
        x = self._norm(x)
        if len(self._layers) in wanted:
            states[len(self._layers)] = x
        return (self._scores(x) if head else None), states

    def _run_compiled(
        self, native: NativeLayers, token_ids: torch.Tensor, at: Placement, cache: SlotCache, model_input: ModelInput
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run the pass by compiled kernels, over real tokens only; compute scores only where requested."""
        shape = tuple(token_ids.shape)
        if not any(model_input.num_tokens):  # part of a batch in which no row continues
            return self._empty_outputs(shape, model_input)
        counts = torch.tensor(model_input.num_tokens)
        real = None if min(model_input.num_tokens) == shape[1] else torch.arange(shape[1]) < counts[:, None]
        tokens = FlatTokens.of(at, real)
        ids = token_ids.reshape(-1) if real is None else token_ids[real]
        x = self._embed(ids).float()
        inputs = None if self._inputs is None else self._inputs(ids, x)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        turns = {kind: table(tokens.positions) for kind, table in self._tables.items()}
        normed, hidden = native.run(x, tokens, cache, turns, model_input.hidden_layers, inputs=inputs)
        states = {n: padded(state.to(self._dtype), real, shape) for n, state in hidden.items()}
        if model_input.logits is Logits.NONE:
            return None, states
        if model_input.logits is Logits.LAST:
            return self._scores(normed[(counts.cumsum(0) - 1).clamp(min=0)])[:, None], states
        return padded(self._scores(normed), real, shape), states

    def _empty_outputs(
        self, shape: tuple[int, ...], model_input: ModelInput
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return the outputs of a pass without tokens: zeros."""
        state = self._embed(torch.zeros(shape, dtype=torch.int64)).zero_()
        states = {n: state.to(self._dtype) for n in model_input.hidden_layers}
        if model_input.logits is Logits.NONE:
            return None, states
        scores = self._scores(state.float())
        return (scores[:, :1] if model_input.logits is Logits.LAST else scores), states

    def new_cache(self) -> SlotCache | None:
        """Return a cache in the layout of the compiled kernels; None without them."""
        return None if self._native is None else self._native.new_cache()

    def cache_bytes(self, lengths: Sequence[int], shared: int) -> int:
        """Return the bytes of a cache of the compiled kernels. shared: copies of states that a row keeps for others."""
        assert self._native is not None
        return self._native.cache_bytes(lengths, shared)

    def on_pages(self, max_length: int, *, reproducible: bool = True) -> Decoder:
        """Return the parts of passes over flat tokens and pages. max_length: most tokens of a row. reproducible: see LoadOptions.

        Raises LookupError for layers that the kernels for GPUs do not compute.
        """
        from foresay.models.gpu.layers import PagedLayers, check_linear, linear, outputs_of
        from foresay.models.gpu.passes import Decoder

        given = self._layers, self._norm, self._activation, self._residual_scale
        layers = PagedLayers(*given, by_library=not reproducible)
        check_linear(self._head, self._dtype)
        weight, turns = self._norm.weight, {}
        for kind, table in self._tables.items():
            found = table.until(max_length)
            if found is None:
                raise LookupError("rotary frequencies depend on the length of a row")
            turns[kind] = (found[0].to(weight.device), found[1].to(weight.device))

        def states(at: Buffers, pool: PagePool, wanted: Sequence[int]) -> States:
            x = self._embed(at.token_ids)
            inputs = None if self._inputs is None else self._inputs(at.token_ids, x, linear)
            return layers.run(x * self._embedding_scale, at, pool, turns, wanted, inputs=inputs)

        return Decoder(
            states=states,
            scores=lambda states: self._scaled(linear(self._head, states, by_library=not reproducible)),
            layers=layers.shapes,
            heads=self._layers[0].heads,
            like=weight.new_empty(0, len(weight)),
            num_scores=outputs_of(self._head),
        )

    @property
    def is_native(self) -> bool:
        """True if the layers run on kernels compiled for this machine."""
        return self._native is not None

    def _compiled(self) -> NativeLayers | None:
        """Return the layers over the compiled kernels; None if the kernels do not support them."""
        weight = self._norm.weight
        if not Hardware(weight.device).on_cpu:
            return None
        try:
            native = NativeLayers(self._layers, self._norm, self._activation, self._residual_scale, self.cache_dtype)
            if not isinstance(self._head, NativeProduct):  # its bits would depend on the other rows
                raise LookupError(f"the kernels do not support an output head of type {type(self._head).__name__}")
            return native
        except LookupError as error:
            logger.info("fused layers run on PyTorch's operations instead of compiled kernels: %s", error)
            return None

    def _check_rotary(self, model: Any) -> None:
        """Raise ValueError if rotary positions cover more dimensions than a head has, or an odd number."""
        position = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        for layer in {layer.kind: layer for layer in self._layers if layer.rotates}.values():
            width = self._cos_sin(position.float(), position, layer.kind)[0].shape[-1]
            if width % 2 or width > layer.dim:
                raise ValueError(
                    f"rotary positions cover {width} dimensions of a head; allowed is an even number up to head_dim={layer.dim}"
                )

    def _cos_sin(self, like: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions [B, T] for a kind of layer, [B, T, R] in the dtype of `like`."""
        cos, sin = self._rotary(like, positions, kind) if self._by_kind else self._rotary(like, positions)
        return (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if self._half_turns else (cos, sin)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(self._head(x))

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits_scale != 1.0:
            logits = logits / self._logits_scale
        if self._final_softcap is not None:
            logits = torch.tanh(logits / self._final_softcap) * self._final_softcap
        return logits


def padded(flat: torch.Tensor, real: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """Scatter rows [N, width] of the real tokens to [B, T, width], with zeros elsewhere."""
    if real is None:
        return flat.view(*shape, flat.shape[-1])
    out = flat.new_zeros(*shape, flat.shape[-1])
    out[real] = flat
    return out


def _customization(part: Any) -> str | None:
    """Return why a module may compute something else than its family's code, or None."""
    if (
        part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook")
    ):  # hooks of PyTorch and of accelerate
        return "it has hooks on its modules"
    if "forward" in vars(part):
        return f"the forward of one of its {type(part).__name__} modules was replaced"
    if not type(part).__module__.startswith(_TRUSTED_PACKAGES):
        return f"its {type(part).__name__} is a custom module"
    return None


def state_of(model: Any) -> list[tuple[int, bool]]:
    """Return a fingerprint of a model's structure.

    It changes if the model is hooked, patched or moved, or if a module or weight is replaced, but not if weights are trained.
    Fused passes bypass a model's modules, so a model that the caller may change is compared with its earlier state.
    """
    out = []
    for part in model.modules():
        out.append((id(part), _customization(part) is None))
        out += [
            (weight.data_ptr(), Hardware(weight.device).on_cpu)
            for weight in part._parameters.values()
            if weight is not None
        ]
    return out


def _write(
    cache: SlotCache, layer: int, at: Placement, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.write(layer, keys, values, at)
