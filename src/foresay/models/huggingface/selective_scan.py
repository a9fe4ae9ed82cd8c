"""Scans of recurrent layers that continue from a state, and cost what their tokens do (Gu and Dao 2023, Algorithm 2).

transformers' scan of Mamba layers starts every pass of several tokens from zero, so that it scores a draft, or the second part of
a long prompt, as if nothing came before. Some families limit the time steps in passes of several tokens, but not in those of one.
Functions that work in chunks fill a short pass up to 64 or 256 tokens. `continues_states` replaces them during our own passes;
other users of transformers keep its own. Owns the recurrence and these replacements.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F

from foresay.decoding.devices import is_remote

Limits = tuple[float, float]
"""Smallest and largest time step."""
_MARK = "continues_states"


class _Layer(threading.local):
    """The layer whose state the pass in this thread has read last."""

    state: torch.Tensor | None = None
    """[B, channels, N], or [B, heads, channels, N] with a scan for each head."""
    head = 0
    limits: Limits | None = None
    inside = False
    """True during a forward pass of ours."""


_layer = _Layer()


@contextmanager
def scans() -> Iterator[None]:
    """Around a forward pass: scans after it start from zero."""
    _layer.inside = True
    try:
        yield
    finally:
        _layer.inside = False
        enter_layer(None, None)


def enter_layer(state: torch.Tensor | None, limits: Limits | None) -> None:
    """Make this thread's scans continue from a layer's state, and its steps respect limits. None: from zero; no limits."""
    _layer.state, _layer.head, _layer.limits = state, 0, limits


def step_limits(model: torch.nn.Module) -> Mapping[int, Limits]:
    """Return the limits of time steps of each layer that has some."""
    found = {}
    for module in model.modules():
        limits, layer = getattr(module, "time_step_limit", None), getattr(module, "layer_idx", None)
        if limits is not None and layer is not None and tuple(limits) != (0.0, math.inf):
            found[int(layer)] = (float(limits[0]), float(limits[1]))
    return found


def continues_states(model: Any) -> None:
    """Replace the scans and the step in the module of a model's class, if it has them."""
    module = sys.modules[type(model).__module__]
    for name, replacement in _REPLACEMENTS.items():
        original: Callable[..., Any] | None = getattr(module, name, None)
        if original is not None and not hasattr(original, _MARK):
            replaced = replacement(original)
            if replaced is not original:
                setattr(replaced, _MARK, True)
                setattr(module, name, replaced)


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(*args: Any, **kwargs: Any) -> Any:
        state = _next_state()
        if state is None:
            return original(*args, **kwargs)
        out, last = selective_scan(
            state,
            *args,
            skip=kwargs.get("D"),
            gate=kwargs.get("z"),
            bias=kwargs.get("delta_bias"),
            softplus=kwargs.get("delta_softplus", False),
        )
        return (out, last) if kwargs.get("return_last_state") else out

    return scan


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        *args: Any,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **kwargs: Any,
    ) -> Any:
        if _layer.limits is not None:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (F.softplus(dt) if dt_softplus else dt).clamp(*_layer.limits)
            dt_bias, dt_softplus = None, False
        return original(state, hidden_states, dt, *args, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)

    return step


def _chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that fills its input [B, T, ...] up to chunks. A shorter chunk changes only the order of sums."""
    size = signature(original).parameters.get("chunk_size")
    if size is None:  # another kernel, which chooses its own
        return original
    usual = size.default

    def scan(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _layer.inside and not is_remote(first.device):  # kernels of GPUs have chunks of their own
            kwargs["chunk_size"] = min(kwargs.get("chunk_size", usual), 1 << (first.shape[1] - 1).bit_length())
        return original(first, *args, **kwargs)

    return scan


_REPLACEMENTS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "mamba_selective_scan": _scan,
    "mamba2_selective_state_update": _step,
    "mamba2_chunk_scan": _chunks,
    "torch_chunk_gated_delta_rule": _chunks,
    "chunk_kimi_delta_attention": _chunks,
}


def _next_state() -> torch.Tensor | None:
    state = _layer.state
    if state is None or state.dim() == 3:
        return state
    _layer.head += 1
    return state[:, _layer.head - 1]


def selective_scan(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softplus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, channels, T] of a scan that starts from `state`, and the last state.

    state: [B, channels, N]. hidden_states, dt, gate: [B, channels, T]. decay (A in the paper): [channels, N]. inputs, outputs (B
    and C): [B, N, T]. skip (D), bias (of dt): [channels]. softplus: apply it to dt.
    """
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    step = (F.softplus(dt) if softplus else dt).float()
    now, weighted, found = state.float(), step * hidden_states.float(), []
    for t in range(hidden_states.shape[-1]):
        now = torch.exp(decay.float() * step[..., t, None]) * now
        now = now + weighted[..., t, None] * inputs[:, None, :, t].float()
        found.append((now.to(outputs.dtype) @ outputs[..., t, None]).squeeze(-1))
    out = torch.stack(found, -1)
    if skip is not None:
        out = out + hidden_states * skip[:, None]
    if gate is not None:
        out = out * F.silu(gate)
    return out.to(hidden_states.dtype), now.to(state.dtype)
