"""Recurrent states in and out of a transformers model's forward pass, which reads and updates a transformers Cache.

Owns this cache; a state is a mapping from names to tensors [B, ...]. Knows no rows and no rewinding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.huggingface.causal import TransformersCache
from foresay.models.huggingface.selective_scan import Limits, enter_layer

States = dict[str, torch.Tensor]


def compact(state: torch.Tensor) -> torch.Tensor:
    """Return a state, as a copy if it is a part of a larger tensor, such as a pass's inputs, which a snapshot would keep."""
    return state.clone() if state.untyped_storage().nbytes() > state.nbytes else state


class OwnStateCache(TransformersCache):
    """A transformers Cache over states, and over the slot cache for attention layers."""

    def __init__(self, slots: SlotCache, at: Placement, states: States | None, limits: Mapping[int, Limits]) -> None:
        """states: before the pass, None at the start of a text. limits: see `step_limits`."""
        super().__init__(slots, at)
        self._fresh, self._limits = states is None, limits
        self.states: States = dict(states or {})
        """Names are the kind of state, the layer and the state's index in it."""

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
        enter_layer(state, self._limits.get(layer_idx))
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace a recurrent state."""
        self.states[f"recurrent.{layer_idx}.{state_idx}"] = compact(recurrent_states)
        return recurrent_states
