"""The fields of a draft's config.json: one model of all that any kind has, and published layouts as tables of their names.

A layout names our fields as its files do, by the section that is written with them; any section of a file may have any of them.
Owns ranges, and the comparison of two statements of one fact. Knows no kind of draft and no tensor.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from foresay.errors import ConfigError, shown
from foresay.json_files import Schema

logger = logging.getLogger("foresay")

LAYER = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
)
"""Fields of a LlamaConfig that describe a draft's layers."""
FULL, SLIDING = "full_attention", "sliding_attention"
OFF = (False, None)
LAYER_PARTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias"), OFF),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_multiplier"), (None,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "embedding_multiplier", "residual_multiplier"), (None, 1)),
}
"""Fields of layers that are not supported, such as latent attention, and the values that select none of them."""
MAX_BLOCK = 64
"""Most positions of a block."""
MAX_WIDTH, MAX_HEADS, MAX_VOCAB_SIZE = 1 << 18, 1 << 12, 1 << 24
"""Larger than any model's, and small enough that a product of two sizes does not overflow."""
_TOP = "config.json"
_YIELDS = {"tie_word_embeddings": ("transformer_layer_config", _TOP), "model_type": (_TOP, "transformer_layer_config")}
"""Fields that two sections of a file may set differently: the first of them does not count if the second one has it."""
_WITHOUT_EFFECT = (
    *("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "name_or_path"),
    *("model_type", "speculators_version", "speculators_model_type", "speculators_config", "rope_theta"),
    *("rope_scaling", "eagle_config", "dflash_config", "transformer_layer_config", "quantization_config"),
    *("attn_implementation", "has_lm_head", "has_no_defaults_at_init", "embed_requires_grad", "loss_decay_gamma"),
    *("max_anchors", "num_anchors", "attention_dropout", "use_cache", "max_window_layers", "draft_length"),
    *("_attn_implementation_autoset", "confidence_head_with_markov"),
)
"""Fields that are read elsewhere, or describe training and files."""

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
VocabularySize = Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
Rank = Annotated[int, Field(ge=0, le=1 << 16)]
Length = Annotated[int, Field(ge=1, le=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Whole = Annotated[float, Field(ge=1, le=1)]
"""Share of a head's dimensions that are rotated: all of them."""
Factors = Annotated[list[Positive], Field(max_length=MAX_WIDTH)]
Rope = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


class _Rotary(BaseModel):
    """Parameters of the rotary embedding. The kind may be named `rope_type` or `type`."""

    model_config = ConfigDict(extra="allow")

    rope_type: Rope | None = None
    type: Rope | None = None
    rope_theta: Positive | None = None
    factor: Annotated[float, Field(ge=1, le=1e6)] | None = None
    partial_rotary_factor: Whole | None = None
    original_max_position_embeddings: Length | None = None
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


def _as_it_is(value: Any, check: Callable[[Any], object]) -> Any:
    check(value)
    return value


Rotary = Annotated[_Rotary, WrapValidator(_as_it_is)]


class Fields(BaseModel):
    """Every field of a draft's configuration, under our name; None for one that its file does not set."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    hidden_size: Width
    num_attention_heads: Heads
    intermediate_size: Width
    num_key_value_heads: Heads | None = None
    head_dim: Annotated[int, Field(ge=2, le=MAX_HEADS, multiple_of=2)] | None = None
    hidden_act: Annotated[str, Field(max_length=100)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    rope_theta: Positive | None = None
    rope_scaling: Rotary | None = None
    rope_parameters: Rotary | None = None
    partial_rotary_factor: Whole | None = None
    rope_is_neox_style: bool | None = None
    """False if rotary positions turn neighbouring numbers of a head, not its halves."""
    max_position_embeddings: Length | None = None
    model_type: str | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] | None = None
    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    sliding_window: Length | None = None
    vocab_size: VocabularySize
    draft_vocab_size: VocabularySize | None = None
    target_hidden_size: Width | None = None
    hidden_layers: Annotated[list[Annotated[int, Field(ge=-1, le=10_000)]], Field(max_length=1000)] | None = None
    """Layers of the target, 0 for the embeddings."""
    tie_word_embeddings: bool | None = None
    target: str | None = None
    target_architectures: list[str] | None = None
    # heads
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    # block drafters
    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK)] | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    projector_type: str | None = None
    markov_rank: Rank | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    sample_from_anchor: bool | None = None
    emb_dim: Width | None = None
    gru_hidden_dim: Width | None = None
    pure_draft_prefix_len: Annotated[int, Field(ge=0, le=MAX_BLOCK)] | None = None
    conv_kernel_size: Annotated[int, Field(ge=0, le=MAX_BLOCK)] | None = None
    conv_group_size: Annotated[int, Field(ge=0, le=MAX_WIDTH)] | None = None
    selector_rank: Rank | None = None
    selector_top_k: Annotated[int, Field(ge=0, le=1024)] | None = None
    input_embedding_scale: Positive | None = None
    keeps_embedding_factor: bool | None = None
    output_multiplier: Positive | None = None
    final_logit_softcapping: Annotated[float, Field(ge=0, le=1e12)] | None = None
    names: dict[str, str] = {}
    """The file's names of fields, for errors."""

    @property
    def layer(self) -> dict[str, Any]:
        """Fields of a LlamaConfig for the layers."""
        return {name: value for name in LAYER if (value := getattr(self, name)) is not None}

    def windows(self, count: int) -> list[int | None]:
        """Return the window of each of `count` layers, None for all positions. Raises ConfigError for other kinds of layers.

        As vLLM reads them: with `layer_types`, or in all layers with use_sliding_window=true alone.
        """
        kinds = self.layer_types or [SLIDING if self.use_sliding_window else FULL] * count
        if unknown := [one for one in kinds if one not in (FULL, SLIDING)]:
            raise ConfigError(f"must be {FULL!r} or {SLIDING!r} in a draft", param="layer_types", value=unknown[0])
        if len(kinds) != count:
            raise ConfigError(
                f"has {len(kinds)} layers, but num_hidden_layers={count}", param="layer_types", value=kinds
            )
        if SLIDING in kinds and self.sliding_window is None:
            raise ConfigError("is missing for the layers with a sliding window", param="sliding_window")
        return [self.sliding_window if one == SLIDING else None for one in kinds]


_SCHEMA: Schema[Fields] = Schema(Fields, "a draft's configuration")


def checked(found: Mapping[str, Any], source: str, needed: tuple[str, ...] = ()) -> Fields:
    """Validate fields by our names. Raises ConfigError that names a missing or invalid one. needed: besides the required ones."""
    required = [name for name, one in Fields.model_fields.items() if one.is_required()]
    if missing := [name for name in (*required, *needed) if found.get(name) is None]:
        raise ConfigError("is missing", param=f"{source}: {missing[0]}")
    given = {name: one for name, one in found.items() if one is not None}
    try:
        fields = _SCHEMA.of(given, source)
    except ConfigError:
        for name in sorted(given.keys() & given.get("names", {}).keys()):
            kind: Any = Fields.model_fields[name].rebuild_annotation()
            Schema[Any](dict[str, kind], _SCHEMA.noun).of({given["names"][name]: given[name]}, source)
        raise
    parts = {name: getattr(fields, name) or {} for name in ("rope_parameters", "rope_scaling")}
    for part in parts.values():
        _one("rope_type", {"rope_type": part, "type": {"rope_type": part.get("type")}})
    for name in sorted({name for part in parts.values() for name in part} - {"type"}):
        _one(name, {**parts, "the layer": {"rope_theta": fields.rope_theta}})
    return fields


def _one(name: str, sections: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the value of a field that some sections state. Raises ConfigError for two of them."""
    return _agreed([(place, name, one[name]) for place, one in sections.items() if one.get(name) is not None])


def _agreed(statements: list[tuple[str, str, Any]]) -> Any:
    """Return the value of equal statements, as (section, name, value). Raises ConfigError that names two that differ."""
    (first, name, value), *others = statements or [("", "", None)]
    for place, other_name, other in others:
        if other != value or isinstance(other, bool) != isinstance(value, bool):
            near = (f" in {place}", f" in {first}") if name == other_name else ("", "")
            text = f"{near[0]} contradicts {name}={shown(value)}{near[1]}".strip()
            raise ConfigError(text, param=other_name, value=other)
    return value


def same(*names: str) -> dict[str, str]:
    """Return the part of a table whose fields have our names."""
    return dict(zip(names, names, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A published layout of config.json."""

    noun: str
    """Such drafts, for errors."""
    tables: Mapping[str, Mapping[str, str]]
    """Section -> our field -> its name there; "" for the top. A dot leads into a section whose names count in it alone."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Further names of fields in files -> ours."""
    allowed: Mapping[str, tuple[Any, ...]]
    """Their names of fields of which not every value is supported -> the values that are."""
    unread: tuple[str, ...] = ()
    """Fields without an effect, besides those of all layouts."""
    embeddings: int = 0
    """Number of the target's embeddings among its layers."""

    def read(self, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the fields of a config.json by our names, as they are. Raises ConfigError for two values of one, and for one
        that is not supported; logs fields that are neither read nor without an effect. source: for errors and the log.
        """
        tables = {name: table for name, table in self.tables.items() if "." not in name}
        opened = {name or _TOP: _object_at(values, name) for name in tables}
        names = {**same(*self.allowed), **self.others}
        names |= {theirs: ours for table in tables.values() for ours, theirs in table.items()}
        stated: dict[str, list[tuple[str, str, Any]]] = {}
        for place, section in opened.items():
            for name, value in section.items():
                if name in names and value is not None:
                    stated.setdefault(names[name], []).append((place, name, value))
        found = {}
        for ours, statements in stated.items():
            weaker, stronger = _YIELDS.get(ours, ("", ""))
            is_decided = any(place == stronger for place, *_ in statements)
            found[ours] = _agreed([one for one in statements if one[0] != weaker or not is_decided])
        for name, allowed in self.allowed.items():
            if found.get(names[name]) not in allowed:
                listed = " or ".join(map(shown, allowed))
                raise ConfigError(
                    f"is not supported for {self.noun}; it must be {listed}", param=name, value=found.get(names[name])
                )
        self._report(opened, {*names, *self.unread}, source)
        for name, table in self.tables.items():
            if "." in name:
                section = _object_at(values, name)
                found |= {ours: section[theirs] for ours, theirs in table.items() if theirs in section}
        found["names"] = {ours: statements[0][1] for ours, statements in stated.items()}
        return self._with_layers({name: one for name, one in found.items() if name in Fields.model_fields}, source)

    def _with_layers(self, found: dict[str, Any], source: str) -> dict[str, Any]:
        """Count the target's layers from 0 for the embeddings."""
        layers = found.get("hidden_layers")
        if layers is None:
            return found
        is_list = isinstance(layers, list) and bool(layers)
        if not is_list or any(type(one) is not int or one < self.embeddings for one in layers):
            name = next(table["hidden_layers"] for table in self.tables.values() if "hidden_layers" in table)
            text = f"must be numbers of layers from {self.embeddings} on"
            raise ConfigError(text, param=f"{source}: {name}", value=layers)
        return {**found, "hidden_layers": [one - self.embeddings for one in layers]}

    def _report(self, sections: Mapping[str, Mapping[str, Any]], known: set[str], source: str) -> None:
        from transformers import LlamaConfig

        declared = {*known, *_WITHOUT_EFFECT, *inspect.signature(LlamaConfig).parameters}
        if unknown := sorted({name for one in sections.values() for name in one if name not in declared}):
            logger.warning("fields of %s that are not known are ignored: %s", source, ", ".join(unknown))

    def write(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sections of a config.json with fields by our names. None is written as such."""
        layers = found.get("hidden_layers")
        values = {**found, "hidden_layers": None if layers is None else [one + self.embeddings for one in layers]}
        out: dict[str, Any] = {}
        for name, table in self.tables.items():
            part = out
            for step in name.split(".") if name else ():
                part = part.setdefault(step, {})
            part |= {theirs: values[ours] for ours, theirs in table.items() if ours in values}
        return out


def _object_at(values: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for name in path.split(".") if path else ():
        values = object_of(values, name)
    return values


def object_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside a config.json; empty if it is missing. Raises ConfigError for another value."""
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError("must be an object in a draft's config.json", param=name, value=found)
    return found
