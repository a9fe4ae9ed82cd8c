"""Configuration of a block drafter, in the three layouts of config.json that are published.

DFlash's files have a `dflash_config`, DSpark's the same fields at the top, and vLLM's speculators layout both kinds. The layers
of the target are counted from 0 for the output of the first layer in the first two, and as here in the third: 0 is the
embeddings. Owns the field names and defaults. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError
from foresay.json_files import Schema, short
from foresay.models.heads.config import (
    FIELDS,
    LAYER,
    LAYER_SCHEMA,
    LAYERS,
    REQUIRED,
    VERIFIER,
    Fields,
    LayerFields,
    object_of,
)

MAX_BLOCK = 64
"""Most positions of a block."""
_SOURCE = "the block drafter's config.json"
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "causal": (False, None),
    "is_causal": (False, None),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "attention_mode": (None, "gqa", "mha"),
    "projector_type": (None, "dflash", "dspark"),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "q_lora_rank": (None,),
    "kv_lora_rank": (None,),
    "markov_head_type": (None, "vanilla"),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
}
"""Fields of variants that are not supported, and the values that select none of them."""


class _BlockFields(BaseModel):
    """Fields of a block drafter, wherever a layout has them."""

    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK)]
    mask_token_id: Annotated[int, Field(ge=0)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=256)]
    num_draft_layers: int | None = None
    use_sliding_window: bool | None = None
    markov_rank: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    sample_from_anchor: bool | None = None
    layer_types: list[str] | None = None


_BLOCK: Schema[_BlockFields] = Schema(_BlockFields, "a block drafter's configuration")
_TARGET_LAYERS: Schema[tuple[int, ...] | None] = Schema(
    Annotated[tuple[Annotated[int, Field(ge=-1, le=10_000)], ...], Field(min_length=1, max_length=1000)] | None,
    "a list of layers",
)
"""Layers counted from -1, the embeddings."""


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter: the shape of its layers, the target's hidden states that it reads, and the tokens that it can draft."""

    layer: Mapping[str, Any]
    """Fields of a LlamaConfig."""
    num_layers: int
    vocab_size: int
    """Vocabulary size of the target."""
    draft_vocab_size: int
    """Number of tokens that it can draft."""
    hidden_layers: tuple[int, ...]
    """Layers of the target whose hidden states it reads, 0 for the embeddings."""
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
    target: str = ""
    """Name of the target; "" if unknown."""
    target_architectures: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in REQUIRED:
            check_int(name, self.layer.get(name), 1)
        check_int("num_hidden_layers", self.num_layers, 1, 256)
        check_int("block_size", self.block_size, 2, MAX_BLOCK)
        check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        check_int("draft_vocab_size", self.draft_vocab_size, 1, check_int("vocab_size", self.vocab_size, 1))
        check_int("markov_rank", self.markov_rank, 0)
        check_flag("from_anchor", self.from_anchor)
        if not self.hidden_layers:
            raise ConfigError(f"{_SOURCE} lists no layers of the target (target_layer_ids)")
        if self.confidence_reads_markov and not self.markov_rank:
            raise ConfigError("confidence_head_with_markov=true needs a Markov head, but markov_rank is 0")
        heads = self.layer["num_attention_heads"]
        shared = self.layer.get("num_key_value_heads") or heads
        if heads % shared:
            raise ConfigError(f"num_key_value_heads={shared} must divide num_attention_heads={heads}")
        if not self.layer.get("head_dim") and self.hidden_size % (2 * heads):
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of twice num_attention_heads={heads}")

    @property
    def hidden_size(self) -> int:
        """Size of its hidden states, and of the target's."""
        return int(self.layer["hidden_size"])

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @staticmethod
    def read(values: Mapping[str, Any]) -> BlockConfig:
        """Build from a config.json. Raises ConfigError that names a missing, invalid or unsupported field."""
        if "transformer_layer_config" in values or "speculators_model_type" in values:
            return _of_speculators(values)
        inner = object_of(values, "dflash_config")
        merged = {**values, **inner}
        ids = merged.get("target_layer_ids")
        layers = _TARGET_LAYERS.of(ids, f"{_SOURCE}: target_layer_ids={short(ids)}") or ()
        return _build(values, merged, [i + 1 for i in layers], from_anchor="dflash_config" not in values)

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


def _of_speculators(values: Mapping[str, Any]) -> BlockConfig:
    kind = values.get("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        raise ConfigError(f"speculators_model_type={kind!r} is not supported; it must be 'dflash' or 'dspark'")
    layer = object_of(values, "transformer_layer_config")
    verifier = VERIFIER.of(object_of(object_of(values, "speculators_config"), "verifier"), "verifier")
    ids = values.get("aux_hidden_state_layer_ids")
    return _build(
        layer,
        {"vocab_size": layer.get("vocab_size"), "num_hidden_layers": layer.get("num_hidden_layers"), **values},
        list(LAYERS.of(ids, f"{_SOURCE}: aux_hidden_state_layer_ids={short(ids)}") or ()),
        from_anchor=kind == "dspark",
        target=verifier.name_or_path or "",
        architectures=tuple(verifier.architectures or ()),
    )


def _build(
    layer: Mapping[str, Any],
    values: Mapping[str, Any],
    hidden_layers: list[int],
    *,
    from_anchor: bool,
    target: str = "",
    architectures: tuple[str, ...] = (),
) -> BlockConfig:
    """Build a configuration. from_anchor: `sample_from_anchor` of a file that does not set it."""
    missing = [name for name in (*REQUIRED, "model_type") if layer.get(name) is None]
    if missing:
        raise ConfigError(f"{_SOURCE} has no {missing[0]}")
    kind = layer["model_type"]
    if kind not in ("qwen3", "llama"):
        raise ConfigError(
            f"model_type={short(kind)} is not supported for a block drafter's layers; it must be 'qwen3' or 'llama'"
        )
    for section in (layer, values):
        _reject_unsupported(section)
    LAYER_SCHEMA.of({name: layer.get(name) for name in LayerFields.model_fields}, _SOURCE)
    fields = FIELDS.of({name: values.get(name) for name in Fields.model_fields}, _SOURCE)
    block = _BLOCK.of(
        {
            **{name: values.get(name) for name in _BlockFields.model_fields},
            **{name: layer.get(name) for name in ("layer_types", "use_sliding_window")},
        },
        _SOURCE,
    )
    sliding = [kind for kind in block.layer_types or () if kind != "full_attention"]
    if sliding:
        raise ConfigError(f"layer_types has {short(sliding[0])}: block drafters with such layers are not supported")
    if block.use_sliding_window and block.layer_types is None:
        raise ConfigError("use_sliding_window=true: block drafters with such layers are not supported")
    if block.num_draft_layers not in (None, block.num_hidden_layers):
        raise ConfigError(
            f"num_draft_layers={block.num_draft_layers} differs from num_hidden_layers={block.num_hidden_layers} in {_SOURCE}"
        )
    if fields.target_hidden_size not in (None, layer["hidden_size"]):
        raise ConfigError(
            f"target_hidden_size={fields.target_hidden_size} differs from hidden_size={layer['hidden_size']}; block drafters of "
            "another width than their target's are not supported"
        )
    rank = block.markov_rank or 0
    return BlockConfig(
        {name: layer[name] for name in LAYER if layer.get(name) not in (None, False)},
        block.num_hidden_layers,
        fields.vocab_size,
        fields.draft_vocab_size or fields.vocab_size,
        tuple(hidden_layers),
        block.block_size,
        block.mask_token_id,
        rank,
        bool(block.enable_confidence_head),
        bool(block.confidence_head_with_markov and block.enable_confidence_head),
        from_anchor if block.sample_from_anchor is None else block.sample_from_anchor,
        kind == "qwen3",
        target,
        architectures,
    )


def _reject_unsupported(values: Mapping[str, Any]) -> None:
    for name, allowed in _REFUSED.items():
        if values.get(name) not in allowed:
            raise ConfigError(f"{name}={short(values[name])}: block drafters with this part are not supported")
