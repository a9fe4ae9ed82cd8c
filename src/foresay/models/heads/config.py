"""What a head on hidden states is, and the two ways of writing it down that others read (METHODS.md section 8).

Owns the names of both layouts of config.json and the defaults of either. Knows no tensor.
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
"""Hidden states of a head's pass: what its next one reads in place of the target's, and what scores are made of."""
_LAYER = (
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
_NEEDED = ("hidden_size", "num_attention_heads", "intermediate_size")
_UNREAD = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
"""Parts that some heads have beyond the layout."""
MAX_WIDTH, MAX_HEADS, MAX_VOCAB_SIZE = 1 << 18, 1 << 12, 1 << 24
"""Larger than any model's, and small enough that every product of two sizes can be computed."""
_GUESSES = 5
"""Tokens that other engines draft with a head unless told otherwise."""

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Factors = Annotated[list[Positive], Field(max_length=MAX_WIDTH)]


class _Rotary(BaseModel):
    """Parameters of the rotary embedding; either name of its kind is read."""

    model_config = ConfigDict(extra="allow")

    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    rope_theta: Positive | None = None
    factor: Annotated[float, Field(ge=1, le=1e6)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
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
    """Fields of the layer; what else a configuration has is not read."""

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
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**31)] | None = None


class _Verifier(BaseModel):
    name_or_path: str | None = None
    architectures: list[str] | None = None


class _Whole(BaseModel):
    """Fields other than the layer's, in either layout."""

    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    draft_vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)] | None = None
    target_hidden_size: Width | None = None
    norm_before_residual: bool | None = None


_LAYER_SCHEMA: Schema[_Layer] = Schema(_Layer, "the layer of a head")
_WHOLE: Schema[_Whole] = Schema(_Whole, "a head's configuration")
_LAYERS: Schema[tuple[int, ...] | None] = Schema(
    Annotated[tuple[Annotated[int, Field(ge=0, le=10_000)], ...], Field(min_length=1, max_length=1000)] | None,
    "a list of layers",
)
_VERIFIER: Schema[_Verifier] = Schema(_Verifier, "a verifier")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head of one layer: its shape, what it reads and what it can write."""

    layer: Mapping[str, Any]
    """Fields of a LlamaConfig."""
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Tokens that it can write."""
    target_hidden_size: int
    hidden_layers: tuple[int, ...] | None
    """The target's hidden states that it reads, 0 the embeddings; None: `usual_layers`."""
    norm_before_residual: bool
    """Whether what goes around attention is normed."""
    target: str = ""
    """The target's name, as far as known."""
    target_architectures: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in _NEEDED:
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
        """Width of its own hidden states."""
        return int(self.layer["hidden_size"])

    @staticmethod
    def read(values: Mapping[str, Any]) -> HeadConfig:
        """From the object of either config.json. Raises ConfigError, naming the field, for what is missing or not read here."""
        if "transformer_layer_config" in values or "speculators_model_type" in values:
            return _of_speculators(values)
        return _of_plain(values)

    def as_plain(self) -> dict[str, Any]:
        """The plain layout."""
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
        """The layout of vLLM's speculators."""
        layer = {"model_type": "llama", **self.layer, "num_hidden_layers": 1, "vocab_size": self.vocab_size}
        verifier = {"name_or_path": self.target, "architectures": list(self.target_architectures)}
        proposal = {"proposal_type": "greedy", "speculative_tokens": _GUESSES}
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
    """Which hidden states a head reads where nobody says: those of an early, the middle and a late layer."""
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 6 else (0, num_layers // 2, num_layers - 1)


def _of_plain(values: Mapping[str, Any]) -> HeadConfig:
    eagle = _object(values, "eagle_config")
    _refuse_unread(values, eagle)
    if not eagle.get("use_aux_hidden_state", True):
        raise ConfigError("use_aux_hidden_state=false: a head that reads the last hidden state alone is not read here")
    return _made(values, values, eagle.get("eagle_aux_hidden_state_layer_ids"), before_residual=False)


def _of_speculators(values: Mapping[str, Any]) -> HeadConfig:
    kind = values.get("speculators_model_type")
    if kind != "eagle3":
        raise ConfigError(f"speculators_model_type={kind!r}: only 'eagle3' is read here")
    layer = _object(values, "transformer_layer_config")
    _refuse_unread(values, layer)
    verifier = _VERIFIER.of(_object(_object(values, "speculators_config"), "verifier"), "verifier")
    return _made(
        layer,
        {"vocab_size": layer.get("vocab_size"), **values},
        values.get("eagle_aux_hidden_state_layer_ids"),
        before_residual=True,
        target=verifier.name_or_path or "",
        architectures=verifier.architectures or (),
    )


def _made(
    layer: Mapping[str, Any],
    values: Mapping[str, Any],
    layers: Any,
    *,
    before_residual: bool,
    target: str = "",
    architectures: Sequence[str] = (),
) -> HeadConfig:
    """before_residual: whether the residual around attention is normed, if the file does not state it."""
    place = "the head's config.json"
    missing = [name for name in _NEEDED if layer.get(name) is None]
    if missing or values.get("vocab_size") is None:
        raise ConfigError(f"{place} has no {(missing or ['vocab_size'])[0]}")
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise ConfigError(f"model_type={kind!r}: the layer of a head is a 'llama' layer here")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"num_hidden_layers={layer['num_hidden_layers']}: a head has one layer here")
    _LAYER_SCHEMA.of({name: layer.get(name) for name in _Layer.model_fields}, place)
    whole = _WHOLE.of({name: values.get(name) for name in _Whole.model_fields}, place)
    return HeadConfig(
        {name: layer[name] for name in _LAYER if layer.get(name) is not None},
        whole.vocab_size,
        whole.draft_vocab_size or whole.vocab_size,
        whole.target_hidden_size or layer["hidden_size"],
        _LAYERS.of(layers, f"{place}: eagle_aux_hidden_state_layer_ids={short(layers)}"),
        before_residual if whole.norm_before_residual is None else whole.norm_before_residual,
        target,
        tuple(architectures),
    )


def _refuse_unread(*places: Mapping[str, Any]) -> None:
    for values in places:
        for name in _UNREAD:
            if values.get(name):
                raise ConfigError(f"{name}={values[name]!r}: heads with this part are not read here")


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} of the head's config.json must be an object, not {short(found)}")
    return found
