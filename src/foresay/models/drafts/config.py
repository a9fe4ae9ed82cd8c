"""Configurations of drafts on hidden states, in the layouts of config.json that other engines read and write.

A head (EAGLE-3, Li et al. 2025) has a plain layout and vLLM's speculators layout, which also have EAGLE-3.1's norms. The layers
of the target are counted from 0 for the embeddings. Owns the field names and defaults. Knows no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError
from foresay.models.drafts.fields import (
    BLOCKS,
    LAYER,
    LAYER_PARTS,
    READ_ELSEWHERE,
    REQUIRED,
    SLIDING,
    WINDOWS,
    Fields,
    check_layer,
    fields_of,
    layers_of,
    merged,
    object_of,
    refuse_parts,
    report_unread,
    verifier_of,
    windows_of,
)

_DRAFT_TOKENS = 5
"""Draft length that an exported configuration recommends to other engines."""
_OFF = (False, None)
_HEAD_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
_HEAD_PARTS: Mapping[str, tuple[Any, ...]] = {
    **LAYER_PARTS,
    "parallel_drafting": (*_OFF, 0),
    "parallel_draft_step": (None, 0, 1),
    "target_layer_ids": (None,),
    **dict.fromkeys(("use_mtp_layernorm", "eh_proj_before_attn"), _OFF),
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), (True, None)),
}
"""Fields of variants that are not supported, and the values that select none of them."""
_HIDDEN_LAYERS, _USES_LAYERS, _NORM_OUTPUT = "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_output"
_OTHER_NAMES = {"return_hidden_post_norm": _NORM_OUTPUT}
"""Fields that TensorRT-LLM's files have in place of others."""
_READ = (*LAYER, *Fields.model_fields, *WINDOWS, _HIDDEN_LAYERS, _USES_LAYERS, "num_hidden_layers")
"""Fields that any section of a file may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(ABC):
    """Shape of a draft's layers, the target's hidden states that it reads, and the tokens that it can draft."""

    NOUN: ClassVar[str]
    """Name of the kind, for errors."""
    layer: Mapping[str, Any]
    """Fields of a LlamaConfig."""
    vocab_size: int
    """Vocabulary size of the target."""
    draft_vocab_size: int
    """Number of tokens that it can draft."""
    hidden_layers: tuple[int, ...] | None
    """Layers of the target whose hidden states it reads, 0 for the embeddings; None for `usual_layers`."""
    target: str = ""
    """Name of the target; "" if unknown."""
    target_architectures: tuple[str, ...] = ()

    @property
    def reads_factor(self) -> bool:
        """True if the target's embeddings are read with the factor of their module."""
        return False

    def __post_init__(self) -> None:
        for name in REQUIRED:
            check_int(name, self.layer.get(name), 1)
        check_int("draft_vocab_size", self.draft_vocab_size, 1, check_int("vocab_size", self.vocab_size, 1))
        heads = self.layer["num_attention_heads"]
        shared = self.layer.get("num_key_value_heads") or heads
        if heads % shared:
            raise ConfigError(f"must divide num_attention_heads={heads}", param="num_key_value_heads", value=shared)
        if not self.layer.get("head_dim") and self.hidden_size % (2 * heads):
            text = f"must be a multiple of twice num_attention_heads={heads}"
            raise ConfigError(text, param="hidden_size", value=self.hidden_size)

    @property
    def hidden_size(self) -> int:
        """Size of the draft's own hidden states."""
        return int(self.layer["hidden_size"])

    @property
    def target_width(self) -> int:
        """Size of the target's hidden states."""
        return self.hidden_size

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Build from a config.json of any layout. Raises ConfigError that names a missing, invalid or unsupported field."""
        if "transformer_layer_config" in values or "speculators_model_type" in values:
            return cls._of_speculators(values)
        return cls._of_plain(values)

    @classmethod
    @abstractmethod
    def _of_speculators(cls, values: Mapping[str, Any]) -> Self: ...

    @classmethod
    @abstractmethod
    def _of_plain(cls, values: Mapping[str, Any]) -> Self: ...

    @abstractmethod
    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the published layout."""

    def as_speculators(self) -> dict[str, Any]:
        """Return the config.json of vLLM's speculators layout. Raises ConfigError for a kind that is not written in it."""
        raise ConfigError(f"is written in the plain layout alone, as a {self.NOUN}", param="draft")

    def check_target(self, vocab_size: int, hidden_size: int, num_layers: int, name: str) -> tuple[int, ...]:
        """Return the layers of a target whose hidden states are read. Raises ConfigError if the draft does not fit the target."""
        for quantity, expected, actual in (
            ("vocabulary", self.vocab_size, vocab_size),
            ("hidden size", self.target_width, hidden_size),
        ):
            if expected != actual:
                text = f"of the {self.NOUN} differs from {actual} of {name!r}"
                raise ConfigError(text, param=quantity, value=expected)
        layers = self.hidden_layers or usual_layers(num_layers)
        if max(layers) > num_layers:
            text = f"must be at most {num_layers}, the layers of {name!r}"
            raise ConfigError(text, param="hidden_layers", value=max(layers))
        return layers


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default layers whose hidden states a head reads: an early, the middle and a late one."""
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 6 else (0, num_layers // 2, num_layers - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DraftConfig):
    """A head of one layer."""

    NOUN: ClassVar[str] = "head"
    target_hidden_size: int
    norm_before_residual: bool
    """True if the residual around attention is the normalized input."""
    norm_before_fc: bool = False
    """True to normalize the target's hidden states, all as one vector."""
    fc_norm: bool = False
    """True to normalize each of them."""
    norm_output: bool = False
    """True if the next pass reads the output after the last norm."""
    window: int | None = None
    """Most positions that a pair attends to, its own included; None for all."""

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_int("target_hidden_size", self.target_hidden_size, 1)
        for name in ("norm_before_residual", *_HEAD_NORMS):
            check_flag(name, getattr(self, name))

    @property
    def target_width(self) -> int:
        """Size of the target's hidden states."""
        return self.target_hidden_size

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the plain layout."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **self._layer(),
            **self._common(),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": None if self.hidden_layers is None else list(self.hidden_layers),
                "use_aux_hidden_state": True,
            },
        }

    def as_speculators(self) -> dict[str, Any]:
        """Return the config.json of vLLM's speculators layout."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            **self._common(),
            "eagle_aux_hidden_state_layer_ids": None if self.hidden_layers is None else list(self.hidden_layers),
            "transformer_layer_config": {"model_type": "llama", **self._layer()},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFT_TOKENS}],
                "verifier": {"name_or_path": self.target, "architectures": list(self.target_architectures)},
            },
        }

    def _layer(self) -> dict[str, Any]:
        out = {**self.layer, "num_hidden_layers": 1, "vocab_size": self.vocab_size}
        if self.window is not None:
            out |= {"layer_types": [SLIDING], "use_sliding_window": True, "sliding_window": self.window}
        return out

    def _common(self) -> dict[str, Any]:
        return {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            **{name: True for name in _HEAD_NORMS if getattr(self, name)},
            "tie_word_embeddings": False,
        }

    @classmethod
    def _of_plain(cls, values: Mapping[str, Any]) -> HeadConfig:
        return cls._build(
            {"config.json": values, "eagle_config": object_of(values, "eagle_config")}, before_residual=False
        )

    @classmethod
    def _of_speculators(cls, values: Mapping[str, Any]) -> HeadConfig:
        kind = values.get("speculators_model_type")
        if kind != "eagle3":
            allowed = ", ".join(map(repr, ("eagle3", *BLOCKS)))
            text = f"is not supported; it must be one of {allowed}"
            raise ConfigError(text, param="speculators_model_type", value=kind)
        names = ("transformer_layer_config", "eagle_config")
        sections = {"config.json": values, **{name: object_of(values, name) for name in names}}
        return cls._build(sections, before_residual=True, **verifier_of(values))

    @classmethod
    def _build(cls, sections: Mapping[str, Mapping[str, Any]], *, before_residual: bool, **named: Any) -> HeadConfig:
        """Build a configuration of a file's sections, any of which may have a field.

        before_residual: `norm_before_residual` of a file that does not set it.
        """
        source = "the head's config.json"
        sections = {name: _with_usual_names(one) for name, one in sections.items()}
        for section in sections.values():
            refuse_parts(section, _HEAD_PARTS, "heads")
        report_unread(sections.values(), (*_READ, *READ_ELSEWHERE, *_HEAD_PARTS), source)
        every, layer = merged(sections, _READ), sections.get("transformer_layer_config", sections["config.json"])
        if not every.get(_USES_LAYERS, True):
            text = "is not supported: a head must read more than the last hidden state"
            raise ConfigError(text, param="use_aux_hidden_state", value=False)
        shape, fields = check_layer(every, source), fields_of(every, source)
        kind, count = layer.get("model_type", "llama"), every.get("num_hidden_layers", 1)
        if kind != "llama":
            raise ConfigError("is not supported for a head's layer; it must be 'llama'", param="model_type", value=kind)
        is_head = len(sections) > 2 or sections["eagle_config"] or {"draft_vocab_size", _HIDDEN_LAYERS} & every.keys()
        if count != 1 and not is_head:
            raise ConfigError("is that of a whole model, not of a draft head", param="config.json")
        if count != 1:
            text = "must be 1: only heads with one layer are supported"
            raise ConfigError(text, param="num_hidden_layers", value=count)
        before = fields.norm_before_residual
        return cls(
            layer=shape,
            vocab_size=fields.vocab_size,
            draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
            target_hidden_size=fields.target_hidden_size or every["hidden_size"],
            hidden_layers=layers_of(every, _HIDDEN_LAYERS, source),
            norm_before_residual=before_residual if before is None else before,
            norm_before_fc=bool(fields.norm_before_fc),
            fc_norm=bool(fields.fc_norm),
            norm_output=bool(fields.norm_output),
            window=windows_of(every, 1, source)[0],
            **named,
        )


def _with_usual_names(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a section with the usual names of fields that it has by others."""
    usual = {_OTHER_NAMES[name]: one for name, one in section.items() if name in _OTHER_NAMES}
    own = {name: one for name, one in section.items() if name not in _OTHER_NAMES}
    return {**own, **merged({"a field": own, "its other name": usual}, usual)}
