"""Configurations of drafts on hidden states, in the layouts of config.json that other engines read and write.

A head (EAGLE-3, Li et al. 2025) has a plain layout and vLLM's speculators layout. Of block drafters, DFlash's files have a
`dflash_config`, DSpark's the same fields at the top, and the speculators layout has both kinds. The layers of the target are
counted from 0 for the output of the first layer in DFlash's and DSpark's files, and as here in the others: 0 is the embeddings.
Owns the field names and defaults. Knows no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError
from foresay.json_files import short
from foresay.models.drafts.fields import (
    MAX_BLOCK,
    REQUIRED,
    block_fields_of,
    check_layer,
    fields_of,
    layers_of,
    object_of,
    refuse_parts,
    verifier_of,
)

_DRAFT_TOKENS = 5
"""Draft length that an exported configuration recommends to other engines."""
_OFF = (False, None)
_HEAD_PARTS = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias"), (*_OFF, 0))
_BLOCK_PARTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "causal", "is_causal"), _OFF),
    **dict.fromkeys(
        ("conv_kernel_size", "selector_rank", "q_lora_rank", "kv_lora_rank", "attention_multiplier"), (None,)
    ),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "logits_scaling", "logit_scale"), (None, 1, 1.0)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (None, 1, 1.0)),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_mode": (None, "gqa", "mha"),
    "projector_type": (None, "dflash", "dspark"),
    "markov_head_type": (None, "vanilla"),
}
"""Fields of variants that are not supported, and the values that select none of them."""


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

    def __post_init__(self) -> None:
        for name in REQUIRED:
            check_int(name, self.layer.get(name), 1)
        check_int("draft_vocab_size", self.draft_vocab_size, 1, check_int("vocab_size", self.vocab_size, 1))
        heads = self.layer["num_attention_heads"]
        shared = self.layer.get("num_key_value_heads") or heads
        if heads % shared:
            raise ConfigError(f"num_key_value_heads={shared} must divide num_attention_heads={heads}")
        if not self.layer.get("head_dim") and self.hidden_size % (2 * heads):
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of twice num_attention_heads={heads}")

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
        raise ConfigError(f"a {self.NOUN} is written in the plain layout alone")

    def check_target(self, vocab_size: int, hidden_size: int, num_layers: int, name: str) -> tuple[int, ...]:
        """Return the layers of a target whose hidden states are read. Raises ConfigError if the draft does not fit the target."""
        for quantity, expected, actual in (
            ("vocabulary", self.vocab_size, vocab_size),
            ("hidden size", self.target_width, hidden_size),
        ):
            if expected != actual:
                raise ConfigError(
                    f"the {self.NOUN} was made for a target with a {quantity} of {expected}, but {name!r} has {actual}"
                )
        layers = self.hidden_layers or usual_layers(num_layers)
        if max(layers) > num_layers:
            raise ConfigError(
                f"the {self.NOUN} reads layer {max(layers)} of its target, but {name!r} has only {num_layers}"
            )
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

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_int("target_hidden_size", self.target_hidden_size, 1)
        check_flag("norm_before_residual", self.norm_before_residual)

    @property
    def target_width(self) -> int:
        """Size of the target's hidden states."""
        return self.target_hidden_size

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the plain layout."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **self.layer,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
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
            "transformer_layer_config": {
                "model_type": "llama",
                **self.layer,
                "num_hidden_layers": 1,
                "vocab_size": self.vocab_size,
            },
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFT_TOKENS}],
                "verifier": {"name_or_path": self.target, "architectures": list(self.target_architectures)},
            },
        }

    def _common(self) -> dict[str, Any]:
        return {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "tie_word_embeddings": False,
        }

    @classmethod
    def _of_plain(cls, values: Mapping[str, Any]) -> HeadConfig:
        eagle = object_of(values, "eagle_config")
        refuse_parts(eagle, _HEAD_PARTS, "heads")
        if not eagle.get("use_aux_hidden_state", True):
            raise ConfigError(
                "use_aux_hidden_state=false: heads that read only the last hidden state are not supported; it must be true"
            )
        return cls._build(values, values, eagle, before_residual=False)

    @classmethod
    def _of_speculators(cls, values: Mapping[str, Any]) -> HeadConfig:
        kind = values.get("speculators_model_type")
        if kind != "eagle3":
            raise ConfigError("is not supported; it must be 'eagle3'", param="speculators_model_type", value=kind)
        layer = object_of(values, "transformer_layer_config")
        fields = {"vocab_size": layer.get("vocab_size"), **values}
        return cls._build(layer, fields, values, before_residual=True, **verifier_of(values))

    @classmethod
    def _build(
        cls,
        layer: Mapping[str, Any],
        values: Mapping[str, Any],
        lists_layers: Mapping[str, Any],
        *,
        before_residual: bool,
        **named: Any,
    ) -> HeadConfig:
        """Build a configuration. before_residual: `norm_before_residual` of a file that does not set it."""
        source = "the head's config.json"
        shape = check_layer(layer, source)
        fields = fields_of(values, source)
        for section in (layer, values):
            refuse_parts(section, _HEAD_PARTS, "heads")
        kind = layer.get("model_type", "llama")
        if kind != "llama":
            raise ConfigError("is not supported for a head's layer; it must be 'llama'", param="model_type", value=kind)
        if layer.get("num_hidden_layers", 1) != 1:
            raise ConfigError(
                f"num_hidden_layers={layer['num_hidden_layers']}: only heads with one layer are supported"
            )
        before = fields.norm_before_residual
        return cls(
            layer=shape,
            vocab_size=fields.vocab_size,
            draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
            target_hidden_size=fields.target_hidden_size or layer["hidden_size"],
            hidden_layers=layers_of(lists_layers, "eagle_aux_hidden_state_layer_ids", source),
            norm_before_residual=before_residual if before is None else before,
            **named,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(DraftConfig):
    """A block drafter."""

    NOUN: ClassVar[str] = "block drafter"
    hidden_layers: tuple[int, ...]
    num_layers: int
    block_size: int
    """Positions of a block: the last committed token, and mask tokens."""
    mask_token_id: int
    markov_rank: int = 0
    """Rank of the Markov head; 0 for none: the tokens of a block are then drawn independently."""
    has_confidence: bool = False
    """True if it predicts the acceptance of each token."""
    confidence_reads_markov: bool = False
    """True if that prediction reads the previous token's Markov embedding, too."""
    from_anchor: bool = True
    """True if the output of each position is the distribution of the token after it (DSpark); False if it is that of the token at
    it, so that the first position has none (DFlash)."""
    normalizes_queries: bool = True
    """True if the layers normalize queries and keys, as Qwen3's do."""

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_int("num_hidden_layers", self.num_layers, 1, 256)
        check_int("block_size", self.block_size, 2, MAX_BLOCK)
        check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        check_int("markov_rank", self.markov_rank, 0)
        check_flag("from_anchor", self.from_anchor)
        if not self.hidden_layers:
            raise ConfigError("the block drafter's config.json lists no layers of the target (target_layer_ids)")
        if self.confidence_reads_markov and not self.markov_rank:
            raise ConfigError("confidence_head_with_markov=true needs a Markov head, but markov_rank is 0")

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the published layout: DSpark's, or DFlash's for a drafter without DSpark's parts."""
        dspark = self.from_anchor or self.markov_rank > 0 or self.has_confidence
        fields: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in self.hidden_layers],
        }
        out = {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            "model_type": "qwen3" if self.normalizes_queries else "llama",
            **self.layer,
            "num_hidden_layers": self.num_layers,
            "layer_types": ["full_attention"] * self.num_layers,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.block_size,
        }
        if not dspark:
            return {**out, "dflash_config": fields}
        return {
            **out,
            **fields,
            **({} if self.from_anchor else {"sample_from_anchor": False}),
            "num_anchors": 512,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.has_confidence,
            "confidence_head_with_markov": self.confidence_reads_markov,
        }

    @classmethod
    def _of_plain(cls, values: Mapping[str, Any]) -> BlockConfig:
        merged = {**values, **object_of(values, "dflash_config")}
        layers = layers_of(merged, "target_layer_ids", _SOURCE, least=-1) or ()
        return cls._build(values, merged, [i + 1 for i in layers], from_anchor="dflash_config" not in values)

    @classmethod
    def _of_speculators(cls, values: Mapping[str, Any]) -> BlockConfig:
        kind = values.get("speculators_model_type")
        if kind not in ("dflash", "dspark"):
            raise ConfigError(
                "is not supported; it must be 'dflash' or 'dspark'", param="speculators_model_type", value=kind
            )
        layer = object_of(values, "transformer_layer_config")
        own = {name: layer.get(name) for name in ("vocab_size", "num_hidden_layers")}
        layers = layers_of(values, "aux_hidden_state_layer_ids", _SOURCE) or ()
        return cls._build(layer, {**own, **values}, layers, from_anchor=kind == "dspark", **verifier_of(values))

    @classmethod
    def _build(
        cls,
        layer: Mapping[str, Any],
        values: Mapping[str, Any],
        hidden_layers: Any,
        *,
        from_anchor: bool,
        **named: Any,
    ) -> BlockConfig:
        """Build a configuration. from_anchor: `sample_from_anchor` of a file that does not set it."""
        kind = layer.get("model_type")
        if kind not in ("qwen3", "llama"):
            raise ConfigError(
                f"model_type={short(kind)} is not supported for a block drafter's layers; it must be 'qwen3' or 'llama'"
            )
        for section in (layer, values):
            refuse_parts(section, _BLOCK_PARTS, "block drafters")
        shape = check_layer(layer, _SOURCE)
        fields, block = fields_of(values, _SOURCE), block_fields_of(values, layer, _SOURCE)
        sliding = [one for one in block.layer_types or () if one != "full_attention"]
        if sliding:
            raise ConfigError(f"layer_types has {short(sliding[0])}: block drafters with such layers are not supported")
        if block.use_sliding_window and block.layer_types is None:
            raise ConfigError("use_sliding_window=true: block drafters with such layers are not supported")
        for name, own, other, expected in (
            ("num_draft_layers", block.num_draft_layers, "num_hidden_layers", block.num_hidden_layers),
            ("target_hidden_size", fields.target_hidden_size, "hidden_size", layer["hidden_size"]),
        ):
            if own not in (None, expected):
                raise ConfigError(
                    f"{name}={own} differs from {other}={expected}; such block drafters are not supported"
                )
        return cls(
            layer={name: value for name, value in shape.items() if value is not False},
            num_layers=block.num_hidden_layers,
            vocab_size=fields.vocab_size,
            draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
            hidden_layers=tuple(hidden_layers),
            block_size=block.block_size,
            mask_token_id=block.mask_token_id,
            markov_rank=block.markov_rank or 0,
            has_confidence=bool(block.enable_confidence_head),
            confidence_reads_markov=bool(block.confidence_head_with_markov and block.enable_confidence_head),
            from_anchor=from_anchor if block.sample_from_anchor is None else block.sample_from_anchor,
            normalizes_queries=kind == "qwen3",
            **named,
        )


_SOURCE = "the block drafter's config.json"


def is_block(values: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of a block drafter."""
    kind = values.get("speculators_model_type")
    return kind in ("dflash", "dspark") or "dflash_config" in values or "target_layer_ids" in values
