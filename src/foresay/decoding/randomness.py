"""Randomness that belongs to a request.

Two kinds of uniforms, both pure functions without state, so that a request draws the same numbers alone or in any batch:

- What proposes and tests draft tokens is keyed by (key, level, start, purpose, offset): the request's key, the cascade
  level, the length when the step began, and the place within the step. A test that failed is never met again.
- What *writes* a token, after a rejection, after none, or in place of a guess that nobody sampled, is keyed by (key, level,
  position). A position is written once, so the number is used once, and it does not depend on how steps were cut: under
  look-up drafters, whatever they guess or remember, the text is that of plain decoding with the same seed.

A row's key is its seed; a drafter that decodes itself gets keys derived from the step's. Knows nothing of laws.

The mixing function is the finaliser of splitmix64 (Steele et al. 2014), chained over the fields, in wrapping int64.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch


class Purpose(IntEnum):
    """What a number is for; two purposes never share one."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 4
    COUPLED = 5


def _signed(value: int) -> int:
    """64 bits read as a signed integer."""
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
    """A key for streams of their own, as a function of a key and some small integers, in [0, 2^63)."""
    state = _mix_int((key + 0x9E3779B97F4A7C15) & _MASK)
    for value in values:
        state = _mix_int((state * 3 + (value + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return state >> 1


def _words(x: torch.Tensor) -> Any:
    """Where wrapping int64 are mixed: on a host in numpy, whose small operations cost a fraction of PyTorch's."""
    return x.numpy() if x.device.type == "cpu" else x


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
    """int64 -> float64 in (0, 1): 52 random bits, centred so that neither end is reached."""
    words: torch.Tensor = bits if isinstance(bits, torch.Tensor) else torch.from_numpy(bits)
    return ((words >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


class Streams:
    """The random streams of B rows in one step.

    seeds, starts: [B] int64; starts are the committed lengths. keys: [B] int64, what uniforms are made of; None takes the
    seeds. shares_noise: tokens are drawn with Gumbel noise that is a function of (seed, position, token) alone (Daliri et al.
    2024) instead of by an inverse CDF.
    """

    __slots__ = ("_step", "_writes", "keys", "level", "seeds", "shares_noise", "starts")

    def __init__(
        self,
        seeds: torch.Tensor,
        starts: torch.Tensor,
        *,
        keys: torch.Tensor | None = None,
        level: int = 0,
        shares_noise: bool = False,
    ) -> None:
        self.seeds, self.starts, self.level, self.shares_noise = seeds, starts, level, shares_noise
        self.keys = seeds if keys is None else keys
        self._step: Any = None
        self._writes: Any = None

    def uniform(self, purpose: Purpose, offsets: torch.Tensor) -> torch.Tensor:
        """Numbers of this step. offsets: [B, n] or [n] int64 -> [B, n] float64 in (0, 1)."""
        if self._step is None:
            self._step = _absorb(_absorb(_absorb(self._opened(), 0), _words(self.starts)), self.level)
        return _unit(_absorb(_absorb(self._step, int(purpose))[:, None], _words(offsets)))

    def writing(self, offsets: torch.Tensor) -> torch.Tensor:
        """Numbers that write the tokens at absolute positions. offsets from the start: [B, n] or [n] -> [B, n] in (0, 1)."""
        if self._writes is None:
            self._writes = _absorb(_absorb(self._opened(), int(Purpose.TARGET)), self.level)
        return _unit(_absorb(self._writes[:, None], _words(self.starts)[:, None] + _words(offsets)))

    def _opened(self) -> Any:
        return _mix(_words(self.keys) + _GOLDEN)

    def gumbel(self, row: torch.Tensor, offset: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Gumbel(0, 1) noise for tokens at absolute positions.

        row, offset: int64, batch index and offset from the row's start, of one shape that broadcasts with tokens: one place
        and its tokens, or a place for each token. tokens: [n] int64 -> [n] float32.
        Depends on (seed, position, token) alone: drafter, target and plain decoding meet the same noise.
        """
        position = self.starts[row] + offset
        key = _absorb(_absorb(_mix(self.seeds[row] + _GOLDEN), int(Purpose.COUPLED)), position)
        return -torch.log(-torch.log(_unit(_absorb(key, tokens)))).to(torch.float32)
