"""Configurations of drafts on hidden states, and of heads (EAGLE-3, Li et al. 2025; EAGLE-3.1's norms).

A kind of draft names its layouts, and translates their fields into its own. Layers of the target are counted from 0 for the
embeddings. Knows no tensor.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.models.drafts.fields import LAYER, LAYER_PARTS, OFF, SLIDING, Fields, Layout, checked, same

_DRAFT_TOKENS = 5
"""Draft length that an exported configuration recommends to other engines."""
KIND = "speculators_model_type"
VERIFIER = {"target": "name_or_path", "target_architectures": "architectures"}
WINDOWS = ("layer_types", "use_sliding_window", "sliding_window")
OTHERS = {**same("partial_rotary_factor", "rope_is_neox_style"), "is_neox_style": "rope_is_neox_style"}
"""Fields of layers that are read, and not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(ABC):
    """Shape of a draft's layers, the target's hidden states that it reads, and the tokens that it can draft."""

    NOUN: ClassVar[str]
    """Name of the kind, for errors."""
    DRAFTER: ClassVar[str]
    """Name of the drafter."""
    NEEDED: ClassVar[tuple[str, ...]] = ()
    """Fields that a file must set, besides those of all kinds."""
    PLAIN: ClassVar[Layout]
    SPECULATORS: ClassVar[Mapping[str, Layout]]
    """Names of the kind in vLLM's speculators layout, and the layout of each."""
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
        checked(self.fields(), f"the {self.NOUN}'s configuration")
        check_int("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        heads = self.layer["num_attention_heads"]
        shared = self.layer.get("num_key_value_heads") or heads
        if heads % shared:
            raise ConfigError(f"must divide num_attention_heads={heads}", param="num_key_value_heads", value=shared)
        if not self.layer.get("head_dim") and self.hidden_size % (2 * heads):
            raise ConfigError(
                f"must be a multiple of twice num_attention_heads={heads}", param="hidden_size", value=self.hidden_size
            )

    @property
    def hidden_size(self) -> int:
        """Size of the draft's own hidden states."""
        return int(self.layer["hidden_size"])

    @property
    def target_width(self) -> int:
        """Size of the target's hidden states."""
        return self.hidden_size

    @classmethod
    def describes(cls, values: Mapping[str, Any]) -> bool:
        """Return True if a config.json is that of this kind."""
        return values.get(KIND) in tuple(cls.SPECULATORS)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Build from a config.json of any layout. Raises ConfigError that names a missing, invalid or unsupported field."""
        return cls.made(cls.stated(values), f"the {cls.NOUN}'s config.json")

    @classmethod
    def stated(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a config.json sets, by our names, and those that its layout means by leaving them out."""
        layout, kind = cls.PLAIN, values.get(KIND)
        if KIND in values or "transformer_layer_config" in values:
            if not isinstance(kind, str) or kind not in cls.SPECULATORS:
                allowed = ", ".join(map(repr, cls.SPECULATORS))
                raise ConfigError(f"is not supported; it must be one of {allowed}", param=KIND, value=kind)
            layout = cls.SPECULATORS[kind]
        found = layout.read(values, f"the {cls.NOUN}'s config.json")
        return {**cls.usual(values, found), **found}

    @classmethod
    def made(cls, found: Mapping[str, Any], source: str) -> Self:
        """Build of fields by our names. Raises ConfigError that names a missing or invalid one; source: for errors."""
        fields = checked(found, source, cls.NEEDED)
        named = {one.name: getattr(fields, one.name, None) for one in dataclasses.fields(cls)}
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in named.items()
            if value is not None
        }
        return cls(**{"draft_vocab_size": fields.vocab_size, "hidden_layers": None, **given, **cls.own(fields)})

    @classmethod
    @abstractmethod
    def usual(cls, values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a config.json means that does not set a field. found: those that it sets."""

    @classmethod
    @abstractmethod
    def own(cls, fields: Fields) -> dict[str, Any]:
        """Return the arguments that are no fields of a file."""

    def fields(self) -> dict[str, Any]:
        """Return the fields by the names of Fields, without those that a file means by leaving them out."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        usual = {one.name: one.default for one in dataclasses.fields(self) if not one.name.startswith("target")}
        return {
            **self.layer,
            **{
                name: list(value) if isinstance(value, tuple) else value
                for name, value in given.items()
                if name in Fields.model_fields and value is not usual.get(name, dataclasses.MISSING)
            },
            "tie_word_embeddings": False,
        }

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


LAYER_FIELDS = same("model_type", *LAYER, "num_hidden_layers", *WINDOWS, "vocab_size")
FIELDS = same(
    *("draft_vocab_size", "target_hidden_size", "tie_word_embeddings"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)
READ_LAYERS = {"hidden_layers": "eagle_aux_hidden_state_layer_ids"}


def head_layout(
    tables: Mapping[str, Mapping[str, str]],
    *,
    noun: str = "heads",
    others: Mapping[str, str] = {},
    allowed: Mapping[str, tuple[Any, ...]] = {},
    unread: tuple[str, ...] = (),
) -> Layout:
    """Return a layout of heads with fields of a kind of its own; see Layout."""
    return Layout(
        noun=noun,
        tables=tables,
        others={**OTHERS, "return_hidden_post_norm": "norm_output", **others},  # TensorRT-LLM's
        allowed={
            **LAYER_PARTS,
            "model_type": ("llama", None),
            "use_aux_hidden_state": (True, None),
            "parallel_drafting": OFF,
            "parallel_draft_step": (None, 0, 1),
            "target_layer_ids": (None,),
            **dict.fromkeys(("use_mtp_layernorm", "eh_proj_before_attn"), OFF),
            **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), (True, None)),
            **allowed,
        },
        unread=unread,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DraftConfig):
    """A head of one layer."""

    NOUN: ClassVar[str] = "head"
    DRAFTER: ClassVar[str] = "head"
    PLAIN: ClassVar[Layout] = head_layout({"": {**LAYER_FIELDS, **FIELDS}, "eagle_config": READ_LAYERS})
    SPECULATORS: ClassVar[Mapping[str, Layout]] = {
        "eagle3": head_layout(
            {
                "": {**FIELDS, **READ_LAYERS},
                "transformer_layer_config": LAYER_FIELDS,
                "eagle_config": {},
                "speculators_config.verifier": VERIFIER,
            }
        )
    }
    ALGORITHM: ClassVar[tuple[str, str]] = "Eagle3Speculator", "eagle3"
    """Names of the architecture and of the kind in vLLM's speculators layout."""
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
    num_hidden_layers: int = 1

    @property
    def target_width(self) -> int:
        """Size of the target's hidden states."""
        return self.target_hidden_size

    @classmethod
    def usual(cls, values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """See DraftConfig."""
        count = found.get("num_hidden_layers", 1)
        if count != 1:
            raise ConfigError(
                "is not supported: a head has one layer, and is no whole model", param="num_hidden_layers", value=count
            )
        return {"norm_before_residual": KIND in values, "target_hidden_size": found.get("hidden_size")}

    @classmethod
    def own(cls, fields: Fields) -> dict[str, Any]:
        """See DraftConfig."""
        count = fields.num_hidden_layers or 1
        windows = set(fields.windows(count))
        if len(windows) > 1:
            raise ConfigError("must be the same in all layers of a head", param="layer_types", value=fields.layer_types)
        return {"window": windows.pop()}

    def fields(self) -> dict[str, Any]:
        """See DraftConfig."""
        count = self.num_hidden_layers
        slides = {"layer_types": [SLIDING] * count, "use_sliding_window": True, "sliding_window": self.window}
        return {
            **DraftConfig.fields(self),
            "model_type": "llama",
            "num_hidden_layers": count,
            **({} if self.window is None else slides),
        }

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the plain layout."""
        out = {"architectures": ["LlamaForCausalLMEagle3"], **self.PLAIN.write(self.fields())}
        out["eagle_config"]["use_aux_hidden_state"] = True
        return out

    def as_speculators(self) -> dict[str, Any]:
        """Return the config.json of vLLM's speculators layout."""
        architecture, kind = self.ALGORITHM
        out = {"architectures": [architecture], KIND: kind, **self.SPECULATORS[kind].write(self.fields())}
        del out["eagle_config"]
        out["speculators_config"] |= {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFT_TOKENS}],
        }
        return out
