"""Decoder-only models with recurrent layers: state-space models, linear attention, and hybrids with attention.

Fused families run on the compiled kernels over a StateCache, whose states can be truncated. The states of a family's own code
cannot, so the cache keeps snapshots; a padding token would change a state, so that a ragged pass runs as several passes over the
columns that the same rows have. Owns these passes; knows no family (see states.py).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.errors import UnsupportedModelError
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cache.snapshots import MAX_SHARED
from foresay.models.cache.state_cache import StateCache
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.selective_scan import continues_states, scans, step_limits
from foresay.models.huggingface.states import OwnStateCache, States, compact

_OWN_STATES = ("minimax", "recurrent_gemma", "rwkv", "xlstm")
"""Families that keep states in their modules or in caches of their own classes."""


class RecurrentModel(CausalModel):
    """A decoder-only transformers model with recurrent layers."""

    rewinds_states = True

    def __init__(self, model: PreTrainedModel) -> None:
        """Put `model` in eval mode, and run a pass to measure its states. Raises UnsupportedModelError if it fails."""
        if model.config.get_text_config(decoder=True).model_type in _OWN_STATES:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded: its states are in no common cache")
        super().__init__(model)
        self.takes_trees = False
        continues_states(model)
        self._limits = step_limits(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        try:
            self.state_bytes, self._slot_bytes = self._measured()
        except Exception as error:  # a family's code may expect another kind of cache
            self.release()
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be decoded: its passes do not run over a cache of states "
                f"({type(error).__name__}: {error})"
            ) from error

    @torch.inference_mode()
    def _measured(self) -> tuple[int, int]:
        """Return the bytes of a row's states, and of a token's keys and values."""
        cache = self.new_cache()
        cache.add_rows(1)
        with _quiet_fallbacks() if self.hardware.on_cpu else nullcontext():
            for columns in (2, 1):
                tokens = torch.zeros(1, columns, dtype=torch.int64, device=self.device)
                self.forward(ModelInput(tokens, [columns]), cache)
        state = cache.states.present(0).state or {}
        layers = getattr(cache.tensors, "layers", ())
        slot = sum(store[0, 0].nbytes for layer in layers for store in layer or ())
        return sum(tensor.nbytes for tensor in state.values()), slot

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        if self.fused is not None:
            return super().capabilities
        on_cpu = self.hardware.on_cpu
        return Capabilities(num_layers=self.num_layers, prefill_together=not on_cpu, prefill_in_any_pieces=False)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel. A row has its present state, the one before it, and those of its prompt."""
        if self.fused is not None:
            return self.fused.cache_bytes(lengths, MAX_SHARED)
        longest = max(lengths, default=0)
        states = 2 + min(MAX_SHARED, -(-longest // self.capabilities.prefill_chunk))
        return len(lengths) * (states * self.state_bytes + longest * self._slot_bytes)

    def new_cache(self) -> Any:
        """Return a cache without rows: a RecurrentCache, or a StateCache for fused passes."""
        cache = super().new_cache()  # may find that the model was changed
        return RecurrentCache() if self.fused is None else cache

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert isinstance(cache, SlotCache) and len(cache.lengths) == first
        cache.add_rows(len(rows) - first)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """See TransformersModel."""
        if isinstance(cache, StateCache):
            return self._fused_pass(model_input, cache)
        assert isinstance(cache, RecurrentCache)
        batch, columns = model_input.token_ids.shape
        outputs: dict[int, torch.Tensor] = {}
        for segment in self._segments(model_input.num_tokens):
            for name, values in self._run(model_input, cache, segment, replace=segment.start > 0).items():
                outputs[name] = segment.merged(values, outputs.get(name), batch, columns)
        scores = outputs.pop(_LOGITS, None)
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, outputs)
        if scores is None:  # no row has a token
            scores = torch.zeros(batch, columns, self.vocab_size, dtype=self.model.dtype, device=self.device)
        return ModelOutput(self._padded(model_input.scored(scores)), outputs, subset=self.subset)

    def _fused_pass(self, model_input: ModelInput, cache: StateCache) -> ModelOutput:
        """Run a pass on the compiled kernels; keep the states after a prefill pass for rows with a common prefix."""
        if self.fused is None:
            raise UnsupportedModelError("the model was changed while a session decodes with it; begin another session")
        output = super().forward(model_input, cache)
        if model_input.logits is Logits.NONE:
            cache.share(model_input.first_row, model_input.num_tokens)
        return output

    def _segments(self, counts: Sequence[int]) -> Iterator[_Segment]:
        """Split the columns of a ragged pass where rows end. counts: tokens of each row."""
        start = 0
        for end in sorted(set(counts) - {0}):
            yield _Segment(start, end, tuple(i for i, count in enumerate(counts) if count >= end))
            start = end

    def _run(
        self, model_input: ModelInput, cache: RecurrentCache, segment: _Segment, *, replace: bool
    ) -> dict[int, torch.Tensor]:
        """Run the model over a segment and record the new states; return hidden states by layer, and logits as `_LOGITS`.

        replace: the pass's earlier segments have recorded a state before; it is replaced.
        """
        first, last = segment.first, segment.last
        token_ids = model_input.token_ids[first:last, segment.start : segment.end]
        row = model_input.first_row + first
        at = cache.begin_pass(row, last - first, segment.columns, self.device)
        own = OwnStateCache(cache, at, self._joined_states(cache, row, last - first), self._limits)
        with attention.during(at), scans():
            output = self._pass(token_ids, own, model_input, at.positions)
        states = own.states
        share = model_input.logits is Logits.NONE
        ending = [i for i in segment.rows if model_input.num_tokens[i] == segment.end]
        # without a copy, a row would keep the states of the others alive
        copied = ending if share or len(ending) < last - first else []
        for i in segment.rows:
            target = model_input.first_row + i
            cache.lengths[target] += segment.columns
            state = {name: tensor[i - first : i - first + 1] for name, tensor in states.items()}
            if i in copied:
                state = {name: compact(tensor) for name, tensor in state.items()}
            cache.states.record(target, cache.lengths[target], state, replace=replace or share, share=share)
        found = {layer: output.hidden_states[layer] for layer in model_input.hidden_layers}
        return found if share else {**found, _LOGITS: output.logits}

    def _pass(
        self, token_ids: torch.Tensor, states: OwnStateCache, model_input: ModelInput, positions: torch.Tensor
    ) -> Any:
        """Call the model's own code."""
        kwargs: dict[str, Any] = {"input_ids": token_ids, "use_cache": True, self._cache_name: states}
        if self._takes_positions:  # padding may exceed the model's last position; it is never read
            kwargs["position_ids"] = positions.clamp(max=self.position_limit - 1)
        if model_input.hidden_layers:
            kwargs["output_hidden_states"] = True
        return self._body(**kwargs) if model_input.logits is Logits.NONE else self.model(**kwargs)

    def _joined_states(self, cache: RecurrentCache, first: int, count: int) -> States | None:
        """Return the states of rows as one batch, a copy; None if all rows are empty."""
        states = [cache.states.present(row).state for row in range(first, first + count)]
        known = next((state for state in states if state is not None), None)
        if known is None:
            return None
        return {
            name: torch.cat([torch.zeros_like(like) if state is None else state[name] for state in states])
            for name, like in known.items()
        }


@contextmanager
def _quiet_fallbacks() -> Iterator[None]:
    """Suppress transformers' advice to install kernels for GPUs, which it gives once for each of them."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_LOGITS = -1
"""Name of the logits among outputs that are named by layer."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Columns `start` to `end` of a ragged pass, which the rows `rows`, all between `first` and `last`, have."""

    start: int
    end: int
    rows: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.rows[0]

    @property
    def last(self) -> int:
        return self.rows[-1] + 1

    @property
    def columns(self) -> int:
        return self.end - self.start

    def merged(self, values: torch.Tensor, known: torch.Tensor | None, batch: int, columns: int) -> torch.Tensor:
        """Return the values of a whole pass [B, T, ...], those of this segment written into `known`, zeros if None."""
        if values.shape[:2] == (batch, columns):
            return values
        out = values.new_zeros(batch, columns, values.shape[-1]) if known is None else known
        out[self.first : self.last, self.start : self.end] = values
        return out
