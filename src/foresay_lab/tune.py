"""Tuning: the fastest exact method for a target on this machine and these prompts, or plain decoding if drafting does not pay.

A replay of recorded outputs gives the accepted draft tokens of each candidate, and a profile gives the cost of its passes.
Together they rank all candidates; draft heads, block drafters and MTP layers read the hidden states that one pass over
each output computes. The best few, and the target's own default, are run live, next to plain decoding. Each part ends in time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from time import monotonic, perf_counter
from typing import Any

from foresay.decoding.capabilities import PREFILL_CHUNK
from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.errors import ConfigError, ForesayError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method, distinct
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay.records.results import Failure
from foresay.spec.recipes import named, read_length
from foresay_lab.bench.runners import MethodRunner, PromptBlock, Runner, take_turns
from foresay_lab.candidates import Candidate, Confirmed, Tuning, rate
from foresay_lab.data.items import PromptItem, in_turns
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.profile import measure, measure_drafting, medians
from foresay_lab.replay.precomputed import PrecomputedDrafter, can_precompute, precompute
from foresay_lab.replay.replay import Expected, expect, plain_decoding, replay

DRAFTERS = named(compared=True)
LENGTHS = ("2", "4", "8", "12", "throughput")
PLAIN_METHOD = Method("none")
COLUMNS = (1, 2, 3, 5, 9, 17, 33, 65)
"""Tokens of the passes that are timed, up to the longest draft."""
_FILLED = 8
"""Recorded prompts whose prefill a round of timing times."""
_LEAST = 4
"""Least number of recorded outputs that are replayed."""
BUSY = 0.3
"""Relative difference between runs of plain decoding with which a machine is busy: live runs end after two rounds."""
_CONFIRM_TOKENS = 64
"""Maximum tokens of each output in a live run."""
_REPEATS, _TURNS = 9, 3
"""Most turns of live runs, and turns that fit the time."""


@dataclass(frozen=True, slots=True)
class _Live:
    """The results of live runs so far."""

    gains: list[list[float]]
    """Speed-ups of each candidate's runs."""
    plain: dict[int, list[tuple[float, float]]]
    """Batch size -> seconds and tokens per second of the runs of plain decoding, in order."""

    @property
    def plain_spread(self) -> float:
        """Median relative difference between two consecutive runs of plain decoding."""
        pairs = (pair for runs in self.plain.values() for pair in pairwise(seconds for seconds, _ in runs))
        differences = [abs(math.log(after / before)) for before, after in pairs]
        return statistics.median(differences) if differences else 0.0


class Tuner:
    """Search over methods for one target. The profile and the passes of draft models are computed once for all candidates.

    Raises ConfigError for a sampled recording and for a recording of another model.
    """

    def __init__(
        self,
        target: Generator,
        recording: Recording,
        *,
        profile: Profile | None = None,
        rounds: int = 3,
        end: float = math.inf,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """profile: a recent profile of the target; by default it is measured when needed, in up to `rounds`.

        end: a time of `monotonic`. Timing and replay take half of the time until then, and at least one round and one method;
        live runs take the rest. on_progress: called with a text before each part of the work.
        """
        if not recording.greedy:
            text = "was sampled, and tuning needs a greedy one; record with temperature 0"
            raise ConfigError(text, param="recording")
        if recording.model != target.target.name:
            raise ConfigError(f"is of {recording.model!r}, not of {target.target.name!r}", param="recording")
        records = in_turns(recording.records, lambda one: one.category)
        self.target, self.recording = target, replace(recording, records=tuple(records))
        self._profile, self._rounds, self._end, self._on_progress = profile, rounds, end, on_progress
        self._precomputed: dict[str, PrecomputedDrafter] = {}
        self.tuning = Tuning()

    def profile(self, batch_sizes: Sequence[int], widest: int) -> Profile:
        """Return the target's profile for these batch sizes and up to `widest` tokens per pass, measured on first use."""
        if self._profile is None:
            start = monotonic()
            end = start + (self._end - start) / 4
            sizes = sorted({1, max(1, max(batch_sizes) // 4), *batch_sizes})
            lengths = sorted(len(r.prompt) + len(r.output) // 2 for r in self.recording.records)
            middle, long = max(16, lengths[len(lengths) // 2]), lengths[int(0.95 * (len(lengths) - 1))]
            sizes_of: dict[str, Any] = {
                "batches": sizes,
                "columns": [*(c for c in COLUMNS if c < widest), widest],
                "contexts": [middle, long] if long > 1.3 * middle else [middle],
                "fills": (),
            }
            measured, fills = list[Profile](), list[float]()
            while len(measured) < self._rounds and (
                not measured or monotonic() + (monotonic() - start) / len(measured) < end
            ):
                self._on_progress("timing passes")
                measured.append(measure(self.target, **sizes_of, repeats=3))
                fills.append(self._token_s(len(fills)))
            fill_s = statistics.median(fills)
            self._profile = with_prefill(medians(measured), fill_s)
            self.tuning.seconds["profile"] = monotonic() - start
        return self._profile

    def _token_s(self, turn: int) -> float:
        """Return the prefill seconds of a token, over some recorded prompts of different lengths."""
        every = _requests(self.recording)
        requests = [every[(turn * _FILLED + i) % len(every)] for i in range(min(_FILLED, len(every)))]
        session = self.target.plain().with_settings(max_batch_size=_FILLED).session()
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        for request in requests:
            session.submit(list(request.token_ids), params, text=False)
        seconds = 0.0
        while session.has_work:
            start = perf_counter()
            chunks = session.step()
            seconds += perf_counter() - start - (chunks[0].step.total_s if chunks else 0.0)
        return seconds / max(1, sum(len(request.token_ids) - 1 for request in requests))

    def search(
        self, methods: Iterable[Method], batch_sizes: Sequence[int], own: Iterable[Method] = ()
    ) -> list[Candidate]:
        """Predict every method and plain decoding at every batch size, sorted by decreasing expected throughput.

        own: methods that are run live in any case, whether or not they are among the others, the target's default first; what
        cannot be replayed comes last. Without the time to replay every output for all of them, fewer outputs are replayed.
        """
        own = list(own)
        every, always = distinct(m for m in [*own, *methods] if m.name != PLAIN), [m.name for m in own]
        policies: list[Any] = [read_length(method.own_length) for method in every]
        longest = max(int(getattr(one, "num_draft_tokens", getattr(one, "high", 16))) for one in policies)
        profile = self.profile(batch_sizes, 1 + longest)
        start = monotonic()
        end = start + (self._end - start) / 3
        self._shorten(every[0], len(every) * len(batch_sizes), end)
        plain_of = {size: plain_decoding(self.recording, size, profile) for size in batch_sizes}
        out = [Candidate(PLAIN_METHOD, size, plain, plain) for size, plain in plain_of.items()]
        for method, (size, plain) in product(every, plain_of.items()):
            is_own = method.name in always
            if len(out) > len(plain_of) and not is_own and monotonic() > end:
                self.tuning.skipped += 1
                continue
            self._on_progress(f"replaying {method.name}")
            expected: Expected | None = None
            try:
                expected = self.expected(method, size)
            except (ForesayError, RuntimeError) as error:
                if not is_own:
                    self.tuning.failed[method.name] = str(error)
                    continue
            out.append(Candidate(method, size, expected, plain, is_own, is_own and method.name == always[0]))
        self.tuning.seconds["replay"] = monotonic() - start - self.tuning.seconds.get("drafts", 0.0)
        self.tuning.candidates = sorted(out, key=rate, reverse=True)
        return self.tuning.candidates

    def _shorten(self, method: Method, count: int, end: float) -> None:
        """Leave as many recorded outputs as `count` methods can be replayed on until `end`, by the time that one takes."""
        if end == math.inf:
            return
        start, few = monotonic(), replace(self.recording, records=self.recording.records[:_LEAST])
        with suppress(ForesayError, RuntimeError):
            self.expected(method, 1, few)
        fits = (end - monotonic()) / max(count * (monotonic() - start), 1e-9)
        self.recording = replace(self.recording, records=self.recording.records[: max(_LEAST, int(fits * _LEAST))])

    def expected(self, method: Method, batch_size: int, recording: Recording | None = None) -> Expected:
        """Predict a method on a recording, the tuner's own by default. Raises ConfigError for a lossy rule."""
        recording = recording or self.recording
        generator = method.generator(self.target, batch_size)
        if not generator.rule.exact:
            text = "is lossy: its output may differ; tune an exact rule"
            raise ConfigError(text, param="rule", value=generator.rule.name)
        generator.forget()
        drafter: Any = generator.make_drafter()
        assert drafter is not None and self._profile is not None
        name: str | None = None
        if can_precompute(drafter, generator.policy, recording):
            drafter, name = self._precompute(method.drafter, drafter, generator, batch_size), method.drafter
        model = generator.target.model
        done = replay(recording, drafter, generator.policy, batch_size=batch_size, profile=self._profile, target=model)
        return expect(done, recording, self._profile, name)

    def _precompute(self, name: str, drafter: ModelDrafter, generator: Generator, batch_size: int) -> Drafter:
        """Compute a draft model's tokens once and time its drafting."""
        start = perf_counter()
        if name not in self._precomputed:
            self._precomputed[name] = precompute(drafter, self.recording)
        assert self._profile is not None
        if not any(size >= batch_size for size, _, _ in self._profile.drafts.get(name, ())):
            sizes = sorted({1, max(1, batch_size // 2), batch_size})
            context = min(t.context for t in self._profile.timings)
            times, fill = measure_drafting(generator, batches=sizes, lengths=(1, 4), context=context, repeats=3)
            self._profile = self._profile.with_drafts(name, times, fill)
        self.tuning.seconds["drafts"] = self.tuning.seconds.get("drafts", 0.0) + perf_counter() - start
        return self._precomputed[name]

    def confirm(self, candidates: Sequence[Candidate], *, repeats: int = _REPEATS, count: int = 8) -> list[Confirmed]:
        """Run candidates live, each between two runs of plain decoding, on `count` recorded prompts or a full batch if larger.

        The runs take the time that is left: the prompts are as many as three turns fit by plain decoding's expected speed, one
        at least, and turns end where another would end later. An interruption leaves what was measured in `tuning`.
        """
        start = monotonic()
        requests = _requests(self.recording)
        tokens = min(_CONFIRM_TOKENS, int(self.recording.params["max_new_tokens"]))
        params = SamplingParams(max_new_tokens=tokens)
        turn = sum(2 * max(count, one.batch_size) * tokens / one.plain.tokens_per_s for one in candidates)
        count = max(1, min(count, int(count * min((self._end - start) / (_TURNS * turn), 1.0))))
        live = _Live([[] for _ in candidates], {})
        sizes = sorted({one.batch_size for one in candidates})
        try:
            for i, size in enumerate(sizes):
                block = PromptBlock("", requests[: max(count, size)], size, params)
                end = monotonic() + (self._end - monotonic()) / (len(sizes) - i)
                self._run_live(candidates, block, repeats, live, end)
        finally:
            self.tuning.plain_spread = live.plain_spread
            self.tuning.confirmed = self._confirmed(candidates, live, count, tokens)
            self.tuning.seconds["live"] = monotonic() - start
        return self.tuning.confirmed

    def _run_live(
        self, candidates: Sequence[Candidate], block: PromptBlock, repeats: int, live: _Live, end: float
    ) -> None:
        """Run the candidates of a block's batch size in turns, the default first. live: receives the results."""
        some = [i for i, one in enumerate(candidates) if one.batch_size == block.batch_size]
        found = {candidates[i].method.name: i for i in sorted(some, key=lambda i: not candidates[i].is_default)}
        runners = [MethodRunner(self.target, candidates[i].method) for name, i in found.items() if name != PLAIN]
        turns = [(repeat, runner) for repeat in range(repeats) for runner in runners]
        plain = MethodRunner(self.target, PLAIN_METHOD)

        def starting(runner: Runner, repeat: int | None) -> None:
            turn = "warming up" if repeat is None else f"turn {repeat + 1}"
            self._on_progress(f"running {runner.name} live ({turn})")

        warm, before = replace(block, asks=block.asks[:1]), math.inf
        for i, (run, _) in enumerate(take_turns(plain, turns, block, warm=warm, between=1, starting=starting)):
            if i > 4 * len(runners) and live.plain_spread > BUSY:
                break
            if isinstance(run, Failure):
                self.tuning.failed[run.cell.method] = run.error
                continue
            if run.identical is False:
                text = "generated different output than plain decoding; please report this"
                raise ConfigError(text, param="method", value=str(run.cell.method))
            if run.speed_up is None:
                live.plain.setdefault(block.batch_size, []).append((run.seconds, run.tokens_per_s))
                continue
            live.gains[found[run.cell.method]].append(run.speed_up)
            now = monotonic()
            if now + max(0.0, now - before) > end:
                break
            before = now

    def _confirmed(self, candidates: Sequence[Candidate], live: _Live, count: int, tokens: int) -> list[Confirmed]:
        out = []
        for one, gains in zip(candidates, live.gains, strict=True):
            if gains:
                rate = statistics.median(rate for _, rate in live.plain[one.batch_size])
                predicted, middle = self._predicted(one, max(count, one.batch_size), tokens), statistics.median(gains)
                out.append(Confirmed(one, middle * rate, middle, min(gains), max(gains), predicted))
        return sorted(out, key=lambda one: -one.tokens_per_s)

    def _predicted(self, candidate: Candidate, count: int, tokens: int) -> float | None:
        """Predict the speed-up on the first prompts and tokens, as they are run live; on all where drafts are precomputed."""
        if candidate.expected is None or self._profile is None or candidate.method.drafter in self._precomputed:
            return candidate.speed_up
        first = self.recording.records[:count]
        chosen = [replace(one, output=one.output[:tokens], logprobs=None, top=None) for one in first]
        part = replace(self.recording, records=tuple(chosen))
        size = candidate.batch_size
        plain = plain_decoding(part, size, self._profile)
        return self.expected(candidate.method, size, part).tokens_per_s / plain.tokens_per_s


def with_prefill(profile: Profile, token_s: float) -> Profile:
    """Return a profile in which each prompt token takes this long."""
    return replace(profile, fills=((1, token_s), (PREFILL_CHUNK, PREFILL_CHUNK * token_s)))


def _requests(recording: Recording) -> list[PromptRequest]:
    """Return the recorded prompts as requests."""
    return [
        PromptRequest(one.id, one.category, tuple(one.source or one.prompt), PromptItem(one.id, ""))
        for one in recording.records
    ]
