"""What a head on hidden states is, and the two ways of writing it down that others read (METHODS.md section 8).

Owns the names of both layouts of config.json and the defaults of either. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError

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
_GUESSES = 5
"""Tokens that other engines draft with a head unless told otherwise."""


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
    verifier = _object(_object(values, "speculators_config"), "verifier")
    return _made(
        layer,
        {"vocab_size": layer.get("vocab_size"), **values},
        values.get("eagle_aux_hidden_state_layer_ids"),
        before_residual=True,
        target=str(verifier.get("name_or_path") or ""),
        architectures=verifier.get("architectures") or (),
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
    """before_residual: what a file means that does not say."""
    missing = [name for name in _NEEDED if layer.get(name) is None]
    if missing or values.get("vocab_size") is None:
        raise ConfigError(f"the head's config.json has no {(missing or ['vocab_size'])[0]}")
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise ConfigError(f"model_type={kind!r}: the layer of a head is a 'llama' layer here")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"num_hidden_layers={layer['num_hidden_layers']}: a head has one layer here")
    if layers is not None:
        if not isinstance(layers, list) or not layers:
            raise ConfigError(f"eagle_aux_hidden_state_layer_ids={layers!r} must be a list of layers")
        layers = tuple(check_int("eagle_aux_hidden_state_layer_ids", one, 0) for one in layers)
    return HeadConfig(
        {name: layer[name] for name in _LAYER if layer.get(name) is not None},
        values["vocab_size"],
        values.get("draft_vocab_size") or values["vocab_size"],
        values.get("target_hidden_size") or layer["hidden_size"],
        layers,
        values.get("norm_before_residual", before_residual),
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
        raise ConfigError(f"{name} of the head's config.json must be an object, not {found!r}")
    return found
