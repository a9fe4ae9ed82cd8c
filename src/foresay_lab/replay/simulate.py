"""Simulation of load: the engine's own loop serves arriving requests from a recording, with pass times from a profile.

Only time is simulated: admission, prefill between steps, batches, drafting, acceptance and draft lengths are those of a live
engine. Owns the clock and the latencies of requests: queueing, first token, gaps between tokens. Does not include the overhead
of a server, and knows only the profile's machine.
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
from foresay.models.recording import RecordedText, RecordingCache, RecordingModel, SavedSize
from foresay.records.profile import FILLED_TOGETHER, Profile
from foresay.records.recording import Record, Recording
from foresay_lab.replay.replay import Timed, check_drafter, check_method, model_settings, submit

Drafting = Callable[[int, int], float]
"""(batch, tokens of the longest draft) -> seconds of drafting."""


@dataclass(slots=True)
class SimulatedRequest:
    """The times of one request, in seconds of the simulated clock."""

    arrived: float
    started: float | None = None
    """Time when the request got a row."""
    events: list[float] = field(default_factory=list)
    """Times of the steps that generated tokens."""
    tokens: int = 0

    @property
    def queue_s(self) -> float:
        """Seconds before the request got a row."""
        assert self.started is not None
        return self.started - self.arrived

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.arrived

    @property
    def latency_s(self) -> float:
        """Seconds to the last token."""
        return self.events[-1] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        return [b - a for a, b in pairwise(self.events)]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The result of a simulation: all requests and the totals of the engine."""

    requests: tuple[SimulatedRequest, ...]
    busy_s: float
    """Seconds in which the engine worked."""
    passes: int
    row_passes: int

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(one.events[-1] for one in self.requests) - min(one.arrived for one in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over that time."""
        return sum(one.tokens for one in self.requests) / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per row and pass."""
        return sum(one.tokens for one in self.requests) / self.row_passes

    @property
    def mean_batch(self) -> float:
        """Mean number of rows per pass."""
        return self.row_passes / self.passes

    def percentile(self, of: str, share: float) -> float:
        """Return a percentile of "queue", "first", "latency" or "gap", in seconds. share: in [0, 1]."""
        if of == "gap":
            values = [gap for one in self.requests for gap in one.gaps]
        else:
            values = [float(getattr(one, f"{of}_s")) for one in self.requests]
        return float(np.quantile(values, share, method="inverted_cdf")) if values else 0.0

    def mean(self, of: str) -> float:
        """Return the mean of "queue", "first" or "latency", in seconds."""
        return statistics.fmean(getattr(one, f"{of}_s") for one in self.requests)


class _PrefixLimitedCache(RecordingCache):
    """A cache in which a repeated text shares only the part of its prompt that another text begins with."""

    def __init__(self, limits: Sequence[int], token_bytes: float) -> None:
        """limits: for each text, the number of its prompt tokens that another text begins with."""
        super().__init__(token_bytes)
        self._limits = limits

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        super().copy_prefix(source, target, min(length, self._limits[int(self.texts[target])]))

    def load_prefix(self, row: int, saved: SavedSize, length: int) -> None:
        super().load_prefix(row, saved, min(length, self._limits[int(self.texts[row])]))


def _common_prefixes(texts: Sequence[RecordedText]) -> list[int]:
    """Return, for each prompt, how many of its tokens another text with its output begins with, as in a chat's next turn."""
    whole = [(*text.prompt, *text.output[:-1]) for text in texts]
    order = sorted(range(len(texts)), key=whole.__getitem__)  # texts with long common prefixes are neighbours
    out = []
    for i, text in enumerate(texts):
        prompt = tuple(text.prompt)
        index = bisect_left(order, prompt, key=whole.__getitem__)
        near = order[max(0, index - 1) : index + 2]  # may include the text itself, which begins with the prompt
        out.append(max((common_prefix(np.asarray(whole[j]), np.asarray(prompt)) for j in near if j != i), default=0))
    return out


class _Clocked(RecordingModel):
    """A RecordingModel whose prefill takes the time in a profile."""

    def __init__(self, records: Sequence[Record], recording: Recording, profile: Profile) -> None:
        super().__init__([record.text for record in records], **model_settings(recording, profile))
        self._fill, self._token_bytes = profile.fill_seconds, profile.token_bytes
        known = _common_prefixes([record.text for record in recording.records[: len(records)]])
        self._limits = [known[i % len(known)] for i in range(len(records))]
        self.fill_s = 0.0
        """Total seconds of prefill so far."""

    def new_cache(self) -> RecordingCache:
        return _PrefixLimitedCache(self._limits, self._token_bytes)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        if model_input.logits is Logits.NONE:
            # the rows of one pass read the weights once, as in the measurement of the profile
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
) -> SimulatedLoad:
    """Simulate requests that arrive at these times and are answered by the recording's texts in order, repeated if needed.

    drafting: by default the drafting times measured here, which is right for n-gram drafters. share_prefixes: a prompt reuses
    the slots of a row with the same prefix, as `foresay.load` does. A repeated text is a different request there, but replaces
    the first one among the saved rows of finished requests. prefix_bytes: memory limit of these saved rows, as in a server; 0
    if the profile does not contain token_bytes. Raises ConfigError for a sampled recording, whose drafts a replay can only
    estimate, and as `replay` does.
    """
    rule = rule or Speculative()
    if not recording.greedy:
        raise ConfigError(
            "load is simulated over a greedy recording, and this one was sampled; record with temperature 0"
        )
    check_method(recording, drafter, rule)
    records = [recording.records[i % len(recording.records)] for i in range(len(arrivals))]
    model = _Clocked(records, recording, profile)
    timed = Timed(policy, profile.clock(), (lambda batch, count: 0.0) if drafter is None else drafting)
    prefixes = PrefixStore(prefix_bytes if profile.token_bytes else 0) if share_prefixes else None
    clock = lambda: model.fill_s  # noqa: E731
    engine = Engine(model, drafter, rule, timed, max_batch_size=batch_size, prefixes=prefixes, prefill_clock=clock)
    ask = lambda i: submit(engine, records[i], recording)  # noqa: E731
    return _serve(engine, sorted(arrivals), ask, lambda: model.fill_s + timed.spent_s)


def _serve(
    engine: Engine, times: Sequence[float], start_request: Callable[[int], None], busy_s: Callable[[], float]
) -> SimulatedLoad:
    """Run the engine until all requests are finished. start_request: submits one. busy_s: simulated seconds of work so far."""
    requests, now, passes, row_passes = list[SimulatedRequest](), 0.0, 0, 0
    while len(requests) < len(times) or engine.has_work:
        if not engine.has_work:
            now = max(now, times[len(requests)])
        while len(requests) < len(times) and times[len(requests)] <= now:
            start_request(len(requests))
            requests.append(SimulatedRequest(times[len(requests)]))
        busy, start = busy_s(), now
        steps = engine.step()
        now += busy_s() - busy
        passes, row_passes = passes + bool(steps), row_passes + len(steps)
        for request_id in (*(row.request_id for row in engine.rows), *(step.request_id for step in steps)):
            if requests[request_id].started is None:
                requests[request_id].started = start
        for step in steps:
            requests[step.request_id].events.append(now)
            requests[step.request_id].tokens += len(step.token_ids)
    check_drafter(engine)
    return SimulatedLoad(tuple(requests), busy_s(), passes, row_passes)


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latency targets of a service: 99th percentiles in seconds; None sets no target."""

    first_p99_s: float | None = None
    gap_p99_s: float | None = None

    def met(self, load: SimulatedLoad) -> bool:
        """True if the load meets all targets."""
        pairs = ((self.first_p99_s, "first"), (self.gap_p99_s, "gap"))
        return all(limit is None or load.percentile(of, 0.99) <= limit for limit, of in pairs)


def highest_rate(
    at: Callable[[float], SimulatedLoad], target: LatencyTargets, *, low: float, high: float, steps: int = 7
) -> float:
    """Return the highest arrival rate in [low, high] requests per second whose load meets the target, or 0 if `low` does not.

    at: function rate -> load. Uses bisection on a logarithmic scale, to within a factor of (high / low) ** 2 ** -steps.
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


def replicas(rate: float, rate_per_engine: float) -> int | None:
    """Return the number of engines for `rate` requests per second, assigned at random; None if `rate_per_engine` is 0."""
    return None if rate_per_engine <= 0 else math.ceil(rate / rate_per_engine)
