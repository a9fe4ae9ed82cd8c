"""Fields of a draft's config.json that are validated, whatever its kind and layout. Knows no tensor."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foresay.errors import ConfigError, shown
from foresay.json_files import Schema

logger = logging.getLogger("foresay")

_WITHOUT_EFFECT = (
    *("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "name_or_path"),
    *(
        "model_type",
        "speculators_version",
        "speculators_model_type",
        "speculators_config",
        "rope_theta",
        "rope_scaling",
    ),
    *("eagle_config", "dflash_config", "transformer_layer_config", "quantization_config", "attn_implementation"),
    *(
        "has_lm_head",
        "has_no_defaults_at_init",
        "embed_requires_grad",
        "loss_decay_gamma",
        "max_anchors",
        "num_anchors",
    ),
    *("attention_dropout", "use_cache", "max_window_layers", "_attn_implementation_autoset", "draft_length"),
)
"""Fields that are read elsewhere, or describe training and files."""
LAYER = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "attention_bias",
)
"""Fields of a LlamaConfig that describe a draft's layers."""
READ_ELSEWHERE = ("tie_word_embeddings", "rope_is_neox_style", "is_neox_style", "confidence_head_with_markov")
"""Fields that files.py reads next to the tensors."""
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_PARTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias"), (False, None)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_multiplier"), (None,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "embedding_multiplier", "residual_multiplier"), (None, 1, 1.0)),
}
"""Fields of layers that are not supported, such as latent attention, and the values that select none of them."""
BLOCKS = ("dflash", "dspark", "dflash2")
"""Kinds of block drafters in the speculators layout."""
REQUIRED = ("hidden_size", "num_attention_heads", "intermediate_size")
MAX_WIDTH, MAX_HEADS, MAX_VOCAB_SIZE = 1 << 18, 1 << 12, 1 << 24
"""Larger than any model's, and small enough that a product of two sizes does not overflow."""

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
VocabularySize = Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Whole = Annotated[float, Field(ge=1, le=1)]
"""Share of a head's dimensions that are rotated: all of them."""
Factors = Annotated[list[Positive], Field(max_length=MAX_WIDTH)]


class _Rotary(BaseModel):
    """Parameters of the rotary embedding. The kind may be named `rope_type` or `type`."""

    model_config = ConfigDict(extra="allow")

    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    rope_theta: Positive | None = None
    factor: Annotated[float, Field(ge=1, le=1e6)] | None = None
    partial_rotary_factor: Whole | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=2**31)] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None


class _Layer(BaseModel):
    """Fields of the layers that are validated; all others are ignored."""

    model_config = ConfigDict(allow_inf_nan=False)

    hidden_size: Width
    num_attention_heads: Heads
    intermediate_size: Width
    num_key_value_heads: Heads | None = None
    head_dim: Annotated[int, Field(ge=2, le=MAX_HEADS, multiple_of=2)] | None = None
    hidden_act: Annotated[str, Field(max_length=100)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    rope_theta: Positive | None = None
    rope_scaling: _Rotary | None = None
    rope_parameters: _Rotary | None = None
    partial_rotary_factor: Whole | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**31)] | None = None


class Fields(BaseModel):
    """Fields other than the layers', of any kind of draft."""

    vocab_size: VocabularySize
    draft_vocab_size: VocabularySize | None = None
    target_hidden_size: Width | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None


class _Windows(BaseModel):
    """Positions that the layers' tokens attend to."""

    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    sliding_window: Annotated[int, Field(ge=1, le=1 << 31)] | None = None


class _Verifier(BaseModel):
    """The target that a file names."""

    name_or_path: str | None = None
    architectures: list[str] | None = None


WINDOWS = tuple(_Windows.model_fields)
"""Fields of the positions that layers attend to."""
_LAYER_SCHEMA: Schema[_Layer] = Schema(_Layer, "the layers of a draft")
_FIELDS: Schema[Fields] = Schema(Fields, "a draft's configuration")
_WINDOWS: Schema[_Windows] = Schema(_Windows, "the windows of a draft's layers")
_VERIFIER: Schema[_Verifier] = Schema(_Verifier, "a verifier")
_LAYERS: Schema[tuple[int, ...] | None] = Schema(
    Annotated[tuple[Annotated[int, Field(ge=-1, le=10_000)], ...], Field(min_length=1, max_length=1000)] | None,
    "a list of layers",
)
"""Layers of the target, -1 or 0 for the embeddings."""


def check_layer(layer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of a draft's layers. Raises ConfigError that names a missing or invalid one; source: for errors."""
    missing = [name for name in REQUIRED if layer.get(name) is None]
    if missing:
        raise ConfigError("is missing", param=f"{source}: {missing[0]}")
    _LAYER_SCHEMA.of({name: layer.get(name) for name in _Layer.model_fields}, source)
    _check_positions(layer)
    return {name: layer[name] for name in LAYER if layer.get(name) is not None}


def _check_positions(layer: Mapping[str, Any]) -> None:
    """Raise ConfigError if the parameters of rotary positions are stated twice and differ."""
    parts = {name: layer.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for part in parts.values():
        merged({"rope_type": part, "type": {"rope_type": part.get("type")}}, ["rope_type"])
    names = {name for part in parts.values() for name in part} - {"type"}
    merged({**parts, "the layer": {"rope_theta": layer.get("rope_theta")}}, sorted(names))


def fields_of(values: Mapping[str, Any], source: str) -> Fields:
    """Return the fields other than the layers'. Raises ConfigError as `check_layer` does."""
    if values.get("vocab_size") is None:
        raise ConfigError("is missing", param=f"{source}: vocab_size")
    return _FIELDS.of({name: values.get(name) for name in Fields.model_fields}, source)


def windows_of(layer: Mapping[str, Any], count: int, source: str) -> list[int | None]:
    """Return the window of each of `count` layers, None for all positions. Raises ConfigError for other kinds of layers.

    As vLLM reads them: with `layer_types`, or in all layers with use_sliding_window=true alone.
    """
    found = _WINDOWS.of({name: layer.get(name) for name in _Windows.model_fields}, source)
    kinds = found.layer_types or [SLIDING if found.use_sliding_window else FULL] * count
    if unknown := [one for one in kinds if one not in (FULL, SLIDING)]:
        raise ConfigError(f"must be {FULL!r} or {SLIDING!r} in a draft", param="layer_types", value=unknown[0])
    if len(kinds) != count:
        raise ConfigError(f"has {len(kinds)} layers, but num_hidden_layers={count}", param="layer_types", value=kinds)
    if SLIDING in kinds and found.sliding_window is None:
        raise ConfigError("is missing for the layers with a sliding window", param=f"{source}: sliding_window")
    return [found.sliding_window if one == SLIDING else None for one in kinds]


def layers_of(values: Mapping[str, Any], name: str, source: str, *, least: int = 0) -> tuple[int, ...] | None:
    """Return the target's layers that a field lists; None if it is missing. least: the number of the embeddings."""
    found = values.get(name)
    layers = _LAYERS.of(found, f"{source}: {name}={shown(found)}")
    if layers is not None and min(layers) < least:
        raise ConfigError(f"must be numbers of layers from {least} on", param=f"{source}: {name}", value=found)
    return layers


def object_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside a config.json; empty if it is missing. Raises ConfigError for another value."""
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError("must be an object in a draft's config.json", param=name, value=found)
    return found


def verifier_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target that a file of vLLM's speculators layout names, as arguments of a configuration."""
    found = _VERIFIER.of(object_of(object_of(values, "speculators_config"), "verifier"), "verifier")
    return {"target": found.name_or_path or "", "target_architectures": tuple(found.architectures or ())}


def merged(sections: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return the fields with some names, whichever section of a file has them. Raises ConfigError for two values of one field.

    sections: by their names, for errors.
    """
    out = dict[str, Any]()
    for name in names:
        found = {place: one[name] for place, one in sections.items() if one.get(name) is not None}
        (first, value), *others = found.items() or [("", None)]
        for place, other in others:
            if other != value:
                raise ConfigError(f"in {place} contradicts {name}={shown(value)} in {first}", param=name, value=other)
        if found:
            out[name] = value
    return out


def report_unread(sections: Iterable[Mapping[str, Any]], known: Collection[str], source: str) -> None:
    """Log the fields of a draft's sections that are neither read nor without an effect. source: the draft, for the log."""
    from transformers import LlamaConfig

    declared = {*known, *_WITHOUT_EFFECT, *inspect.signature(LlamaConfig).parameters}
    if unknown := sorted({name for one in sections for name in one if name not in declared}):
        logger.warning("fields of %s that are not known are ignored: %s", source, ", ".join(unknown))


def refuse_parts(values: Mapping[str, Any], parts: Mapping[str, tuple[Any, ...]], noun: str) -> None:
    """Raise ConfigError for a field that selects a part which is not supported. parts: the values that select none."""
    for name, allowed in parts.items():
        if values.get(name) not in allowed:
            raise ConfigError(f"is not supported: {noun} must not have this part", param=name, value=values[name])
