"""Prometheus metrics of a server: drafting, latencies, queue and rows.

Owns the metric names, which match other engines' apart from the prefix. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foresay.decoding.outcome import FinishReason, Step
from foresay.drafters import Memory
from foresay.generation.session import Session
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.models.cache.memory import resident_bytes, slack_bytes
from foresay.server.acceptance import Acceptance

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LENGTHS = tuple(range(1, 18))
_ENGINE_GAUGES = {
    "num_requests_running": ("num_active", "Rows being decoded."),
    "num_requests_waiting": ("num_waiting", "Requests waiting for a row, or being prepared."),
    "kv_cache_bytes": ("cached_bytes", "Bytes of the caches of open requests."),
    "prefix_bytes": ("prefix_bytes", "Bytes of kept prefixes of ended requests."),
    "draft_failures": ("draft_failures", "Failures of a drafter; decoding continued without it."),
}
"""Gauges that are sums over the engines: the attribute of an engine, and the help text."""
_MEMORY_GAUGES = {
    "memory_tokens": ("size", "Tokens of kept texts, of the owners that were used so far."),
    "memory_bytes": ("num_bytes", "Bytes of kept texts and their index."),
    "memory_dropped_texts": ("dropped", "Texts that were not kept because the disk was too slow."),
    "memory_drafts": ("drafts", "Drafts copied from kept texts."),
    "memory_accepted_tokens": ("accepted", "Accepted draft tokens copied from kept texts."),
}
"""The same of kept texts."""


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foresay_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Iterable[float] = _SECONDS) -> Histogram:
            return Histogram(f"foresay_{name}", text, buckets=tuple(buckets), registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"foresay_{name}", text, labels, registry=self.registry)

        self.drafts = counter("spec_decode_num_drafts", "Target passes that verified draft tokens.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by draft position.", "position"
        )
        self._accepted_at = [accepted_at.labels(str(position)) for position in range(MAX_DRAFT_TOKENS)]
        self.acceptance_length = histogram(
            "spec_decode_acceptance_length", "Tokens committed per row and target pass.", _LENGTHS
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens read from cached slots.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.finished = counter("request_success", "Requests that ended, by finish reason.", "finished_reason")
        self.failed = counter("request_failure", "Requests that were refused or failed, by status.", "status")
        self.first_token = histogram("time_to_first_token_seconds", "Time from a request to its first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Time between two tokens of a row.")
        self.request_latency = histogram("e2e_request_latency_seconds", "Time from a request to its last token.")
        self.pool_bytes = gauge(
            "kv_cache_capacity_bytes", "Bytes of a GPU's pages of keys and values; 0 if caches grow."
        )
        self.weight_bytes = gauge("weight_bytes", "Bytes of the target's weights.")
        self.slack_bytes = gauge(
            "allocator_slack_bytes",
            "Free bytes in the heaps of the C library's allocator, some of them returned to the system.",
        )
        self.resident_bytes = gauge("process_resident_bytes", "Resident memory of the process.")
        self.memory_writes = gauge(
            "memory_writes", "1 if this process keeps texts, 0 if it only reads them or cannot write."
        )
        self._gauges = {name: gauge(name, text) for name, (_, text) in (_ENGINE_GAUGES | _MEMORY_GAUGES).items()}
        self.acceptance = gauge(
            "acceptance_rate", "Accepted draft tokens over tested ones, a moving average.", "drafter"
        )
        self.acceptance_ratio = gauge(
            "acceptance_ratio", "The moving average over that of the method's first requests; 1 at first.", "drafter"
        )

    def step(self, step: Step) -> None:
        """Count one row's step."""
        if step.token_ids:
            self.generation_tokens.inc(len(step.token_ids))
            self.acceptance_length.observe(len(step.token_ids))
        if step.num_drafted:
            self.drafts.inc()
            self.draft_tokens.inc(step.num_drafted)
            self.accepted.inc(step.num_accepted)
            for position in range(step.num_accepted):
                self._accepted_at[position].inc()

    def text(
        self,
        sessions: Iterable[Session],
        memories: Sequence[Memory],
        acceptance: Mapping[str, Acceptance],
        waiting: int = 0,
    ) -> bytes:
        """Return the metrics in Prometheus's text format.

        sessions: the open ones. memories: kept texts. acceptance: by model and method. waiting: requests that
        are not in an engine's queue.
        """
        for method, found in acceptance.items():
            self.acceptance.labels(method).set(found.average)
            self.acceptance_ratio.labels(method).set(found.ratio)
        self.memory_writes.set(bool(memories) and all(one.writes and one.problem is None for one in memories))
        for name, (attribute, _) in _MEMORY_GAUGES.items():
            self._gauges[name].set(sum(getattr(one, attribute) for one in memories))
        engines = [session.engine for session in sessions]
        for name, (attribute, _) in _ENGINE_GAUGES.items():
            self._gauges[name].set(sum(getattr(engine, attribute) for engine in engines))
        self._gauges["num_requests_waiting"].inc(waiting)
        pools = {id(engine.pool): engine.pool for engine in engines if engine.pool is not None}
        self.pool_bytes.set(sum(pool.nbytes for pool in pools.values()))
        self.slack_bytes.set(slack_bytes())
        self.resident_bytes.set(resident_bytes())
        return generate_latest(self.registry)


class Clock:
    """Counts and latencies of one output."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._start = metrics, perf_counter()
        self._last: float | None = None
        self._has_steps = False

    def take(self, step: Step, prompt_tokens: int) -> None:
        """Record a step."""
        if not self._has_steps:
            self._metrics.prompt_tokens.inc(prompt_tokens)
            self._metrics.cached_tokens.inc(step.num_cached)
            self._has_steps = True
        self._metrics.step(step)
        count, now = len(step.token_ids), perf_counter()
        if count and self._last is None:
            self._metrics.first_token.observe(now - self._start)
        elif self._last is not None:
            for _ in range(count):  # a histogram observes one value at a time
                self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now if count else self._last

    def ended(self, reason: FinishReason) -> None:
        """Record the end of the output. A failed output is not counted here: its request is counted as failed."""
        if reason is FinishReason.ERROR:
            return
        self._metrics.finished.labels(str(reason)).inc()
        self._metrics.request_latency.observe(perf_counter() - self._start)
