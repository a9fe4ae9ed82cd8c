"""Any Hugging Face decoder-only model over the slot cache.

Owns the adapter between transformers' model and cache classes and ours, and the knowledge of which models can be
rewound. Does not know what the tokens mean or why they are scored.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from foresay.decoding.protocols import KVCache, Logits, ModelInput
from foresay.decoding.rows import Rows
from foresay.errors import UnsupportedModelError
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cache.stores import RowStores, Spare
from foresay.models.huggingface.fused import FusedDecoder, state_of
from foresay.models.huggingface.graphs import GraphedPasses, cuda_graphs
from foresay.models.huggingface.model import UNLIMITED, TransformersModel

logger = logging.getLogger("foresay")

_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "rwkv")
_BOUNDED_ROPE = ("dynamic", "longrope")


class TransformersCache(Cache):
    """The slot cache, as transformers' attention layers expect to find it."""

    def __init__(self, slots: SlotCache, at: Placement | None = None) -> None:
        super().__init__(layers=[])
        self.slots, self.at = slots, at

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values [B, heads, T, dim]; returns all that the rows see, [B, heads, width, dim]."""
        assert self.at is not None
        return self.slots.write(layer_idx, key_states, value_states, self.at)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(slots in sight, 0): slots are absolute."""
        assert self.at is not None
        return self.at.width, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The past length for families that build their own bias: slots in sight less the pass's columns."""
        assert self.at is not None
        return self.at.width - int(self.at.slots.shape[1])


def unsupported_reasons(model: PreTrainedModel) -> list[str]:
    """Why this model cannot be decoded exactly; empty when it can."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(k for k in kinds if any(name in k for name in _RECURRENT_LAYERS))
    reasons = []
    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder model; use Seq2SeqModel")
    if getattr(model, "_is_stateful", False) or recurrent:
        detail = f" (layers: {', '.join(recurrent)})" if recurrent else ""
        reasons.append(f"its recurrent state cannot be rewound to before a rejected token{detail}")
    accepted = inspect.signature(model.forward).parameters
    if not recurrent and "past_key_values" not in accepted:
        reasons.append("its forward takes no past_key_values, so nothing can be cached")
    if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        reasons.append("its layers share keys and values outside the cache interface")
    return reasons


def context_limit(model: PreTrainedModel) -> int:
    """Most tokens a row may hold.

    Position encodings whose frequencies depend on the longest row (dynamic, longrope) are served up to the length
    below which they do not: beyond it a draft token's position would change what its predecessors meant.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limit = next((int(v) for n in names if (v := getattr(config, n, None))), UNLIMITED)
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _BOUNDED_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
    return limit


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        return [rope]
    return [value for value in rope.values() if isinstance(value, dict)]


class CausalModel(TransformersModel):
    """A decoder-only transformers model, scored over ragged rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError when the model's state cannot be rewound. `model` is put in eval mode."""
        reasons = unsupported_reasons(model)
        if reasons:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded: {'; '.join(reasons)}")
        super().__init__(model, pluggable=getattr(model, "_supports_attention_backend", False))
        config = model.config.get_text_config(decoder=True)
        self.max_length = context_limit(model)
        # also the bound below which the frequencies of a longrope model stay what they are, pads included
        self.position_limit = min(
            self.max_length, int(getattr(config, "max_position_embeddings", None) or self.max_length)
        )
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._body = model.base_model
        self.lean: FusedDecoder | None = None
        """What passes are made by, in place of the family's own code; see `use_fused`."""
        self.graphs: GraphedPasses | None = None
        """Lean passes captured on a GPU."""
        self._spare = Spare()
        self._watched: list[tuple[int, bool]] | None = None
        self.num_layers = int(getattr(config, "num_hidden_layers", 0))
        # ALiBi is counted from slots
        self.takes_trees = self._takes_positions and not getattr(config, "alibi", False)

    def use_fused(self) -> None:
        """Make passes by `FusedDecoder`. Raises NotFusedError for a model that it does not read, which keeps its own code."""
        self.lean = FusedDecoder(self.model)
        if self.device.type == "cuda":
            self.graphs = GraphedPasses(self.lean.by_operations, cuda_graphs(self.device), self.device)

    def watch(self) -> None:
        """From now on compare the model with what it is now whenever decoding begins: it is somebody else's too."""
        self._watched = state_of(self.model)

    @property
    def one_row_at_a_time(self) -> bool:
        """See TransformersModel: the compiled kernels compute each token by itself."""
        return self.lean is not None and self.lean.compiled

    def new_cache(self) -> SlotCache:
        """A cache without rows."""
        if self.lean is not None and self._watched is not None and state_of(self.model) != self._watched:
            logger.warning("the model was changed since it was given: its passes are made by its family's own code now")
            self.lean = None
        if self.graphs is not None:
            return SlotCache(spare=self._spare)
        return (None if self.lean is None else self.lean.new_cache()) or SlotCache()

    def borrowed(self, owner: SlotCache) -> SlotCache:
        """See TransformersModel. The owner's passes may be made by its family's own code since these layers were taken."""
        if self.one_row_at_a_time and not isinstance(owner.tensors, RowStores):
            self.lean = None
        return super().borrowed(owner)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert isinstance(cache, SlotCache) and len(cache.lengths) == first
        cache.add_rows(len(rows) - first)

    def _replayed(
        self, model_input: ModelInput, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]] | None:
        return None if self.graphs is None or self.lean is None else self.graphs(model_input, cache)

    def _call(
        self, model_input: ModelInput, token_ids: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]:
        logits, hidden = model_input.logits, model_input.hidden_layers
        if self.lean is not None:
            return self.lean(token_ids, at, cache, model_input)
        adapter = TransformersCache(cache, at)
        kwargs: dict[str, Any] = {"input_ids": token_ids, "past_key_values": adapter, "use_cache": True}
        if self._takes_positions:
            # pads may lie past the last position the model has; they are never read
            kwargs["position_ids"] = at.positions.clamp(max=self.position_limit - 1)
        if hidden:
            kwargs["output_hidden_states"] = True
        silent = logits is Logits.NONE
        out = self._body(**kwargs) if silent else self.model(**kwargs)
        return None if silent else out.logits, {layer: out.hidden_states[layer] for layer in hidden}
