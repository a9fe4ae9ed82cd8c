"""Replaying: any drafter, policy and cascade against recorded outputs, without the target, through the engine's own loop.

A greedy recording gives exactly the Steps that live decoding makes: a draft token is what was written next, or is cut
there. A sampled one gives an estimate (see foresay.lab.coupled). Owns what can be replayed and what a replay tells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from time import perf_counter
from typing import Any

import torch

from foresay.checks import check_int
from foresay.decoding.acceptance import Speculative
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import Drafter, DraftStep, LengthPolicy, Rule
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine, Stats
from foresay.errors import ConfigError
from foresay.lab.replay.sampled import LAW_FIELDS, members, replay_sampled
from foresay.lengths import ThroughputLength
from foresay.models.recording import RecordingModel
from foresay.records.recording import Record, Recording


@dataclass(frozen=True, slots=True)
class PassCost:
    """One pass of the target over a batch, as it would have been: what a cost model needs to know."""

    batch: int
    width: int
    """Columns: 1 + the longest draft."""
    context: int
    """Tokens of the longest row before it: attention is as wide."""
    tokens: int
    """Committed, all rows together."""
    drafted: int
    """The longest draft."""
    draft_s: float
    """Seconds spent drafting, in the replay."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay."""

    steps: tuple[tuple[Step, ...], ...]
    """By record, in the recording's order. Their times are the replay's own."""
    passes: tuple[PassCost, ...]
    seconds: float
    """What the replay itself took."""
    exact: bool
    """Whether live decoding makes the same Steps; else this is an estimate."""

    @property
    def stats(self) -> Stats:
        """All Steps added up."""
        return Stats.of(step for steps in self.steps for step in steps)

    def rate(self, confidence: float = 0.95) -> tuple[float, float, float] | None:
        """(acceptance rate, low, high); see `ratio`. None when nothing was tested."""
        counts = [(float(s.num_accepted), float(s.num_tested)) for s in map(Stats.of, self.steps)]
        return ratio(counts, confidence) if any(tested for _, tested in counts) else None

    def efficiency(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """(tokens per pass, low, high)."""
        return ratio([(float(s.num_tokens), float(s.num_passes)) for s in map(Stats.of, self.steps)], confidence)


def ratio(counts: Sequence[tuple[float, float]], confidence: float = 0.95) -> tuple[float, float, float]:
    """A ratio of sums over prompts and its confidence interval, which takes prompts, not tokens, for independent.

    counts: (numerator, denominator) of each prompt. The normal approximation of the linearised ratio; with one prompt the
    interval is everything.
    """
    total = sum(b for _, b in counts)
    value = sum(a for a, _ in counts) / total
    n = len(counts)
    if n < 2:
        return value, -math.inf, math.inf
    variance = n / (n - 1) * sum((a - value * b) ** 2 for a, b in counts) / total**2
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance)
    return value, value - reach, value + reach


Clock = Callable[[int, int, float], float]
"""(batch, columns, context) -> seconds of a pass of the target."""


class _Timed(LengthPolicy):
    """A policy that decides by times, told those that live passes would take."""

    def __init__(self, inner: LengthPolicy, clock: Clock) -> None:
        self._inner, self._clock = inner, clock
        self.needs_hidden = inner.needs_hidden

    def budget(self, rows: Rows) -> list[int]:
        return self._inner.budget(rows)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        return self._inner.keep_drafting(step)

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        width = 1 + max(step.num_drafted for step in steps)
        seconds = self._clock(len(steps), width, max(row.size for row in rows))
        timed = [dataclasses.replace(s, target_s=seconds, total_s=s.draft_s + seconds) for s in steps]
        self._inner.observe(rows, timed)


def replay(
    recording: Recording,
    drafter: Drafter | None,
    policy: LengthPolicy,
    *,
    rule: Rule | None = None,
    batch_size: int = 1,
    clock: Clock | None = None,
) -> Replay:
    """Decode the recorded outputs again with a drafter.

    rule: None takes "speculative"; all exact rules accept the same of a greedy recording. clock: how long passes of the
    target take, for a policy that decides by time. Raises ConfigError for what no recording can answer: a lossy rule, a
    drafter that learns from scores, a drafter that fails.
    """
    rule = rule or Speculative()
    if not rule.exact:
        raise ConfigError(f"rule={rule.name!r} looks at the target's scores, which a recording lacks; run it live")
    if any(getattr(one, "filler_top_k", 1) > 1 for one in members(drafter)):
        raise ConfigError("filler_top_k above 1 learns from the target's scores, which a recording lacks; run it live")
    if not recording.greedy and rule.name != "speculative":
        raise ConfigError(f"a sampled recording tells what 'speculative' accepts, not rule={rule.name!r}; run it live")
    if isinstance(policy, ThroughputLength):
        if clock is None:
            raise ConfigError(
                "length 'throughput' decides by the time passes take; replay it with a profile of the target"
            )
        policy = _Timed(policy, clock)
    if drafter is not None and not recording.greedy:
        replay_sampled(drafter, recording)
    longest = check_int("max_length", recording.settings.get("max_length", 1 << 30), 1)
    model = RecordingModel([r.text for r in recording.records], recording.vocab_size, max_length=longest)
    engine = Engine(model, drafter, rule, policy, max_batch_size=batch_size)
    for record in recording.records:
        _submit(engine, record, recording)
    return _run(engine, recording)


def _submit(engine: Engine, record: Record, recording: Recording) -> None:
    """A request that ends where the recorded one did, and as it did."""
    count = len(record.output)
    stopped = record.finish_reason == FinishReason.STOP
    most = max(int(recording.params.get("max_new_tokens", 0)), count) if stopped else count
    params = recorded_params(recording, most)
    ends = recording.eos | set(params.stop_token_ids)
    stop = _Ended(count) if stopped and record.output[-1] not in ends else None
    engine.submit(record.prompt, params, eos=recording.eos, stop=stop, source=record.source)


def recorded_params(recording: Recording, max_new_tokens: int) -> SamplingParams:
    """The parameters a draft was given when it was live, as a replay gives them: it draws from nothing.

    What a sampled draft model would have drawn is decided elsewhere (see foresay.lab.coupled); its rows are greedy here.
    """
    values = dict(recording.params) | {"max_new_tokens": max_new_tokens, "logprobs": None, "stop": ()}
    values["logit_bias"] = dict(values.get("logit_bias", ()))
    values["min_new_tokens"] = min(int(values.get("min_new_tokens", 0)), max_new_tokens)
    if not recording.greedy:
        values = {k: v for k, v in values.items() if k not in LAW_FIELDS}
    return SamplingParams(**values)


class _Ended:
    """A stop condition: the output ends with its `count`-th token."""

    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        kept, self._left = self._left, self._left - len(token_ids)
        return kept if self._left <= 0 else None


def _run(engine: Engine, recording: Recording) -> Replay:
    steps: list[list[Step]] = [[] for _ in recording.records]
    sizes = [len(record.prompt) for record in recording.records]
    passes: list[PassCost] = []
    began = perf_counter()
    while engine.has_work:
        done = engine.step()
        if not done:
            continue
        context = max(sizes[step.request_id] for step in done)
        longest = max(step.num_drafted for step in done)
        committed = sum(len(step.token_ids) for step in done)
        passes.append(PassCost(len(done), 1 + longest, context, committed, longest, done[0].draft_s))
        for step in done:
            steps[step.request_id].append(step)
            sizes[step.request_id] += len(step.token_ids)
    seconds = perf_counter() - began
    if engine.draft_failures and engine.drafter is not None:
        error: Any = engine.drafter.last_error
        raise ConfigError(f"the drafter failed in the replay: {type(error).__name__}: {error}")
    for record, made in zip(recording.records, steps, strict=True):
        written = [token for step in made for token in step.token_ids]
        assert written == list(record.output), f"{record.id} was not replayed as recorded"
    return Replay(tuple(map(tuple, steps)), tuple(passes), seconds, recording.greedy)
