"""Recurrent states in and out of a transformers model's forward pass, for each way in which families keep them.

Most families read and update a transformers Cache. RWKV and xLSTM take objects of their own, and RecurrentGemma keeps states in
its modules. Owns these interfaces; a state is a mapping from names to tensors [B, ...]. Knows no rows and no rewinding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.huggingface.causal import TransformersCache
from foresay.models.huggingface.selective_scan import Limits, continues_states, enter_layer, step_limits

States = dict[str, torch.Tensor]


def compact(state: torch.Tensor) -> torch.Tensor:
    """Return a state, as a copy if it is a part of a larger tensor, such as a pass's inputs, which a snapshot would keep."""
    return state.clone() if state.untyped_storage().nbytes() > state.nbytes else state


@dataclass(slots=True)
class OwnStatePass:
    """One forward pass that continues from states. Passes of several threads may run at once."""

    arguments: dict[str, Any]
    """Arguments of the model's forward that carry the states."""
    states_after: Callable[[Any], States]
    """Returns the states after the pass, given its output."""


class StatePort(Protocol):
    """Carries states through one family's forward pass."""

    rows_together: bool = True
    """Rows may share a pass."""

    def during(self, states: States | None, slots: SlotCache, at: Placement) -> AbstractContextManager[OwnStatePass]:
        """Around a pass that continues from `states`, and the reading of those after it; None for the initial state."""
        ...

    def initial(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the initial state of this name with another's shape."""
        return torch.zeros_like(like)

    def release(self) -> None:
        """Undo changes to the model."""
        return


def port_of(model: PreTrainedModel) -> StatePort:
    """Return the interface of a model's family."""
    kind = model.config.get_text_config(decoder=True).model_type
    if kind == "rwkv":
        return _RwkvPort()
    if kind == "xlstm":
        return _XlstmPort(model)
    if kind == "recurrent_gemma":
        return _ModulePort(model)
    return _CachePort(model)


class OwnStateCache(TransformersCache):
    """A transformers Cache over states, and over the slot cache for attention layers."""

    def __init__(self, slots: SlotCache, at: Placement, states: States | None) -> None:
        super().__init__(slots, at)
        self._fresh = states is None
        self.states: States = dict(states or {})
        """Names are the kind of state, the layer and the state's index in it."""
        self.limits: Mapping[int, Limits] = {}
        """See `step_limits`."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if the pass continues from a state."""
        return not self._fresh

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Return False: the convolution's states may be updated in place."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution, or None at the start of a text."""
        return None if self._fresh else self.states.get(f"conv.{layer_idx}.{state_idx}")

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Append inputs [B, channels, T]; return all that the convolution reads: earlier inputs, or padding, and these."""
        name = f"conv.{layer_idx}.{state_idx}"
        known = self.states.get(name)
        size = int(known.shape[-1] if known is not None else conv_kernel_size or conv_states.shape[-1])
        full = conv_states if known is None else torch.cat([known, conv_states], -1)
        full = F.pad(full, (max(0, size - full.shape[-1]), 0))
        self.states[name] = compact(full[..., -size:])
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state, or None at the start of a text."""
        state = None if self._fresh else self.states.get(f"recurrent.{layer_idx}.{state_idx}")
        enter_layer(state, self.limits.get(layer_idx))
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace a recurrent state."""
        self.states[f"recurrent.{layer_idx}.{state_idx}"] = compact(recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a linear attention layer, under MiniMax's name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Replace the state of a linear attention layer, under MiniMax's name."""
        self.update_recurrent_state(linear_cache, layer_idx)


def _cache_class(model: PreTrainedModel) -> type[OwnStateCache]:
    """Return the class of caches for a model; MiniMax accepts only its own and those derived from it."""
    if model.config.get_text_config(decoder=True).model_type != "minimax":
        return OwnStateCache
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return type("MiniMaxOwnStateCache", (OwnStateCache, MiniMaxCache), {})


class _CachePort(StatePort):
    """A transformers Cache, under the name by which the family's forward takes it."""

    def __init__(self, model: PreTrainedModel) -> None:
        continues_states(model)
        self._class, self._limits = _cache_class(model), step_limits(model)
        names = inspect.signature(model.forward).parameters
        self._name = "cache_params" if "cache_params" in names else "past_key_values"

    def during(self, states: States | None, slots: SlotCache, at: Placement) -> AbstractContextManager[OwnStatePass]:
        cache = self._class(slots, at, states)
        cache.limits = self._limits
        return nullcontext(OwnStatePass({self._name: cache}, lambda output: cache.states))


class _RwkvPort(StatePort):
    """Five tensors [B, hidden, layers]; the last one is the maximum of exponents so far.

    RWKV's own code mixes up the rows of a pass over one token each.
    """

    rows_together = False

    def during(self, states: States | None, slots: SlotCache, at: Placement) -> AbstractContextManager[OwnStatePass]:
        given = {"state": None if states is None else [states[str(i)] for i in range(5)]}
        return nullcontext(OwnStatePass(given, lambda output: {str(i): state for i, state in enumerate(output.state)}))

    def initial(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, -1e30 if name == "4" else 0.0)


class _XlstmPort(StatePort):
    """An object with three tensors of each layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        self._config, self._dtype = model.config, model.dtype
        self._class: Any = xLSTMCache

    def during(self, states: States | None, slots: SlotCache, at: Placement) -> AbstractContextManager[OwnStatePass]:
        cache = self._class(self._config, at.batch, dtype=self._dtype, device=at.slots.device)
        if states is not None:
            for layer, own in cache.rnn_state.items():
                for i, tensor in enumerate(own):
                    tensor.copy_(states[f"{layer}.{i}"])

        def after(output: Any) -> States:
            return {f"{layer}.{i}": one for layer, own in cache.rnn_state.items() for i, one in enumerate(own)}

        return nullcontext(OwnStatePass({"cache_params": cache}, after))


class _ModulePort(StatePort):
    """States in attributes of RecurrentGemma's modules, so that one pass runs at a time.

    Its own code drops the convolution's inputs before a pass of several tokens; a hook on the convolution puts them back.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._blocks: list[Any] = [module for module in model.modules() if hasattr(module, "conv1d_state")]
        self._lock = Lock()
        self._before: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._hooks = [
            block.conv_1d.register_forward_hook(partial(self._continued, index))
            for index, block in enumerate(self._blocks)
        ]

    def _continued(self, index: int, conv: nn.Conv1d, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """Return the convolution's output after the inputs before the pass, [B, channels, T] and more."""
        if index not in self._before:
            return output
        full = torch.cat([self._before[index].to(args[0].dtype), args[0]], -1)
        self._inputs[index] = full
        return F.conv1d(full, conv.weight, conv.bias, groups=conv.groups)

    @contextmanager
    def during(self, states: States | None, slots: SlotCache, at: Placement) -> Iterator[OwnStatePass]:
        with self._lock:
            try:
                for index, block in enumerate(self._blocks):
                    width, channels = block.conv1d_width - 1, block.conv_1d.in_channels
                    zeros = torch.zeros(
                        at.batch, channels, width, device=at.slots.device, dtype=block.conv_1d.weight.dtype
                    )
                    self._before[index] = block.conv1d_state = zeros if states is None else states[f"conv.{index}"]
                    none = torch.zeros(at.batch, channels, device=at.slots.device)
                    block.rg_lru.recurrent_states = none if states is None else states[f"recurrent.{index}"]
                yield OwnStatePass({"past_key_values": TransformersCache(slots, at)}, lambda output: self._states())
            finally:
                self._before, self._inputs = {}, {}
                for block in self._blocks:
                    block.conv1d_state = block.rg_lru.recurrent_states = None

    def _states(self) -> States:
        states: States = {}
        for index, block in enumerate(self._blocks):
            width, full = block.conv1d_width - 1, self._inputs.get(index)
            states[f"conv.{index}"] = block.conv1d_state if full is None else compact(full[..., -width:])
            states[f"recurrent.{index}"] = block.rg_lru.recurrent_states
        return states

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
