"""The duration of `foresay tune`, estimated from a few forward passes before it starts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from time import perf_counter

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.generation.method import Method, distinct
from foresay.records.profile import FILLED_TOGETHER
from foresay.spec.recipes import read_drafter
from foresay_lab.measure.profile import prompt_lengths

_PASSES = 4
"""Forward passes that are timed."""
_ROUNDS, _ROUND_PASSES, _WIDER = 3, 11 * 6, 5
"""Rounds of a profile; passes of each for a batch size (draft lengths, and repeats over contexts); their mean draft length."""
_FILLED = 4 * FILLED_TOGETHER
"""Prompts of each length whose prefill a round times."""
_LEAST = 4
"""Least number of outputs."""
_BANDWIDTH_S = 3.0
"""Seconds of measuring the memory bandwidth, for a profile."""
_REPLAY_S = 4e-4
"""Seconds that replaying a token takes, for each candidate."""
_LIVE_PASSES = 2 * 2 * 64
"""Passes of a live run: repeats, with plain decoding next to each, of 64 tokens."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of each part of a run, and its size."""

    recording: float
    timing: float
    replaying: float
    live: float
    count: int
    """Number of outputs that are recorded and replayed."""
    rounds: int
    """Rounds of timing passes."""
    candidates: int
    finalists: int

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return self.recording + self.timing + self.replaying + self.live

    def within(self, seconds: float) -> Estimate:
        """Return the estimate of a run of at most `seconds`: a third each for timing, for outputs, and for live runs.

        One round of timing, four outputs and one live run of each candidate remain in any case.
        """
        third = seconds / 3
        rounds = max(1, min(self.rounds, int(self.rounds * third / max(self.timing, 1e-9))))
        outputs = max(self.recording + self.replaying, 1e-9)
        count = max(min(self.count, _LEAST), min(self.count, int(self.count * third / outputs)))
        share = count / max(self.count, 1)
        return replace(
            self,
            recording=self.recording * share,
            replaying=self.replaying * share,
            timing=self.timing * rounds / self.rounds,
            live=min(self.live, third),
            count=count,
            rounds=rounds,
        )

    def __str__(self) -> str:
        parts = {
            f"recording {self.count} outputs": self.recording,
            "timing passes": self.timing,
            f"replaying {self.candidates} candidates": self.replaying,
            f"running {self.finalists} live": self.live,
        }
        named = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in parts.items() if seconds)
        return f"tuning takes about {_duration(self.total_s)}: {named}"


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
    own: Sequence[Method] = (),
) -> Estimate:
    """Time a few passes over some prompts, and return what they imply for the whole run.

    size: number of outputs, and tokens of each. recorded: True if there is a recording of them. sizes: batch sizes to tune for;
    rows: the one that records. finalists: most predicted methods that are run live. own: methods that are run in any case.
    """
    (count, tokens), every = size, distinct([*methods, *own])
    timed = {one: _timed(target, [list(ids) for ids in islice(cycle(prompts), one)]) for one in {rows, *sizes}}
    prefill_s, pass_s = timed[rows]
    token_s = prefill_token_s(target, max(1, *map(len, prompts)))
    filled = _FILLED * sum(prompt_lengths(max(map(len, prompts))))
    passes = sum(timed[one][1] + _WIDER * one * token_s for one in sizes)
    loading = {method.drafter for method in every if read_drafter(method.drafter).loads_model}
    candidates, always = (len(some) * len(sizes) for some in (every, own))
    finalists = always + min(finalists, candidates - always)
    return Estimate(
        recording=0.0 if recorded else math.ceil(count / rows) * (prefill_s + tokens * pass_s),
        timing=_BANDWIDTH_S + _ROUNDS * (_ROUND_PASSES * passes + filled * token_s),
        replaying=count * tokens * (candidates * _REPLAY_S + len(loading) * pass_s / rows),
        live=finalists * _LIVE_PASSES * timed[max(sizes)][1] * math.ceil(8 / max(sizes)),
        count=count,
        rounds=_ROUNDS,
        candidates=candidates,
        finalists=finalists,
    )


def _timed(target: Generator, prompts: list[list[int]]) -> tuple[float, float]:
    """Return (seconds of prefilling the prompts, seconds of a forward pass over one token of each)."""
    seconds = []
    for tokens in (1, 1, 1 + _PASSES):  # the first run warms up
        began = perf_counter()
        target.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
        seconds.append(perf_counter() - began)
    return seconds[1], max(1e-6, seconds[2] - seconds[1]) / _PASSES


def prefill_token_s(target: Generator, count: int) -> float:
    """Return the prefill seconds of a token, over random ones: prompts share their beginnings, which are prefilled once."""
    numbers = random.Random(0)
    ids = [numbers.randrange(target.target.model.vocab_size) for _ in range(count)]
    return _timed(target, [ids])[0] / count


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{math.ceil(seconds / 60)} min"
