"""The duration of `foresay tune`, estimated from a few forward passes before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.generation.method import Method
from foresay.spec.recipes import read_drafter

_PASSES = 4
"""Forward passes that are timed."""
_PROFILE_PASSES = 3 * 11 * 6
"""Passes of a profile for each batch size: rounds, draft lengths, and repeats over contexts."""
_BANDWIDTH_S = 3.0
"""Seconds of measuring the memory bandwidth, for a profile."""
_REPLAY_S = 1e-4
"""Seconds that replaying a token takes, for each candidate."""
_LIVE_PASSES = 2 * 2 * 64
"""Passes of a live run: repeats, with plain decoding next to each, of 64 tokens."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of each part of a run."""

    parts: dict[str, float]

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in self.parts.items())
        return f"tuning takes about {_duration(self.total_s)}: {parts}"


def estimate(
    target: Generator,
    prompts: Sequence[Sequence[int]],
    size: tuple[int, int],
    *,
    recorded: bool,
    methods: Sequence[Method],
    sizes: Sequence[int],
    rows: int,
    finalists: int,
) -> Estimate:
    """Time a few passes over some prompts, and return what they imply for the whole run.

    size: number of outputs, and tokens of each. recorded: True if there is a recording of them. sizes: batch sizes to tune for;
    rows: the one that records.
    """
    count, tokens = size
    timed = {one: _timed(target, [list(ids) for ids in islice(cycle(prompts), one)]) for one in {rows, *sizes}}
    prefill_s, pass_s = timed[rows]
    loading = {method.drafter for method in methods if read_drafter(method.drafter).loads_model}
    candidates = len(methods) * len(sizes)
    parts = {
        "recording": 0.0 if recorded else math.ceil(count / rows) * (prefill_s + tokens * pass_s),
        "timing passes": _BANDWIDTH_S + _PROFILE_PASSES * sum(timed[one][1] for one in sizes),
        f"replaying {candidates} candidates": count * tokens * (candidates * _REPLAY_S + len(loading) * pass_s / rows),
        f"running {finalists} live": finalists * _LIVE_PASSES * timed[max(sizes)][1] * math.ceil(8 / max(sizes)),
    }
    return Estimate({name: seconds for name, seconds in parts.items() if seconds})


def _timed(target: Generator, prompts: list[list[int]]) -> tuple[float, float]:
    """Return (seconds of prefilling the prompts, seconds of a forward pass over one token of each)."""
    seconds = []
    for tokens in (1, 1, 1 + _PASSES):  # the first run warms up
        began = perf_counter()
        target.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
        seconds.append(perf_counter() - began)
    return seconds[1], max(1e-6, seconds[2] - seconds[1]) / _PASSES


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"
