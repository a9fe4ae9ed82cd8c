"""Load foreseen: requests arrive, the engine's own loop answers them from a recording, and a profile says what each pass takes.

Nothing is simulated but time: admission, prefill between steps, batches, drafting, acceptance and lengths are those of a live
engine. Owns the clock and what requests see of it: queueing, the first token, gaps between tokens. Knows no server, whose own
milliseconds come on top, and no machine but the profile's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foresay.decoding.acceptance import Speculative
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import Drafter, Feed, KVCache, LengthPolicy, Logits, ModelOutput, Rule
from foresay.engine import Engine
from foresay.errors import ConfigError
from foresay.lab.replay.replay import Clock, Timed, check_method, submit, width_of
from foresay.models.recording import RecordingModel
from foresay.records.profile import Profile
from foresay.records.recording import Record, Recording

Drafting = Callable[[int, int], float]
"""(batch, tokens of the longest draft) -> seconds of drafting."""


@dataclass(slots=True)
class Answered:
    """One request, in seconds of the simulated clock."""

    arrived: float
    began: float = math.nan
    """When it was given a row."""
    first: float = math.nan
    """When its first tokens came."""
    ended: float = math.nan
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    """Between one event of its stream and the next."""
    last: float = math.nan

    @property
    def queue_s(self) -> float:
        """Before it had a row."""
        return self.began - self.arrived

    @property
    def first_s(self) -> float:
        """To its first token."""
        return self.first - self.arrived

    @property
    def latency_s(self) -> float:
        """To its end."""
        return self.ended - self.arrived


@dataclass(frozen=True, slots=True)
class Load:
    """What came and how it was answered."""

    requests: tuple[Answered, ...]
    busy_s: float
    """Time in which anything was done."""
    passes: int
    row_passes: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(one.ended for one in self.requests) - min(one.arrived for one in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Throughput over that time."""
        return sum(one.tokens for one in self.requests) / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per row and pass."""
        return sum(one.tokens for one in self.requests) / self.row_passes

    @property
    def mean_batch(self) -> float:
        """Rows of a pass."""
        return self.row_passes / self.passes

    def percentile(self, of: str, share: float) -> float:
        """A percentile of "queue", "first", "latency" or "gap", in seconds; share in [0, 1]."""
        if of == "gap":
            values = [gap for one in self.requests for gap in one.gaps]
        else:
            values = [float(getattr(one, f"{of}_s")) for one in self.requests]
        return quantile(values, share)

    def mean(self, of: str) -> float:
        """The mean of "queue", "first" or "latency", in seconds."""
        return statistics.fmean(getattr(one, f"{of}_s") for one in self.requests)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile; 0 without values."""
    some = sorted(values)
    return some[min(len(some) - 1, math.ceil(share * len(some)) - 1 if share > 0 else 0)] if some else 0.0


class _Clocked(RecordingModel):
    """A recording whose passes take a profile's time."""

    def __init__(self, records: Sequence[Record], recording: Recording, profile: Profile) -> None:
        longest = int(recording.settings.get("max_length", 1 << 30))
        super().__init__(
            [record.text for record in records], recording.vocab_size, max_length=longest, ragged=profile.ragged
        )
        self._fill = profile.fill_seconds
        self.fill_s = 0.0
        """Seconds of all prefill so far."""

    def forward(self, feed: Feed, cache: KVCache) -> ModelOutput:
        if feed.logits is Logits.NONE:
            self.fill_s += sum(self._fill(count) for count in feed.num_tokens)
        return super().forward(feed, cache)


def foresee(
    recording: Recording,
    profile: Profile,
    arrivals: Sequence[float],
    drafter: Drafter | None,
    policy: LengthPolicy,
    *,
    rule: Rule | None = None,
    batch_size: int = 32,
    drafting: Drafting | None = None,
) -> Load:
    """Answer requests that arrive at these times, in order, with the recording's texts one after the other, again from the first
    when there are more.

    drafting: None takes the time that drafting takes here, which is right for look-ups. Raises ConfigError for a sampled
    recording, whose drafts a replay can only estimate, and as `replay` does.
    """
    rule = rule or Speculative()
    if not recording.greedy:
        raise ConfigError("load is foreseen over a greedy recording; a sampled one tells too little of its drafts")
    check_method(recording, drafter, rule)
    if drafter is None:
        drafting = _no_time
    records = [recording.records[i % len(recording.records)] for i in range(len(arrivals))]
    model, clock = _Clocked(records, recording, profile), profile.clock()
    engine = Engine(model, drafter, rule, Timed(policy, clock, drafting), max_batch_size=batch_size)
    return _Run(engine, model, clock, drafting, recording, records).over(sorted(arrivals))


class _Run:
    """The loop over arrivals and steps."""

    def __init__(
        self,
        engine: Engine,
        model: _Clocked,
        clock: Clock,
        drafting: Drafting | None,
        recording: Recording,
        records: Sequence[Record],
    ) -> None:
        self._engine, self._model, self._clock, self._drafting = engine, model, clock, drafting
        self._recording, self._records = recording, records
        self._now = self._busy = 0.0
        self._passes = self._row_passes = 0
        self._sizes: list[int] = []
        self._answers: list[Answered] = []

    def over(self, arrivals: Sequence[float]) -> Load:
        while len(self._answers) < len(arrivals) or self._engine.has_work:
            if not self._engine.has_work:
                self._now = max(self._now, arrivals[len(self._answers)])
            while len(self._answers) < len(arrivals) and arrivals[len(self._answers)] <= self._now:
                record = self._records[len(self._answers)]
                self._answers.append(Answered(arrivals[len(self._answers)]))
                self._sizes.append(len(record.prompt))
                submit(self._engine, record, self._recording)
            self._step()
        if self._engine.draft_failures and self._engine.drafter is not None:
            error = self._engine.drafter.last_error
            raise ConfigError(f"the drafter failed: {type(error).__name__}: {error}")
        return Load(tuple(self._answers), self._busy, self._passes, self._row_passes)

    def _step(self) -> None:
        filled, began = self._model.fill_s, self._now
        steps = self._engine.step()
        seconds = self._model.fill_s - filled
        if steps:
            ragged = self._model.capabilities.ragged
            context = max(self._sizes[step.request_id] for step in steps)
            seconds += self._clock(len(steps), width_of(steps, ragged), context) + drafted_s(steps, self._drafting)
            self._passes += 1
            self._row_passes += len(steps)
        self._now += seconds
        self._busy += seconds
        for row in self._engine.rows:
            self._note_row(row.request_id, began)
        for step in steps:
            self._note_row(step.request_id, began)
            self._note(self._answers[step.request_id], step)
            self._sizes[step.request_id] += len(step.token_ids)

    def _note_row(self, request_id: int, began: float) -> None:
        answer = self._answers[request_id]
        if math.isnan(answer.began):
            answer.began = max(began, answer.arrived)

    def _note(self, answer: Answered, step: Step) -> None:
        if math.isnan(answer.first):
            answer.first = self._now
        else:
            answer.gaps.append(self._now - answer.last)
        answer.last = self._now
        answer.tokens += len(step.token_ids)
        if step.finish_reason is not None:
            answer.ended = self._now


def _no_time(batch: int, count: int) -> float:
    return 0.0


def drafted_s(steps: Sequence[Step], drafting: Drafting | None) -> float:
    """Seconds of drafting in a step."""
    if drafting is None:
        return steps[0].draft_s
    return drafting(len(steps), max(step.num_drafted for step in steps))


@dataclass(frozen=True, slots=True)
class Target:
    """What a service promises; None promises nothing of that kind."""

    first_p99_s: float | None = None
    gap_p99_s: float | None = None

    def met(self, load: Load) -> bool:
        """Whether this load was answered so."""
        pairs = ((self.first_p99_s, "first"), (self.gap_p99_s, "gap"))
        return all(most is None or load.percentile(of, 0.99) <= most for most, of in pairs)


def highest_rate(at: Callable[[float], Load], target: Target, *, low: float, high: float, steps: int = 7) -> float:
    """The highest arrival rate whose load meets the target, between `low` and `high` requests a second; 0 where `low` does not.

    at: the load at a rate. By bisection on a logarithmic scale, to within a factor of (high / low) ** 2 ** -steps.
    """
    if not target.met(at(low)):
        return 0.0
    for _ in range(steps):
        middle = math.sqrt(low * high)
        if target.met(at(middle)):
            low = middle
        else:
            high = middle
    return low


def replicas(rate: float, of_one: float) -> int | None:
    """How many engines of this rate share `rate` requests a second, each sent to one at random; None where none would do."""
    return None if of_one <= 0 else math.ceil(rate / of_one)
