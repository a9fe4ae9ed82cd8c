"""Configurations of parallel heads (P-EAGLE, arXiv 2602.01469), as vLLM, speculators and their publishers write them.

Such a head is one of EAGLE-3 with mask tokens after its last pair, and may have several layers. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from foresay.checks import check_int
from foresay.models.drafts.config import (
    FIELDS,
    KIND,
    LAYER_FIELDS,
    READ_LAYERS,
    VERIFIER,
    HeadConfig,
    head_layout,
)
from foresay.models.drafts.fields import Layout

_DEPTHS = 8
"""Tokens of a draft whose file does not set their number: speculators' default in training."""
_MASKS = ("ptd_token_id", "pard_token", "mask_token_id")
_OWN = {"mask_token_id": "ptd_token_id", "block_size": "num_depths"}


def _layout(tables: Mapping[str, Mapping[str, str]]) -> Layout:
    return head_layout(
        tables,
        noun="parallel heads",
        others={**dict.fromkeys(_MASKS, "mask_token_id"), **dict.fromkeys(("num_depths", "para_depths"), "block_size")},
        allowed={"parallel_drafting": (True, None), "parallel_draft_step": (None,)},
        unread=("down_sample_ratio", "down_sample_ratio_min", "max_seq_len", "prediction_loss_weight"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelHeadConfig(HeadConfig):
    """A head that drafts all tokens in one pass."""

    NOUN: ClassVar[str] = "parallel head"
    DRAFTER: ClassVar[str] = "block"
    NEEDED: ClassVar[tuple[str, ...]] = ("mask_token_id",)
    PLAIN: ClassVar[Layout] = _layout({"": {**LAYER_FIELDS, **FIELDS, **_OWN}, "eagle_config": READ_LAYERS})
    SPECULATORS: ClassVar[Mapping[str, Layout]] = {
        "peagle": _layout(
            {
                "": {**FIELDS, **READ_LAYERS, **_OWN, "mask_token_id": "mask_token_id"},
                "transformer_layer_config": LAYER_FIELDS,
                "eagle_config": {},
                "speculators_config.verifier": VERIFIER,
            }
        )
    }
    ALGORITHM: ClassVar[tuple[str, str]] = "PEagleSpeculator", "peagle"
    mask_token_id: int
    """Token of the inputs after the last pair."""
    block_size: int = _DEPTHS
    """Most tokens of a draft: the last pair's, and one for each mask token."""

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens of a draft."""
        return self.block_size

    @property
    def has_confidence(self) -> bool:
        """False: it predicts no acceptance."""
        return False

    @classmethod
    def describes(cls, values: Mapping[str, Any]) -> bool:
        """See DraftConfig."""
        listed = values.get("architectures")
        names = " ".join(map(str, listed)).lower() if isinstance(listed, list) else ""
        own = values.get("eagle_config")
        parts = (values, own) if isinstance(own, Mapping) else (values,)
        is_head = own is not None or "eagle3" in names
        stated = (part.get(name) for part in parts for name in (*_MASKS, "parallel_drafting"))
        masked = any(one is not None and one is not False for one in stated)  # a token's id may be 0
        return values.get(KIND) == "peagle" or (KIND not in values and ("peagle" in names or (is_head and masked)))

    @classmethod
    def usual(cls, values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """See DraftConfig."""
        return HeadConfig.usual(values, {**found, "num_hidden_layers": 1})

    def fields(self) -> dict[str, Any]:
        """See DraftConfig."""
        return {**HeadConfig.fields(self), "block_size": self.block_size}

    def as_plain(self) -> dict[str, Any]:
        """See DraftConfig."""
        return {**HeadConfig.as_plain(self), "parallel_drafting": True}
