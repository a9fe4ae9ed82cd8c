"""Fields of a block drafter's config.json that are validated, in any layout. Knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from foresay.errors import ConfigError
from foresay.json_files import Schema
from foresay.models.drafts.fields import Positive, Width

MAX_BLOCK = 64
"""Most positions of a block."""

Rank = Annotated[int, Field(ge=0, le=1 << 16)]


class BlockFields(BaseModel):
    """Fields of a block drafter, wherever a layout has them."""

    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK)]
    mask_token_id: Annotated[int, Field(ge=0)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=256)]
    num_draft_layers: int | None = None
    causal: bool | None = None
    is_causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    projector_type: str | None = None
    markov_rank: Rank | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    sample_from_anchor: bool | None = None
    shift_label: bool | None = None
    emb_dim: Width | None = None
    gru_hidden_dim: Width | None = None
    pure_draft_prefix_len: Annotated[int, Field(ge=0, le=MAX_BLOCK)] | None = None
    conv_kernel_size: Annotated[int, Field(ge=0, le=MAX_BLOCK)] | None = None
    conv_group_size: Annotated[int, Field(ge=0, le=1 << 18)] | None = None
    selector_rank: Rank | None = None
    selector_top_k: Annotated[int, Field(ge=0, le=1024)] | None = None
    input_embedding_scale: Positive | None = None
    output_multiplier: Positive | None = None
    final_logit_softcapping: Annotated[float, Field(ge=0, le=1e12)] | None = None


_SCHEMA: Schema[BlockFields] = Schema(BlockFields, "a block drafter's configuration")


def block_fields_of(values: Mapping[str, Any], source: str) -> BlockFields:
    """Return the fields of a block drafter. Raises ConfigError for an invalid one. source: for errors."""
    return _SCHEMA.of({name: values.get(name) for name in BlockFields.model_fields}, source)


def sights_of(block: BlockFields, windows: Sequence[int | None]) -> list[tuple[int | None, bool]]:
    """Return the window and the causality of each layer. windows: of the layers. Raises ConfigError for a contradiction."""
    if None not in (block.causal, block.is_causal) and block.causal != block.is_causal:
        raise ConfigError("contradicts {is_causal}", param="causal", value=block.causal, is_causal=block.is_causal)
    causal = bool(block.causal or block.is_causal)
    # the speculators layout lets layers with windows alone be causal
    slides_causally = causal if block.sliding_window_non_causal is None else not block.sliding_window_non_causal
    return [(window, causal if window is None else slides_causally) for window in windows]
