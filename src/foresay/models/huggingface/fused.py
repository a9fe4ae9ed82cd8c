"""A Llama-like decoder run without its modules: what lies between two matrix products in as few operations as can be.

On a CPU most of a small model's pass is spent between its products, on some forty small operations a layer and the Python
around them. Owns which families are alike enough, where their modules keep what a layer is made of, and the pass over it. The
weights are those of the transformers model, whatever their format; masks, attention and cache are those of any other pass.
What it computes is what the family's own code computes, rounded in other places: `self_check` compares the two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.gated_layer import GatedLayer, Norm, Product
from foresay.models.cpu.layers import FlatTokens, NativeLayers
from foresay.models.cpu.product import CompiledProduct
from foresay.models.huggingface.linears import product_of
from foresay.models.huggingface.operations import attend, causal_mask, feed_forward, turn_of

logger = logging.getLogger("foresay")

FULL, SLIDING = "full_attention", "sliding_attention"
_BY_LAYER = frozenset({"qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3"})
_ALL_ALIKE = frozenset({"mistral", "phi3"})
"""Families in which every layer slides where the configuration has a window."""
FAMILIES = _BY_LAYER | _ALL_ALIKE | {"llama", "gemma", "olmo2", "granite"}
"""model_type of the families whose layers are read here; the tests compare each with its own code."""
_WRITTEN_IN = ("transformers.", "torch.nn.", "foresay.")
"""Where the code of modules is that are what their families say."""


class FusedDecoder:
    """The body and head of a Llama-like model, over the modules' own weights."""

    def __init__(self, model: Any) -> None:
        """Raises NotFusedError for a model that cannot be read so."""
        config = model.config
        if config.model_type not in FAMILIES:
            raise NotFusedError(f"family {config.model_type!r} has code of its own")
        for part in model.modules():
            if (why := _not_as_written(part)) is not None:
                raise NotFusedError(why)
        body = model.base_model
        kinds = _kinds(config)
        try:
            self._layers = [_read(layer, kind, config) for layer, kind in zip(body.layers, kinds, strict=False)]
            self._norm = _norm_of(body.norm)
        except AttributeError as error:
            raise NotFusedError(str(error)) from error
        self._embed, self._rotary = model.get_input_embeddings(), body.rotary_emb
        self._head = product_of(model.get_output_embeddings())
        self._by_kind = config.model_type == "gemma3_text"  # which rotates by layer type
        self._windows = {layer.kind: layer.window for layer in self._layers}
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self._residual_scale = float(getattr(config, "residual_multiplier", 1.0))
        self._logits_scale = float(getattr(config, "logits_scaling", 1.0))
        self._final_softcap = getattr(config, "final_logit_softcapping", None)
        self._dtype = model.dtype
        self._check_rotary(model)
        self._native = self._compiled(config)

    def __call__(
        self, token_ids: torch.Tensor, at: Placement, cache: SlotCache, model_input: ModelInput
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """One pass over token_ids [B, T], as `TransformersModel._call`."""
        if self._native is not None:
            return self._in_one_call(self._native, token_ids, at, cache, model_input)
        return self.by_operations(
            token_ids, at, cache, model_input.hidden_layers, model_input.logits is not Logits.NONE
        )

    def by_operations(
        self, token_ids: torch.Tensor, at: Placement, cache: SlotCache, wanted: Sequence[int], head: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """The pass by PyTorch's operations, none of which depends on a number in a tensor. head: whether scores are wanted."""
        x = self._embed(token_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        positions = at.positions if at.positions.shape[0] == x.shape[0] else at.positions.expand(x.shape[0], -1)
        turns = {kind: turn_of(*self._waves(x, positions, kind)) for kind in self._windows}
        masks = {kind: causal_mask(window, x.dtype) for kind, window in self._windows.items()}
        states = {}
        for i, layer in enumerate(self._layers):
            if i in wanted:
                states[i] = x
            read = x if layer.before_attention is None else layer.before_attention(x)
            x = attend(
                layer,
                x,
                read,
                partial(_write, cache, i, at),
                turns[layer.kind],
                masks[layer.kind],
                self._residual_scale,
            )
            x = feed_forward(layer, x, self._residual_scale)
        x = self._norm(x)
        if len(self._layers) in wanted:
            states[len(self._layers)] = x
        return (self._scores(x) if head else None), states

    def _in_one_call(
        self, native: NativeLayers, token_ids: torch.Tensor, at: Placement, cache: SlotCache, model_input: ModelInput
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """The pass by compiled kernels: over the real tokens alone, and scores where they are asked for."""
        shape = tuple(token_ids.shape)
        if not any(model_input.num_tokens):  # a part of a batch in which nobody goes on
            return self._nothing(shape, model_input)
        counts = torch.tensor(model_input.num_tokens)
        real = None if min(model_input.num_tokens) == shape[1] else torch.arange(shape[1]) < counts[:, None]
        tokens = FlatTokens.of(at, real)
        x = self._embed(token_ids.reshape(-1) if real is None else token_ids[real]).float()
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        waves = {kind: self._waves(x[:0], tokens.positions[None], kind) for kind in self._windows}
        turns = {kind: (cos[0].contiguous(), sin[0].contiguous()) for kind, (cos, sin) in waves.items()}
        normed, seen = native.run(x, tokens, cache, turns, model_input.hidden_layers)
        states = {n: padded(state.to(self._dtype), real, shape) for n, state in seen.items()}
        if model_input.logits is Logits.NONE:
            return None, states
        if model_input.logits is Logits.LAST:
            return self._scores(normed[(counts.cumsum(0) - 1).clamp(min=0)])[:, None], states
        return padded(self._scores(normed), real, shape), states

    def _nothing(
        self, shape: tuple[int, ...], model_input: ModelInput
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """What a pass over no token gives: zeros."""
        state = self._embed(torch.zeros(shape, dtype=torch.int64)).zero_()
        states = {n: state.to(self._dtype) for n in model_input.hidden_layers}
        if model_input.logits is Logits.NONE:
            return None, states
        scores = self._scores(state.float())
        return (scores[:, :1] if model_input.logits is Logits.LAST else scores), states

    def new_cache(self) -> SlotCache | None:
        """A cache laid out for the compiled kernels; None without them."""
        return None if self._native is None else self._native.new_cache()

    @property
    def compiled(self) -> bool:
        """Whether the layers run over kernels compiled for this machine."""
        return self._native is not None

    def _compiled(self, config: Any) -> NativeLayers | None:
        """The layers over the compiled kernels, where there are kernels for them."""
        weight = self._norm.weight
        if weight.device.type != "cpu":
            return None
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        try:
            native = NativeLayers(self._layers, self._norm, str(activation), self._residual_scale, self._dtype)
            if not isinstance(self._head, CompiledProduct):  # its bits would depend on the rows beside
                raise LookupError(f"no kernels for a head of {type(self._head).__name__}")
            return native
        except LookupError as error:
            logger.info("lean passes are made of PyTorch's operations: %s", error)
            return None

    def _check_rotary(self, model: Any) -> None:
        """Raise ValueError where rotary positions turn more than a head, or an odd number of dimensions."""
        place = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        for layer in {layer.kind: layer for layer in self._layers if layer.rotates}.values():
            width = self._waves(place.float(), place, layer.kind)[0].shape[-1]
            if width % 2 or width > layer.dim:
                raise ValueError(
                    f"rotary positions turn {width} dimensions of each head; head_dim={layer.dim} allows an even number up to it"
                )

    def _waves(self, like: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions [B, T] for a kind of layer, [B, T, R] in the dtype of `like`."""
        found: tuple[torch.Tensor, torch.Tensor] = (
            self._rotary(like, positions, kind) if self._by_kind else self._rotary(like, positions)
        )
        return found

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._head(x)
        if self._logits_scale != 1.0:
            logits = logits / self._logits_scale
        if self._final_softcap is not None:
            logits = torch.tanh(logits / self._final_softcap) * self._final_softcap
        return logits


def padded(flat: torch.Tensor, real: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """[N, width] of the real tokens -> [B, T, width], zeros elsewhere."""
    if real is None:
        return flat.view(*shape, flat.shape[-1])
    out = flat.new_zeros(*shape, flat.shape[-1])
    out[real] = flat
    return out


class NotFusedError(Exception):
    """Why a model is left to its own code."""


def _not_as_written(part: Any) -> str | None:
    """Why calling a module may do something else than its family's code says; None where it does not."""
    if part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook"):  # PyTorch's, and accelerate's
        return "it has hooks on its modules"
    if "forward" in vars(part):
        return f"a forward of its own was given to one of its {type(part).__name__}"
    if not type(part).__module__.startswith(_WRITTEN_IN):
        return f"{type(part).__name__} is code of its own"
    return None


def state_of(model: Any) -> list[tuple[int, bool]]:
    """What changes when a model is hooked, patched, moved, or has a part or a weight replaced, but not when weights are trained.

    Lean passes go around a model's modules, so one that is somebody else's too is compared with what it was.
    """
    out = []
    for part in model.modules():
        out.append((id(part), _not_as_written(part) is None))
        out += [
            (weight.data_ptr(), weight.device.type == "cpu")
            for weight in part._parameters.values()
            if weight is not None
        ]
    return out


def _kinds(config: Any) -> list[str]:
    count = int(config.num_hidden_layers)
    if config.model_type in _BY_LAYER:
        kinds = list(config.layer_types)
        if set(kinds) - {FULL, SLIDING}:
            raise NotFusedError(f"its layers are of the kinds {', '.join(sorted(set(kinds)))}")
        return kinds
    slides = config.model_type in _ALL_ALIKE and getattr(config, "sliding_window", None) is not None
    return [SLIDING if slides else FULL] * count


def _read(layer: Any, kind: str, config: Any) -> GatedLayer:
    attn, mlp = layer.self_attn, layer.mlp
    four = hasattr(layer, "pre_feedforward_layernorm")
    first = getattr(layer, "input_layernorm", None)
    two = four or first is None  # norms after attention and feed-forward
    return GatedLayer(
        kind=kind,
        before_attention=None if first is None else _norm_of(first),
        qkv=_joint(attn, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        heads=(int(config.num_attention_heads), int(config.num_key_value_heads)),
        dim=int(attn.head_dim),
        q_norm=_norm_of(attn.q_norm) if hasattr(attn, "q_norm") else None,
        k_norm=_norm_of(attn.k_norm) if hasattr(attn, "k_norm") else None,
        wide_norm=config.model_type == "olmo2",
        rotates=bool(getattr(attn, "use_rope", True)),
        window=config.sliding_window if kind == SLIDING else None,
        scaling=float(attn.scaling),
        softcap=getattr(attn, "attn_logit_softcapping", None),
        output=product_of(attn.o_proj),
        after_attention=_norm_of(layer.post_attention_layernorm) if two else None,
        before_mlp=_norm_of(layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm)
        if four or not two
        else None,
        gate_up=_joint(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        activation=getattr(mlp, "act_fn", None) or mlp.activation_fn,
        down=product_of(mlp.down_proj),
        after_mlp=_norm_of(layer.post_feedforward_layernorm) if two else None,
    )


def _joint(parent: Any, whole: str, parts: Sequence[str]) -> Product:
    """One product for layers that read the same input."""
    return product_of(*([getattr(parent, whole)] if hasattr(parent, whole) else [getattr(parent, n) for n in parts]))


def _norm_of(module: Any) -> Norm:
    """A family's root-mean-square norm. Gemma's weights are what is added to one."""
    eps = getattr(module, "variance_epsilon", None)
    return Norm(
        module.weight.detach(),
        float(module.eps if eps is None else eps),
        type(module).__name__.startswith("Gemma"),
    )


def _write(
    cache: SlotCache, layer: int, at: Placement, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.write(layer, keys, values, at)
