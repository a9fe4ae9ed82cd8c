"""Whether speculation pays for a model on this machine: tokens per pass by kind of prompt, the cost of steps, and a conclusion.

The short version of `tune`: recorded outputs are replayed by kind, passes of a few widths are timed, and the default is run live.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter, thread_time

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.generation.method import Method
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay_lab.candidates import PAYS, Candidate, is_rough
from foresay_lab.measure.profile import measure
from foresay_lab.replay.replay import Expected, plain_decoding
from foresay_lab.tune import BUSY, Tuner, with_prefill

COLUMNS = (1, 2, 4, 8)
"""Tokens of the passes that are timed."""
_BUSY_SHARE, _BUSY_SPREAD = 0.8, 1.3
"""Least share of the time for which this process had a processor, and largest ratio of equal passes, on a quiet machine."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A method against plain decoding, by kind of prompt. The time of prompts is not counted."""

    method: Method
    kinds: Mapping[str, tuple[float, float]]
    """Kind -> (tokens per pass, predicted speed-up)."""
    speed_up: float
    """Predicted, over all kinds."""
    cost: float
    """Duration of a step with drafting, in passes of plain decoding: the tokens per pass from which on the method gains."""
    tokens_per_pass: float
    measured: float | None = None
    """The speed-up of live runs, the time of prompts included; None without any."""
    predicted: float | None = None
    """The prediction for these runs."""

    @property
    def best_known(self) -> float:
        """The predicted speed-up, corrected by what was measured."""
        return self.speed_up * (self.measured / self.predicted if self.measured and self.predicted else 1.0)


def timed(target: Generator, context: int, probe: int) -> tuple[Profile, str]:
    """Time passes of COLUMNS tokens over a row of `context` tokens, and the prefill of `probe` tokens.

    Returns (the profile, the sign of a busy machine: something else took the processors meanwhile; empty on a quiet one).
    """
    token_s = _prefill_token_s(target, probe)
    began, cpu = perf_counter(), thread_time()
    profile = measure(target, batches=(1,), columns=COLUMNS, contexts=(context,), repeats=7, fills=())
    share = (thread_time() - cpu) / (perf_counter() - began)
    spread = max(one.high / one.low for one in profile.timings)
    busy = ""
    if spread > _BUSY_SPREAD:
        busy = f"equal passes differ by {spread - 1:.0%}"
    elif share < _BUSY_SHARE and target.target.model.device.type == "cpu":
        busy = f"this process had a processor for {share:.0%} of the time"
    return with_prefill(profile, token_s), busy


def gains(
    target: Generator, recording: Recording, profile: Profile, methods: Sequence[Method], goes_on: Callable[[], bool]
) -> list[Gain]:
    """Predict methods by kind of prompt.

    goes_on: called before each method but the first, which is always predicted; False ends.
    """
    parts = {
        kind: replace(recording, records=tuple(one for one in recording.records if one.category == kind))
        for kind in dict.fromkeys(one.category for one in recording.records)
    }
    plain = {kind: plain_decoding(part, 1, profile) for kind, part in parts.items()}
    whole, found = _sum(list(plain.values())), list[Gain]()
    for method in methods:
        if found and not goes_on():
            break
        expected = {}
        for kind, part in parts.items():
            tuner = Tuner(target, part, profile=profile)
            expected[kind] = tuner.expected(method, 1)
            profile = tuner.profile([1], max(COLUMNS))  # with the times of a draft model
        every = _sum(list(expected.values()))
        found.append(
            Gain(
                method,
                {kind: (one.tokens_per_pass, plain[kind].latency_s / one.latency_s) for kind, one in expected.items()},
                whole.latency_s / every.latency_s,
                every.latency_s * every.tokens_per_pass / whole.latency_s,
                every.tokens_per_pass,
            )
        )
    return found


def run_live(target: Generator, recording: Recording, profile: Profile, gain: Gain, end: float) -> tuple[Gain, str]:
    """Run a method next to plain decoding, on one prompt of each kind, until `end`, a time of `monotonic`.

    Returns (the gain with the result, ""), or (the gain, a sign that the machine was busy).
    """
    kinds = len({one.category for one in recording.records})
    tuner = Tuner(target, recording, profile=profile, end=end)
    one = Candidate(gain.method, 1, tuner.expected(gain.method, 1), plain_decoding(recording, 1, profile))
    [found] = tuner.confirm([one], repeats=3, count=kinds)
    if tuner.tuning.plain_spread > BUSY:
        return gain, f"runs of plain decoding differ by {tuner.tuning.plain_spread:.0%}"
    return replace(gain, measured=found.speed_up, predicted=found.predicted), ""


def conclusion(found: Sequence[Gain], busy: str = "") -> str:
    """Return the answer in sentences. found: the default first."""
    default, *others = found
    pays = {kind: speed for kind, (_, speed) in default.kinds.items() if speed >= PAYS}
    idle = [speed for _, speed in default.kinds.values() if speed < PAYS]
    if not pays:
        text = f"Nothing gains here: the default drafter is {_range(idle)} of plain decoding."
    else:
        rest = f"; the other kinds gain nothing ({_range(idle)})" if idle else ""
        text = f"It pays here: the default drafter is {_listed(pays)}{rest}."
    if default.measured is not None and default.predicted is not None:
        rough = ": the prediction is rough" if is_rough(default.measured, default.predicted) else ""
        speeds = f"{default.measured:.2f}x measured, {default.predicted:.2f}x predicted"
        text += f" With the time of prompts: {speeds}{rough}."
    for one in others:
        gives = f"gives {one.tokens_per_pass:.2f} tokens a pass, and gains from {one.cost:.2f} on"
        text += f" {one.method.name} {gives}: {one.speed_up:.2f}x."
    if busy:
        text += f" The machine is busy ({busy}): the speeds are tokens per pass over the costs of passes, and rough."
    return text


def _prefill_token_s(target: Generator, count: int) -> float:
    """Return the prefill seconds of a token, over random ones, so that no earlier prompt has the same beginning."""
    numbers, seconds = random.Random(0), 0.0
    for _ in range(2):  # the first run warms up
        ids = [numbers.randrange(target.target.model.vocab_size) for _ in range(count)]
        began = perf_counter()
        target.generate([ids], SamplingParams(max_new_tokens=1, ignore_eos=True))
        seconds = perf_counter() - began
    return seconds / count


def _sum(parts: Sequence[Expected]) -> Expected:
    return Expected(**{one.name: sum(getattr(part, one.name) for part in parts) for one in fields(Expected)})


def _range(speeds: Sequence[float]) -> str:
    low, high = f"{min(speeds):.2f}x", f"{max(speeds):.2f}x"
    return low if low == high else f"{low} to {high}"


def _listed(speeds: Mapping[str, float]) -> str:
    """Name the speed-up of each kind, or of the least and the greatest of many."""
    named = [
        f"{speed:.2f}x on {kind}" if kind else f"{speed:.2f}x"
        for kind, speed in sorted(speeds.items(), key=lambda one: one[1])
    ]
    return f"{named[0]} to {named[-1]}" if len(named) > 3 else ", ".join(named)
