"""Tuning: the fastest exact method for a target on this machine and these prompts, or plain decoding if drafting does not pay.

A replay of recorded outputs gives the accepted draft tokens of each candidate, and a profile gives the cost of its passes.
Together they rank all candidates; draft heads, block drafters and MTP layers read the target's hidden states, which one pass over
each output computes. The best few, and the target's own default, are run live, next to plain decoding.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.errors import ConfigError, ForesayError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method, distinct
from foresay.lengths import ConstantLength
from foresay.records.profile import Profile
from foresay.records.recording import Record, Recording
from foresay.records.results import Failure
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import named, read_length
from foresay_lab.bench.runners import MethodRunner, PromptBlock
from foresay_lab.bench.turns import take_turns
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.profile import measure, measure_drafting, medians, prompt_lengths
from foresay_lab.replay.precomputed import PrecomputedDrafter, can_precompute, precompute
from foresay_lab.replay.predict import Expected, expect
from foresay_lab.replay.replay import replay

DRAFTERS = named(compared=True)
LENGTHS = ("2", "4", "8", "12", "throughput")
PLAIN_METHOD = Method("none")
THRESHOLDS = (0.3, 0.5, 0.7)
MATRICES = ("[[5, 10], [0, 10]]", "[[8, 10], [0, 5]]", "[[13, 10], [0, 10]]")
"""Draft lengths of a cascade of a draft model and Max-Gram: two from CS-Drafting, and one between them."""
_FILLED = 8
"""Number of recorded prompts whose prefill is timed per round."""
BUSY = 0.3
"""Relative difference between runs of plain decoding with which a machine is busy: live runs end after two rounds."""
_CONFIRM_TOKENS = 64
"""Maximum tokens of each output in a live run."""


def with_draft(draft: str) -> list[Method]:
    """Return the candidate methods for a draft model: lengths, confidence thresholds, and cascades with Max-Gram.

    draft: "model(NAME)" or "self(LAYERS)". Raises ConfigError for other expressions.
    """
    call = parse(draft)
    if call.name not in ("model", "self") or not call.values:
        raise ConfigError("must be model(NAME) or self(LAYERS)", param="draft", value=draft)
    member = Call("cascade", ((call.name, call.values[0][1]), (None, "max_gram")))
    cascades = [f"{str(member)[:-1]}; k={matrix})" for matrix in MATRICES]
    lengths = ["2", "4", "6", "8", "heuristic", "throughput", *(f"confidence({t})" for t in THRESHOLDS)]
    return [*(Method(draft, length) for length in lengths), *(Method(cascade) for cascade in cascades)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method at a batch size, with its predicted performance."""

    method: Method
    batch_size: int
    expected: Expected | None
    """None for a method that a replay cannot predict."""
    plain: Expected
    is_own: bool = False
    """True for a method that is run live whatever is predicted."""

    @property
    def speed_up(self) -> float | None:
        """The expected speed-up over plain decoding at the same batch size; None if it is not predicted."""
        return None if self.expected is None else self.expected.tokens_per_s / self.plain.tokens_per_s


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A candidate with the results of its live runs."""

    candidate: Candidate
    tokens_per_s: float
    """Plain decoding's median at the same batch size, times the speed-up: a machine that becomes slower between the runs of two
    methods changes neither."""
    speed_up: float
    """Median over repeats, relative to the plain decoding next to each run; low and high are the extremes."""
    low: float
    high: float
    predicted: float | None = None
    """The speed-up predicted for the prompts and tokens of the live runs; None if the method cannot be replayed."""


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


@dataclass(slots=True)
class Tuning:
    """The results of tuning."""

    candidates: list[Candidate] = field(default_factory=list)
    """In order of decreasing expected throughput."""
    confirmed: list[Confirmed] = field(default_factory=list)
    """In order of decreasing measured throughput."""
    failed: dict[str, str] = field(default_factory=dict)
    """Method that could not be replayed or run live -> error message."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Part of the search -> its duration in seconds."""
    plain_spread: float = 0.0
    """Median relative difference between two consecutive runs of plain decoding."""

    @property
    def best(self) -> Confirmed | None:
        """The fastest confirmed method with a gain above the spread of plain decoding, or None."""
        paying = [one for one in self.confirmed if one.speed_up > 1 + self.plain_spread]
        return max(paying, key=lambda one: one.tokens_per_s, default=None)


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
        count: int | None = None,
    ) -> None:
        """profile: a recent profile of the target; by default it is measured when needed, in `rounds` some seconds apart.

        count: number of recorded outputs that are replayed, of all categories in turns; None for all.
        """
        if not recording.greedy:
            text = "was sampled, and tuning needs a greedy one; record with temperature 0"
            raise ConfigError(text, param="recording")
        if recording.model != target.target.name:
            raise ConfigError(f"is of {recording.model!r}, not of {target.target.name!r}", param="recording")
        self.target, self.recording = target, replace(recording, records=tuple(_in_turns(recording)[:count]))
        self._profile, self._rounds = profile, rounds
        self._precomputed: dict[str, PrecomputedDrafter] = {}
        self.tuning = Tuning()

    def profile(self, batch_sizes: Sequence[int], widest: int) -> Profile:
        """Return the target's profile for these batch sizes and up to `widest` tokens per pass, measured on first use."""
        if self._profile is None:
            start = perf_counter()
            sizes = sorted({1, *(2**i for i in range(1, 13) if 2**i < max(batch_sizes)), *batch_sizes})
            columns = [c for c in (1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65) if c < widest] + [widest]
            lengths = sorted(len(r.prompt) + len(r.output) // 2 for r in self.recording.records)
            middle, long = max(16, lengths[len(lengths) // 2]), lengths[int(0.95 * (len(lengths) - 1))]
            contexts = [middle, long] if long > 1.3 * middle else [middle]
            fills = prompt_lengths(max(len(r.prompt) for r in self.recording.records))
            sizes_of: dict[str, Any] = {"batches": sizes, "columns": columns, "contexts": contexts, "fills": fills}
            measured, scales = [], []
            for turn in range(self._rounds):
                measured.append(measure(self.target, **sizes_of, repeats=3))
                scales.append(self._fill_scale(measured[-1], turn))
            found, scale = medians(measured), statistics.median(scales)
            self._profile = replace(found, fills=tuple((tokens, s * scale) for tokens, s in found.fills))
            self.tuning.seconds["profile"] = perf_counter() - start
        return self._profile

    def _fill_scale(self, measured: Profile, turn: int) -> float:
        """Measure the prefill of some recorded prompts of different lengths, relative to the time that the profile predicts."""
        every = _round_robin(self.recording)
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
        expected = sum(measured.fill_seconds(len(request.token_ids) - 1) for request in requests)
        return seconds / expected if expected else 1.0

    def search(
        self, methods: Iterable[Method], batch_sizes: Sequence[int], own: Iterable[Method] = ()
    ) -> list[Candidate]:
        """Predict every method and plain decoding at every batch size, sorted by decreasing expected throughput.

        own: methods that are run live in any case, whether or not they are among the others; what cannot be replayed comes last.
        """
        own = list(own)
        every, always = distinct(m for m in [*methods, *own] if m.name != PLAIN), {m.name for m in own}
        profile = self.profile(batch_sizes, 1 + max(_longest(m) for m in every))
        start = perf_counter()
        out = list[Candidate]()
        for size in batch_sizes:
            plain = plain_decoding(self.recording, size, profile)
            out.append(Candidate(PLAIN_METHOD, size, plain, plain))
            for method in every:
                expected: Expected | None = None
                try:
                    expected = self.expected(method, size)
                except (ForesayError, RuntimeError) as error:
                    if method.name not in always:
                        self.tuning.failed[method.name] = str(error)
                        continue
                out.append(Candidate(method, size, expected, plain, is_own=method.name in always))
        self.tuning.seconds["replay"] = perf_counter() - start - self.tuning.seconds.get("drafts", 0.0)
        self.tuning.candidates = sorted(out, key=_rate, reverse=True)
        return self.tuning.candidates

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

    def confirm(
        self,
        candidates: Sequence[Candidate],
        *,
        repeats: int = 2,
        count: int = 8,
        seconds: float = math.inf,
        on_run: Callable[[Candidate, float], None] | None = None,
    ) -> list[Confirmed]:
        """Run candidates live, each between two runs of plain decoding, on `count` recorded prompts or a full batch if larger.

        seconds: what the runs may take, by plain decoding's expected speed; fewer repeats and prompts follow, at least one each.
        on_run: called with the speed-up of each run. An interruption leaves what was measured in `tuning`.
        """
        start = perf_counter()
        requests = _round_robin(self.recording)
        tokens = min(_CONFIRM_TOKENS, int(self.recording.params["max_new_tokens"]))
        params = SamplingParams(max_new_tokens=tokens)
        turn = sum(2 * max(count, one.batch_size) * tokens / one.plain.tokens_per_s for one in candidates)
        repeats = max(1, min(repeats, int(min(seconds / turn, repeats))))
        count = max(1, min(count, int(count * min(seconds / turn, 1.0))))
        live = _Live([[] for _ in candidates], {})
        try:
            for size in sorted({one.batch_size for one in candidates}):
                block = PromptBlock("", requests[: max(count, size)], size, params)
                self._run_live(candidates, block, repeats, live, on_run)
        finally:
            self.tuning.plain_spread = live.plain_spread
            self.tuning.confirmed = self._confirmed(candidates, live, count, tokens)
            self.tuning.seconds["live"] = perf_counter() - start
        return self.tuning.confirmed

    def _run_live(
        self,
        candidates: Sequence[Candidate],
        block: PromptBlock,
        repeats: int,
        live: _Live,
        on_run: Callable[[Candidate, float], None] | None,
    ) -> None:
        """Run the candidates of a block's batch size in turns. live: receives the results."""
        found = {one.method.name: i for i, one in enumerate(candidates) if one.batch_size == block.batch_size}
        runners = [MethodRunner(self.target, candidates[i].method) for name, i in found.items() if name != PLAIN]
        turns = [(repeat, runner) for repeat in range(repeats) for runner in runners]
        plain = MethodRunner(self.target, PLAIN_METHOD)
        for i, (run, _) in enumerate(
            take_turns(plain, turns, block, warm=replace(block, asks=block.asks[:1]), between=1)
        ):
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
            index = found[run.cell.method]
            live.gains[index].append(run.speed_up)
            if on_run is not None:
                on_run(candidates[index], run.speed_up)

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
        first = _in_turns(self.recording)[:count]
        chosen = [replace(one, output=one.output[:tokens], logprobs=None, top=None) for one in first]
        part = replace(self.recording, records=tuple(chosen))
        size = candidate.batch_size
        plain = plain_decoding(part, size, self._profile)
        return self.expected(candidate.method, size, part).tokens_per_s / plain.tokens_per_s


def plain_decoding(recording: Recording, batch_size: int, profile: Profile) -> Expected:
    """Predict plain decoding."""
    return expect(replay(recording, None, ConstantLength(0), batch_size=batch_size), recording, profile)


def _in_turns(recording: Recording) -> list[Record]:
    """Return the records, alternating between categories."""
    seen: Counter[str] = Counter()
    order = []
    for i, record in enumerate(recording.records):
        order.append((seen[record.category], i))
        seen[record.category] += 1
    return [recording.records[i] for _, i in sorted(order)]


def _round_robin(recording: Recording) -> list[PromptRequest]:
    """Return the recorded prompts as requests, alternating between categories."""
    return [
        PromptRequest(
            one.id, one.category, one.prompt if one.source is None else tuple(one.source), PromptItem(one.id, "")
        )
        for one in _in_turns(recording)
    ]


def _rate(candidate: Candidate) -> float:
    """Return the expected tokens per second; 0 if they are not predicted."""
    return 0.0 if candidate.expected is None else candidate.expected.tokens_per_s


def _longest(method: Method) -> int:
    """Return the maximum draft length of a method."""
    policy: Any = read_length(method.own_length)
    return int(getattr(policy, "num_draft_tokens", getattr(policy, "high", 16)))


def pick(
    candidates: Sequence[Candidate], *, count: int = 3, latency_s: float | None = None
) -> tuple[list[Candidate], Candidate | None]:
    """Return (the `count` best drafting candidates and those that are run in any case, the best plain one).

    latency_s: maximum seconds between two tokens of one request; one without a prediction has plain decoding's. Candidates are
    ranked by tokens per second at any batch size.
    """
    allowed = [c for c in candidates if latency_s is None or (c.expected or c.plain).latency_s <= latency_s]
    ranked = sorted(allowed, key=_rate, reverse=True)
    paying = [one for one in ranked if one.method.name != PLAIN and (one.speed_up or 0.0) > 0.97 and not one.is_own]
    plain = next((one for one in ranked if one.method.name == PLAIN), None)
    return paying[:count] + [one for one in ranked if one.is_own], plain
