"""Random numbers that belong to a request.

Two kinds of uniforms, both stateless pure functions, so that a request draws the same numbers alone or in any batch:

- Uniforms that draw and test draft tokens are keyed by (key, level, start, purpose, offset): the request's key, the cascade
  level, the committed length at the start of the step, and the offset within the step. The uniform of a failed test is never
  reused.
- Uniforms that draw a committed token (residual, bonus, or the target's draw at a draft token that was not sampled) are keyed by
  (key, level, position). Each position is committed once, so each uniform is used once, and it does not depend on where steps
  begin: with n-gram drafters the text is that of plain decoding with the same seed.

A row's key is its seed; a drafter that runs the step itself gets keys derived from the step's. Knows no distributions.

The mixing function is the finaliser of splitmix64 (Steele et al. 2014), chained over the fields, in wrapping int64.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from foresay.decoding import devices
from foresay.decoding.devices import is_remote


class Purpose(IntEnum):
    """Use of a random number; two purposes never share one."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 4
    COUPLED = 5


def _signed(value: int) -> int:
    """64 bits as a signed integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


_MASK = (1 << 64) - 1
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def derive(key: int, *values: int) -> int:
    """Derive a key in [0, 2^63) from a key and some small integers, for independent streams."""
    state = _mix_int((key + 0x9E3779B97F4A7C15) & _MASK)
    for value in values:
        state = _mix_int((state * 3 + (value + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return state >> 1


def _words(x: torch.Tensor) -> Any:
    """The array in which int64 are mixed: NumPy on the CPU, whose small operations cost a fraction of PyTorch's."""
    return x if is_remote(x.device) else x.numpy()


def _shift(x: Any, bits: int) -> Any:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Any) -> Any:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _absorb(state: Any, value: Any) -> Any:
    if isinstance(value, int):
        return _mix(state * 3 + _signed((value + 1) * _GOLDEN & _MASK))
    return _mix(state * 3 + (value + 1) * _GOLDEN)


def _unit(bits: Any) -> torch.Tensor:
    """int64 -> float64 in (0, 1): 52 random bits, centred so that neither 0 nor 1 occurs."""
    words: torch.Tensor = bits if isinstance(bits, torch.Tensor) else torch.from_numpy(bits)
    return ((words >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


_MOST = 127
"""Largest offset of a step on a device, unless it is given."""


class Streams:
    """Random streams of B rows in one step.

    Uniforms are computed on the host, which knows all they depend on; on a device the uniforms of all offsets are copied at once.
    """

    __slots__ = (
        "_by_position",
        "_by_step",
        "_device",
        "_most",
        "_tables",
        "keys",
        "level",
        "seeds",
        "shares_noise",
        "starts",
    )

    def __init__(
        self,
        seeds: torch.Tensor,
        starts: torch.Tensor,
        *,
        keys: torch.Tensor | None = None,
        level: int = 0,
        shares_noise: bool = False,
        device: torch.device | None = None,
        most: int = _MOST,
    ) -> None:
        """seeds, starts: [B] int64 on the CPU; starts are the committed lengths. keys: of the uniforms, [B]; None for the seeds.

        shares_noise: tokens are drawn with Gumbel noise that is a function of (seed, position, token) alone (Daliri et al. 2024)
        instead of by inverse CDF. device: of offsets and results; None for the CPU. most: largest offset, for a device.
        """
        self.seeds, self.starts, self.level, self.shares_noise = seeds, starts, level, shares_noise
        self.keys = seeds if keys is None else keys
        self._by_step: Any = None
        self._by_position: Any = None
        self._device, self._most = device or torch.device("cpu"), most
        self._tables: dict[Purpose, torch.Tensor] = {}

    def uniform(self, purpose: Purpose, offsets: torch.Tensor) -> torch.Tensor:
        """Uniforms of this step. offsets: [B, n] or [n] int64 -> [B, n] float64 in (0, 1)."""
        return self._of_step(purpose, offsets) if self._on_host else self._gathered(purpose, offsets)

    def position_uniform(self, offsets: torch.Tensor) -> torch.Tensor:
        """Uniforms of absolute positions. offsets: from the start, [B, n] or [n] int64 -> [B, n] float64 in (0, 1)."""
        return self._of_position(offsets) if self._on_host else self._gathered(Purpose.TARGET, offsets)

    @property
    def _on_host(self) -> bool:
        return not devices.is_remote(self._device)

    def _gathered(self, purpose: Purpose, offsets: torch.Tensor) -> torch.Tensor:
        if purpose not in self._tables:
            every = torch.arange(self._most + 1)
            found = self._of_position(every) if purpose is Purpose.TARGET else self._of_step(purpose, every)
            self._tables[purpose] = devices.moved(found, self._device)
        return self._tables[purpose].gather(1, offsets.expand(len(self.starts), offsets.shape[-1]))

    def _of_step(self, purpose: Purpose, offsets: torch.Tensor) -> torch.Tensor:
        if self._by_step is None:
            self._by_step = _absorb(_absorb(_absorb(self._initial(), 0), _words(self.starts)), self.level)
        return _unit(_absorb(_absorb(self._by_step, int(purpose))[:, None], _words(offsets)))

    def _of_position(self, offsets: torch.Tensor) -> torch.Tensor:
        if self._by_position is None:
            self._by_position = _absorb(_absorb(self._initial(), int(Purpose.TARGET)), self.level)
        return _unit(_absorb(self._by_position[:, None], _words(self.starts)[:, None] + _words(offsets)))

    def _initial(self) -> Any:
        return _mix(_words(self.keys) + _GOLDEN)

    def gumbel(self, row: torch.Tensor, offset: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Gumbel(0, 1) noise of tokens at absolute positions.

        row, offset: int64, batch index and offset from the row's start, broadcast with tokens: one position for all tokens, or
        one for each. tokens: [n] int64 -> [n] float32. A function of (seed, position, token) alone: the same for drafter,
        target and plain decoding.
        """
        seeds, starts = (
            one if self._on_host else devices.moved(one, self._device) for one in (self.seeds, self.starts)
        )
        key = _absorb(_absorb(_mix(seeds[row] + _GOLDEN), int(Purpose.COUPLED)), starts[row] + offset)
        return -torch.log(-torch.log(_unit(_absorb(key, tokens)))).to(torch.float32)
