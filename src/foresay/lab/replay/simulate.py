"""Load foreseen: requests arrive, the engine's own loop answers them from a recording, and a profile says what each pass takes.

Nothing is simulated but time: admission, prefill between steps, batches, drafting, acceptance and lengths are those of a live
engine. Owns the clock and what requests see of it: queueing, the first token, gaps between tokens. Knows no server, whose own
milliseconds come on top, and no machine but the profile's.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from foresay.decoding.acceptance import Speculative
from foresay.decoding.protocols import Drafter, KVCache, LengthPolicy, Logits, ModelInput, ModelOutput, Rule
from foresay.decoding.rows import common_prefix
from foresay.engine import Engine
from foresay.engine.prefixes import PrefixStore
from foresay.errors import ConfigError
from foresay.lab.replay.replay import Timed, check_drafter, check_method, model_settings, submit
from foresay.models.recording import RecordedText, RecordingCache, RecordingModel, SavedSize
from foresay.records.profile import FILLED_TOGETHER, Profile
from foresay.records.recording import Record, Recording

Drafting = Callable[[int, int], float]
"""(batch, tokens of the longest draft) -> seconds of drafting."""


@dataclass(slots=True)
class Answered:
    """One request, in seconds of the simulated clock."""

    arrived: float
    began: float | None = None
    """When it was given a row."""
    events: list[float] = field(default_factory=list)
    """When tokens came, one step's together."""
    tokens: int = 0

    @property
    def queue_s(self) -> float:
        """Before it had a row."""
        assert self.began is not None
        return self.began - self.arrived

    @property
    def first_s(self) -> float:
        """To its first token."""
        return self.events[0] - self.arrived

    @property
    def latency_s(self) -> float:
        """To its end."""
        return self.events[-1] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Between one event of its stream and the next, in seconds."""
        return [b - a for a, b in pairwise(self.events)]


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
        return max(one.events[-1] for one in self.requests) - min(one.arrived for one in self.requests)

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
        return float(np.quantile(values, share, method="inverted_cdf")) if values else 0.0

    def mean(self, of: str) -> float:
        """The mean of "queue", "first" or "latency", in seconds."""
        return statistics.fmean(getattr(one, f"{of}_s") for one in self.requests)


class _Beginnings(RecordingCache):
    """A cache in which a text that is played again shares no more of its prompt than other texts begin with."""

    def __init__(self, most: Sequence[int], token_bytes: float) -> None:
        """most: of each text's prompt, what another one begins with."""
        super().__init__(token_bytes)
        self._most = most

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        super().copy_prefix(source, target, min(length, self._most[int(self.texts[target])]))

    def load_prefix(self, row: int, saved: SavedSize, length: int) -> None:
        super().load_prefix(row, saved, min(length, self._most[int(self.texts[row])]))


def _alike(texts: Sequence[RecordedText]) -> list[int]:
    """How much of each prompt another text begins with, what was written to it included: a chat's next turn begins so."""
    held = [(*text.prompt, *text.output[:-1]) for text in texts]
    order = sorted(range(len(texts)), key=held.__getitem__)  # whose beginnings are alike are neighbours
    out = []
    for i, text in enumerate(texts):
        prompt = tuple(text.prompt)
        place = bisect_left(order, prompt, key=held.__getitem__)
        near = order[max(0, place - 1) : place + 2]  # with a place to spare for its own, which begins with the prompt
        out.append(max((common_prefix(np.asarray(held[j]), np.asarray(prompt)) for j in near if j != i), default=0))
    return out


class _Clocked(RecordingModel):
    """A recording whose passes take a profile's time."""

    def __init__(self, records: Sequence[Record], recording: Recording, profile: Profile) -> None:
        super().__init__([record.text for record in records], **model_settings(recording, profile))
        self._fill, self._token_bytes = profile.fill_seconds, profile.token_bytes
        known = _alike([record.text for record in recording.records[: len(records)]])
        self._most = [known[i % len(known)] for i in range(len(records))]
        self.fill_s = 0.0
        """Seconds of all prefill so far."""

    def new_cache(self) -> RecordingCache:
        return _Beginnings(self._most, self._token_bytes)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        if model_input.logits is Logits.NONE:
            # rows of one pass read the weights once, as where the profile was measured
            if self.capabilities.ragged:
                self.fill_s += FILLED_TOGETHER * self._fill(sum(model_input.num_tokens) / FILLED_TOGETHER)
            else:
                self.fill_s += sum(self._fill(count) for count in model_input.num_tokens)
        return super().forward(model_input, cache)


def simulate(
    recording: Recording,
    profile: Profile,
    arrivals: Sequence[float],
    drafter: Drafter | None,
    policy: LengthPolicy,
    *,
    rule: Rule | None = None,
    batch_size: int = 32,
    drafting: Drafting | None = None,
    share_prefixes: bool = True,
    prefix_bytes: int = 0,
) -> Load:
    """Answer requests that arrive at these times, in order, with the recording's texts one after the other, again from the first
    when there are more.

    drafting: None takes the time that drafting takes here, which is right for look-ups. share_prefixes: whether a prompt
    starts from the slots of a row that begins alike, as `foresay.load` does it; a text that is played again is another request
    there, but takes the place of the first where rows that ended are kept. prefix_bytes: what they may keep, as in a server;
    nothing where the profile does not say what a token takes. Raises ConfigError for a sampled recording, whose drafts a
    replay can only estimate, and as `replay` does.
    """
    rule = rule or Speculative()
    if not recording.greedy:
        raise ConfigError("load is foreseen over a greedy recording; a sampled one tells too little of its drafts")
    check_method(recording, drafter, rule)
    if drafter is None:
        drafting = _no_time
    records = [recording.records[i % len(recording.records)] for i in range(len(arrivals))]
    model, timed = _Clocked(records, recording, profile), Timed(policy, profile.clock(), drafting)
    prefixes = PrefixStore(prefix_bytes if profile.token_bytes else 0) if share_prefixes else None
    clock = lambda: model.fill_s  # noqa: E731
    engine = Engine(model, drafter, rule, timed, max_batch_size=batch_size, prefixes=prefixes, prefill_clock=clock)
    return _Run(engine, model, timed, recording, records).over(sorted(arrivals))


class _Run:
    """The loop over arrivals and steps."""

    def __init__(
        self, engine: Engine, model: _Clocked, timed: Timed, recording: Recording, records: Sequence[Record]
    ) -> None:
        self._engine, self._model, self._timed = engine, model, timed
        self._recording, self._records = recording, records
        self._now = 0.0
        self._passes = self._row_passes = 0
        self._answers: list[Answered] = []

    def over(self, arrivals: Sequence[float]) -> Load:
        """Answer them all."""
        while len(self._answers) < len(arrivals) or self._engine.has_work:
            if not self._engine.has_work:
                self._now = max(self._now, arrivals[len(self._answers)])
            while len(self._answers) < len(arrivals) and arrivals[len(self._answers)] <= self._now:
                submit(self._engine, self._records[len(self._answers)], self._recording)
                self._answers.append(Answered(arrivals[len(self._answers)]))
            self._step()
        check_drafter(self._engine)
        return Load(tuple(self._answers), self._busy_s, self._passes, self._row_passes)

    @property
    def _busy_s(self) -> float:
        return self._model.fill_s + self._timed.spent_s

    def _step(self) -> None:
        busy, began = self._busy_s, self._now
        steps = self._engine.step()
        self._now += self._busy_s - busy
        self._passes += bool(steps)
        self._row_passes += len(steps)
        for request_id in (*(row.request_id for row in self._engine.rows), *(step.request_id for step in steps)):
            if self._answers[request_id].began is None:
                self._answers[request_id].began = began
        for step in steps:
            self._answers[step.request_id].events.append(self._now)
            self._answers[step.request_id].tokens += len(step.token_ids)


def _no_time(batch: int, count: int) -> float:
    return 0.0


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
