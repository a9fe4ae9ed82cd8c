"""Configuration of a draft head (EAGLE-3, Li et al. 2025), in the two layouts of config.json that other engines read.

Owns the field names and defaults of both layouts. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError
from foresay.json_files import Schema, short

NEXT, LAST = 0, 1
"""Keys of a pass's hidden states: NEXT replaces the target's features in the next pass, LAST is the output layer's input."""
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
REQUIRED = ("hidden_size", "num_attention_heads", "intermediate_size")
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
"""Switches of parts that some heads have and that are not supported here."""
MAX_WIDTH, MAX_HEADS, MAX_VOCAB_SIZE = 1 << 18, 1 << 12, 1 << 24
"""Larger than any model's, and small enough that a product of two sizes does not overflow."""
_DRAFT_TOKENS = 5
"""Draft length that an exported configuration recommends to other engines."""

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
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


class LayerFields(BaseModel):
    """Fields of the layer that are validated; all others are ignored."""

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


class Verifier(BaseModel):
    """The target that a file names."""

    name_or_path: str | None = None
    architectures: list[str] | None = None


class Fields(BaseModel):
    """Fields other than the layer's, common to both layouts."""

    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    draft_vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)] | None = None
    target_hidden_size: Width | None = None
    norm_before_residual: bool | None = None


LAYER_SCHEMA: Schema[LayerFields] = Schema(LayerFields, "the layer of a head")
FIELDS: Schema[Fields] = Schema(Fields, "a head's configuration")
LAYERS: Schema[tuple[int, ...] | None] = Schema(
    Annotated[tuple[Annotated[int, Field(ge=0, le=10_000)], ...], Field(min_length=1, max_length=1000)] | None,
    "a list of layers",
)
VERIFIER: Schema[Verifier] = Schema(Verifier, "a verifier")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head of one layer: its shape, the target's hidden states that it reads, and the tokens that it can draft."""

    layer: Mapping[str, Any]
    """Fields of a LlamaConfig."""
    vocab_size: int
    """Vocabulary size of the target."""
    draft_vocab_size: int
    """Number of tokens that it can draft."""
    target_hidden_size: int
    hidden_layers: tuple[int, ...] | None
    """Layers of the target whose hidden states it reads, 0 for the embeddings; None for `usual_layers`."""
    norm_before_residual: bool
    """True if the residual around attention is the normalized input."""
    target: str = ""
    """Name of the target; "" if unknown."""
    target_architectures: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in REQUIRED:
            check_int(name, self.layer.get(name), 1)
        check_int("target_hidden_size", self.target_hidden_size, 1)
        check_int("draft_vocab_size", self.draft_vocab_size, 1, check_int("vocab_size", self.vocab_size, 1))
        check_flag("norm_before_residual", self.norm_before_residual)
        heads = self.layer["num_attention_heads"]
        shared = self.layer.get("num_key_value_heads") or heads
        if heads % shared:
            raise ConfigError(f"num_key_value_heads={shared} must divide num_attention_heads={heads}")
        if not self.layer.get("head_dim") and self.hidden_size % (2 * heads):
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of twice num_attention_heads={heads}")

    @property
    def hidden_size(self) -> int:
        """Size of the head's own hidden states."""
        return int(self.layer["hidden_size"])

    @staticmethod
    def read(values: Mapping[str, Any]) -> HeadConfig:
        """Build from a config.json of either layout. Raises ConfigError that names a missing, invalid or unsupported field."""
        if "transformer_layer_config" in values or "speculators_model_type" in values:
            return _of_speculators(values)
        return _of_plain(values)

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the plain layout."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **self.layer,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "tie_word_embeddings": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": None if self.hidden_layers is None else list(self.hidden_layers),
                "use_aux_hidden_state": True,
            },
        }

    def as_speculators(self) -> dict[str, Any]:
        """Return the config.json of vLLM's speculators layout."""
        layer = {"model_type": "llama", **self.layer, "num_hidden_layers": 1, "vocab_size": self.vocab_size}
        verifier = {"name_or_path": self.target, "architectures": list(self.target_architectures)}
        proposal = {"proposal_type": "greedy", "speculative_tokens": _DRAFT_TOKENS}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": None if self.hidden_layers is None else list(self.hidden_layers),
            "tie_word_embeddings": False,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
        }


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default layers whose hidden states a head reads: an early, the middle and a late one."""
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 6 else (0, num_layers // 2, num_layers - 1)


def _of_plain(values: Mapping[str, Any]) -> HeadConfig:
    eagle = object_of(values, "eagle_config")
    _reject_unsupported(values, eagle)
    if not eagle.get("use_aux_hidden_state", True):
        raise ConfigError(
            "use_aux_hidden_state=false: heads that read only the last hidden state are not supported; it must be true"
        )
    return _build(values, values, eagle.get("eagle_aux_hidden_state_layer_ids"), before_residual=False)


def _of_speculators(values: Mapping[str, Any]) -> HeadConfig:
    kind = values.get("speculators_model_type")
    if kind != "eagle3":
        raise ConfigError(f"speculators_model_type={kind!r} is not supported; it must be 'eagle3'")
    layer = object_of(values, "transformer_layer_config")
    _reject_unsupported(values, layer)
    verifier = VERIFIER.of(object_of(object_of(values, "speculators_config"), "verifier"), "verifier")
    return _build(
        layer,
        {"vocab_size": layer.get("vocab_size"), **values},
        values.get("eagle_aux_hidden_state_layer_ids"),
        before_residual=True,
        target=verifier.name_or_path or "",
        architectures=verifier.architectures or (),
    )


def _build(
    layer: Mapping[str, Any],
    values: Mapping[str, Any],
    layers: Any,
    *,
    before_residual: bool,
    target: str = "",
    architectures: Sequence[str] = (),
) -> HeadConfig:
    """Build a configuration. before_residual: `norm_before_residual` of a file that does not set it."""
    source = "the head's config.json"
    missing = [name for name in REQUIRED if layer.get(name) is None]
    if missing or values.get("vocab_size") is None:
        raise ConfigError(f"{source} has no {(missing or ['vocab_size'])[0]}")
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise ConfigError(f"model_type={kind!r} is not supported for a head's layer; it must be 'llama'")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"num_hidden_layers={layer['num_hidden_layers']}: only heads with one layer are supported")
    LAYER_SCHEMA.of({name: layer.get(name) for name in LayerFields.model_fields}, source)
    fields = FIELDS.of({name: values.get(name) for name in Fields.model_fields}, source)
    return HeadConfig(
        {name: layer[name] for name in LAYER if layer.get(name) is not None},
        fields.vocab_size,
        fields.draft_vocab_size or fields.vocab_size,
        fields.target_hidden_size or layer["hidden_size"],
        LAYERS.of(layers, f"{source}: eagle_aux_hidden_state_layer_ids={short(layers)}"),
        before_residual if fields.norm_before_residual is None else fields.norm_before_residual,
        target,
        tuple(architectures),
    )


def _reject_unsupported(*sections: Mapping[str, Any]) -> None:
    for values in sections:
        for name in _UNSUPPORTED:
            if values.get(name):
                raise ConfigError(
                    f"{name}={values[name]!r}: heads with this part are not supported; it must be false or absent"
                )


def object_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside a config.json; empty if it is missing. Raises ConfigError for another value."""
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} of the head's config.json must be an object, not {short(found)}")
    return found
