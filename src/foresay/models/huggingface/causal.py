"""Any Hugging Face decoder-only model over the slot cache.

Owns the adapter between transformers' model and cache classes and ours, and the rules for which models can be rewound. Does not
know what the tokens mean or why they are scored.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Cache, PreTrainedModel

from foresay.decoding.capabilities import PAGED_CHUNK, STEP_CHUNK, Capabilities
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.errors import UnsupportedModelError
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cache.stores import RowStores
from foresay.models.families.table import family_of
from foresay.models.gpu.capture import capture_on
from foresay.models.huggingface.family_layers import NotFusedError
from foresay.models.huggingface.fused import FusedDecoder, state_of
from foresay.models.huggingface.model import UNLIMITED, TransformersModel
from foresay.models.huggingface.paged_chains import PagedChains

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.pages import PagePool
    from foresay.models.gpu.passes import PagedPasses

logger = logging.getLogger("foresay")

_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "rwkv")
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_INDEXED_LAYERS = ("indexed", "compressed")
_CACHED = ("past_key_values", "cache_params", "state")
"""Names by which families take what they keep of earlier tokens."""
_OF_OTHERS = 4
"""The share of memory that pages take is divided by this for a model of the caller."""
_BOUNDED_ROPE = ("dynamic", "longrope")


class TransformersCache(Cache):
    """An adapter that gives transformers' attention layers access to the slot cache."""

    def __init__(self, slots: SlotCache, at: Placement | None = None) -> None:
        Cache.__init__(self, layers=[])
        self.slots, self.at = slots, at

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values [B, heads, T, dim]; return all that the rows attend to, [B, heads, width, dim] each."""
        assert self.at is not None
        return self.slots.write(layer_idx, key_states, value_states, self.at)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (number of slots read, offset 0): slots are absolute."""
        assert self.at is not None
        return self.at.width, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the past length for families that build their own bias: slots read minus the pass's columns."""
        assert self.at is not None
        return self.at.width - int(self.at.slots.shape[1])


def is_recurrent(model: PreTrainedModel) -> bool:
    """Return True if a model keeps states of earlier tokens that cannot be truncated."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    family = family_of(model.config)
    if family is not None and family.partly_recurrent and kinds and _ATTENTION.issuperset(kinds):
        return False
    return bool(getattr(model, "_is_stateful", False)) or any(
        name in kind for kind in kinds for name in _RECURRENT_LAYERS
    )


def unsupported_reasons(model: PreTrainedModel) -> list[str]:
    """Return the reasons why this model cannot be decoded exactly; empty if it can."""
    config = model.config.get_text_config(decoder=True)
    reasons = []
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    indexed = [kind for kind in kinds if any(name in kind for name in _INDEXED_LAYERS)]
    if indexed:
        reasons.append(f"its layers ({', '.join(indexed)}) keep an index of keys outside the cache interface")
    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder model; use Seq2SeqModel")
    if not any(name in inspect.signature(model.forward).parameters for name in _CACHED):
        reasons.append("its forward takes no past_key_values, so nothing can be cached")
    shares = getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0)
    family = family_of(config)
    if shares and (family is None or not family.shares_keys):
        reasons.append("its layers share keys and values outside the cache interface")
    return reasons


def context_limit(model: PreTrainedModel) -> int:
    """Return the maximal number of tokens per row.

    Position encodings whose frequencies depend on the longest row (dynamic, longrope) are limited to the original length, up to
    which they do not: beyond it a draft token's position would change the encoding of earlier tokens.
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


class CausalModel(TransformersModel, PagedChains):
    """A decoder-only transformers model that scores ragged rows."""

    rewinds_states: bool = False
    """True for a class whose cache rewinds recurrent states."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Put `model` in eval mode. Raises UnsupportedModelError if it cannot be decoded exactly."""
        reasons = unsupported_reasons(model)
        if is_recurrent(model) and not self.rewinds_states:
            reasons.append("it has recurrent layers; use RecurrentModel")
        if reasons:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded: {'; '.join(reasons)}")
        super().__init__(model, pluggable=getattr(model, "_supports_attention_backend", False))
        config = model.config.get_text_config(decoder=True)
        self.max_length = context_limit(model)
        # also the bound up to which a longrope model's frequencies do not change, padding included
        self.position_limit = min(
            self.max_length, int(getattr(config, "max_position_embeddings", None) or self.max_length)
        )
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._body = model.base_model
        self.is_loaded_here = True
        """False for a model of the caller, who may need memory for something else."""
        self.reproducible: bool | None = None
        """True computes prompts over pages as steps, False lets a library multiply in all passes; see LoadOptions."""
        self.fused: FusedDecoder | None = None
        """Runs forward passes instead of the family's own code; see `use_fused`."""
        self._watched_state: list[tuple[int, bool]] | None = None
        self.num_layers = int(getattr(config, "num_hidden_layers", 0))
        # ALiBi is computed from slots, not from positions
        self.takes_trees = self._takes_positions and not getattr(config, "alibi", False)

    def use_fused(self, cache_dtype: torch.dtype | None = None, pool: PagePool | None = None) -> None:
        """Run passes through `FusedDecoder`. Raises NotFusedError, and keeps the family's own code, for an unsupported model.

        cache_dtype: of keys and values; None for the model's. pool: pages of a model whose layers begin with this one's; None
        for a pool of its own.
        """
        self.fused = FusedDecoder(self.model, cache_dtype, position_limit=self.position_limit)
        if self.hardware.gpu_kernels:
            self.fused.paged = self._on_pages(self.fused, pool)
            if self.fused.paged is not None and pool is None:
                from foresay.decoding import sampling_kernels  # Triton

                sampling_kernels.warm_up(self.vocab_size, self.model.dtype, self.device)
        if self.fused.paged is None and self.fused.needs_kernels and not self.fused.is_native:
            self.fused = None
            raise NotFusedError("such layers are fused by kernels only, which do not run this model")

    @property
    def paged(self) -> PagedPasses | None:
        """Fused passes over flat tokens and pages, if there are any."""
        return None if self.fused is None else self.fused.paged

    def _on_pages(self, fused: FusedDecoder, pool: PagePool | None) -> PagedPasses | None:
        from foresay.models.gpu.passes import passes_on, passes_over

        device, limit, capture = self.device, self.max_length, capture_on(self.device)
        try:
            decoder = fused.on_pages(limit, reproducible=self.reproducible is not False)
            if pool is not None:
                found = passes_over(pool, device, decoder, max_length=limit, capture=capture)
            else:
                free = self.memory_bytes() // (1 if self.is_loaded_here else _OF_OTHERS)
                given = device, decoder, self.cache_dtype
                found = passes_on(*given, max_length=limit, free_bytes=free, capture=capture)
            found.prompts_as_steps = self.reproducible is True
            return found
        except LookupError as error:
            logger.info("passes are not made over pages: %s", error)
            return None

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        own = super().capabilities
        if (pages := self.paged) is None:
            return own
        more: dict[str, Any] = {"prefill_chunk": PAGED_CHUNK, "prefill_in_any_pieces": False}
        if pages.prompts_as_steps:
            more = {"prefill_chunk": STEP_CHUNK, "prefill_in_any_pieces": True, "prefill_together": False}
        return dataclasses.replace(own, ragged=True, max_rows=pages.table.num_rows, runs_ahead=True, **more)

    @property
    def runs_on_pages(self) -> bool:
        """True if passes run over pages, on a GPU with foresay's kernels."""
        return self.paged is not None

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel."""
        return self.paged.cache_bytes(lengths) if self.paged else super().cache_bytes(lengths)

    def free_bytes(self) -> int:
        """See LanguageModel."""
        return self.paged.free_bytes() if self.paged else self.memory_bytes()

    def memory_bytes(self) -> int:
        """Bytes of the model's devices that are not in use."""
        return super().free_bytes()

    def _passes(self) -> PagedPasses | None:
        return self.paged

    def _chain_states(self) -> tuple[int, int | None]:
        return self.num_layers, None

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """See TransformersModel."""
        if isinstance(cache, SlotCache):
            return super().forward(model_input, cache)
        if self.paged is None:
            raise UnsupportedModelError("the model was changed while a session decodes with it; begin another session")
        scores, hidden = self.paged(model_input, cast(Any, cache))
        return ModelOutput(None if scores is None else self._padded(scores), hidden, subset=self.subset)

    @property
    def cache_dtype(self) -> torch.dtype:
        """See TransformersModel."""
        return super().cache_dtype if self.fused is None else self.fused.cache_dtype

    def watch_for_changes(self) -> None:
        """Compare the model with its current state at each new cache: a caller who owns it may change it in between."""
        self._watched_state = state_of(self.model)

    @property
    def batch_invariant(self) -> bool:
        """See TransformersModel. The compiled kernels compute each token independently of the others."""
        return self.fused is not None and self.fused.is_native

    def new_cache(self) -> Any:
        """Return a cache without rows: a SlotCache, or a PagedCache for passes over pages."""
        if self.fused is not None and self._watched_state is not None and state_of(self.model) != self._watched_state:
            logger.warning(
                "the model was changed after it was loaded: its passes are made by its family's own code now"
            )
            self.fused = None
        maker = self.paged or self.fused
        return (None if maker is None else maker.new_cache()) or SlotCache()

    def borrowed(self, owner: Any) -> Any:
        """See TransformersModel. Drops the fused layers if the owner's cache no longer has the layout that they read."""
        is_paged = not isinstance(owner, SlotCache)
        if self.paged is not None and is_paged and owner.pool is self.paged.pool:
            return self.paged.new_cache(owner)
        if self.paged is not None or (self.batch_invariant and not isinstance(owner.tensors, RowStores)):
            self.fused = None
        return None if is_paged else super().borrowed(owner)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert len(cache.lengths) == first
        cast(SlotCache, cache).add_rows(len(rows) - first)

    def _call(
        self, model_input: ModelInput, token_ids: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]:
        logits, hidden = model_input.logits, model_input.hidden_layers
        if self.fused is not None:
            return self.fused(token_ids, at, cache, model_input)
        adapter = TransformersCache(cache, at)
        kwargs: dict[str, Any] = {"input_ids": token_ids, "past_key_values": adapter, "use_cache": True}
        if self._takes_positions:
            # padding may exceed the model's last position; it is never read
            kwargs["position_ids"] = at.positions.clamp(max=self.position_limit - 1)
        if hidden:
            kwargs["output_hidden_states"] = True
        cache_only = logits is Logits.NONE
        out = self._body(**kwargs) if cache_only else self.model(**kwargs)
        return None if cache_only else out.logits, {layer: out.hidden_states[layer] for layer in hidden}
