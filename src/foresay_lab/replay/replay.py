"""Replay: any drafter, length policy and cascade on recorded outputs, without the target, with the engine's own loop.

For a greedy recording the Steps equal those of live decoding: a draft token is accepted if and only if it is the recorded
next token. For a sampled recording, acceptance is an estimate (see foresay_lab.replay.sampled). Owns the choice of methods
that can be replayed, and the results. The times of live passes come from a profile; time-based policies and predict.py use it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from time import perf_counter
from typing import Any

from foresay.checks import check_int
from foresay.decoding.acceptance import Speculative
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy, Rule
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import Stopping
from foresay.engine import Engine, Stats
from foresay.errors import ConfigError
from foresay.lengths import ThroughputLength
from foresay.lengths.throughput import exclude_policy_time
from foresay.models.recording import RecordingModel
from foresay.records.profile import Profile
from foresay.records.recording import Record, Recording, read_params
from foresay_lab.replay.hidden_states import RecordedStates
from foresay_lab.replay.sampled import PROBABILITY_FIELDS, members, replay_sampled


@dataclass(frozen=True, slots=True)
class PassCost:
    """One target pass over a batch as it would run live, for a cost model."""

    batch: int
    width: float
    """Tokens per row: 1 + the longest draft, or 1 + the mean draft if the pass time depends on the real tokens."""
    context: int
    """Tokens of the longest row before the pass, which determine the cost of attention."""
    tokens: int
    """Tokens committed in all rows."""
    drafted: int
    """Length of the longest draft."""
    draft_s: float
    """Seconds spent drafting, in the replay."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The Steps and passes of a replay."""

    steps: tuple[tuple[Step, ...], ...]
    """Steps of each record, in the recording's order. Their times are those of the replay."""
    passes: tuple[PassCost, ...]
    seconds: float
    """Wall-clock time of the replay itself."""
    exact: bool
    """True if live decoding gives the same Steps; otherwise acceptance is an estimate."""

    @property
    def stats(self) -> Stats:
        """The sum of all Steps."""
        return Stats.of(step for steps in self.steps for step in steps)

    def rate(self, confidence: float = 0.95) -> tuple[float, float, float] | None:
        """Return (acceptance rate, low, high), or None if nothing was tested; see `ratio`."""
        counts = [(float(s.num_accepted), float(s.num_tested)) for s in map(Stats.of, self.steps)]
        return ratio(counts, confidence) if any(tested for _, tested in counts) else None

    def efficiency(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """Return (tokens per pass, low, high); see `ratio`."""
        return ratio([(float(s.num_tokens), float(s.num_passes)) for s in map(Stats.of, self.steps)], confidence)


def ratio(counts: Sequence[tuple[float, float]], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return (ratio, low, high): a ratio of sums over prompts, and its confidence interval with prompts as independent units.

    counts: (numerator, denominator) of each prompt. Uses the normal approximation of the linearised ratio; with one prompt the
    interval is (-inf, inf).
    """
    total = sum(b for _, b in counts)
    value = sum(a for a, _ in counts) / total
    n = len(counts)
    if n < 2:
        return value, -math.inf, math.inf
    variance = n / (n - 1) * sum((a - value * b) ** 2 for a, b in counts) / total**2
    margin = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance)
    return value, value - margin, value + margin


Clock = Callable[[int, float, float], float]
"""(batch, tokens per row, context) -> seconds of a target pass."""


def width_of(steps: Sequence[Step], ragged: bool) -> float:
    """Return PassCost.width for the Steps of a pass."""
    drafted = [step.num_drafted for step in steps]
    return 1 + (sum(drafted) / len(drafted) if ragged else max(drafted))


class Timed(LengthPolicy):
    """A time-based policy that observes the times of live passes instead of those of the replay."""

    def __init__(self, inner: LengthPolicy, clock: Clock, drafting: Callable[[int, int], float] | None = None) -> None:
        """drafting: (batch, longest draft) -> seconds; by default the drafting times of the replay."""
        self._inner, self._clock, self._drafting = inner, clock, drafting
        self.spent_s = 0.0
        """Total seconds of all steps so far."""
        self.remembers = inner.remembers

    def budget(self, rows: Rows) -> list[int]:
        """Delegate to the inner policy."""
        return self._inner.budget(rows)

    def stopping(self, rows: Rows) -> Stopping:
        """Delegate to the inner policy."""
        return self._inner.stopping(rows)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """Delegate to the inner policy."""
        return self._inner.num_to_score(rows, counts, matched)

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> Sequence[int]:
        """Delegate to the inner policy."""
        return self._inner.fallback_budget(rows, most)

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Pass the steps to the inner policy with their live times."""
        seconds = self._clock(len(steps), width_of(steps, rows.capabilities.ragged), max(row.size for row in rows))
        draft = steps[0].draft_s
        if self._drafting is not None:
            draft = self._drafting(len(steps), max(step.num_drafted for step in steps))
            exclude_policy_time(rows)
        self.spent_s += draft + seconds
        timed = [dataclasses.replace(s, draft_s=draft, target_s=seconds, total_s=draft + seconds) for s in steps]
        self._inner.observe(rows, timed)


def replay(
    recording: Recording,
    drafter: Drafter | None,
    policy: LengthPolicy,
    *,
    rule: Rule | None = None,
    batch_size: int = 1,
    profile: Profile | None = None,
    target: LanguageModel | None = None,
) -> Replay:
    """Decode the recorded outputs again with a drafter.

    rule: by default "speculative"; on a greedy recording all exact rules accept the same tokens. profile: the times of target
    passes, for time-based policies. target: the recorded model, whose hidden states heads and blocks read; one pass over each
    text computes them.
    Raises ConfigError for methods that need the target's logits (a lossy rule, a drafter that learns from them), for any
    other rule than "speculative" on a sampled recording, for `throughput` without a profile, and if the drafter fails.
    """
    rule = rule or Speculative()
    check_method(recording, drafter, rule, has_states=target is not None)
    if isinstance(policy, ThroughputLength):
        if profile is None:
            raise ConfigError(
                "length 'throughput' needs the times of target passes; replay it with a profile of the target"
            )
        policy = Timed(policy, profile.clock())
    if drafter is not None and not recording.greedy:
        replay_sampled(drafter, recording)
    texts, more = [record.text for record in recording.records], model_settings(recording, profile)
    if target is not None and drafter is not None and drafter.hidden_layers:
        more |= {"states": RecordedStates(target, texts, drafter.hidden_layers), "device": target.device}
    model = RecordingModel(texts, **more)
    engine = Engine(model, drafter, rule, policy, max_batch_size=batch_size)
    for record in recording.records:
        submit(engine, record, recording)
    return _run(engine, recording)


def model_settings(recording: Recording, profile: Profile | None) -> dict[str, Any]:
    """Return the arguments of a RecordingModel: properties of the recorded model and, from a profile, of its passes."""
    return {
        "vocab_size": recording.vocab_size,
        "max_length": check_int("max_length", recording.settings.get("max_length", 1 << 30), 1),
        "ragged": profile is not None and profile.ragged,
        "column_cost": None if profile is None else profile.column_cost,
    }


def check_method(recording: Recording, drafter: Drafter | None, rule: Rule, *, has_states: bool = False) -> None:
    """Raise ConfigError for methods that need the target's logits, and for those that a sampled recording cannot replay.

    has_states: True if hidden states are available.
    """
    if not rule.exact:
        raise ConfigError(
            "needs the target's logits, which a recording lacks; run it live", param="rule", value=rule.name
        )
    if any(getattr(one, "filler_top_k", 1) > 1 for one in members(drafter)):
        raise ConfigError("filler_top_k above 1 learns from the target's logits, which a recording lacks; run it live")
    if drafter is not None and drafter.hidden_layers and not (has_states and recording.greedy):
        raise ConfigError("a draft head reads the target's hidden states, which a recording lacks; run it live")
    if not recording.greedy and rule.name != "speculative":
        raise ConfigError(
            f"a sampled recording can replay rule='speculative' only, not rule={rule.name!r}; run it live"
        )


def submit(engine: Engine, record: Record, recording: Recording) -> None:
    """Submit a request that ends at the same token as the recorded one, for the same reason."""
    count = len(record.output)
    stopped = record.finish_reason == FinishReason.STOP
    limit = max(int(recording.params.get("max_new_tokens", 0)), count) if stopped else count
    params = recorded_params(recording, limit)
    ends = recording.eos | set(params.stop_token_ids)
    stop = _StopAfter(count) if stopped and record.output[-1] not in ends else None
    engine.submit(record.prompt, params, eos=recording.eos, stop=stop, source=record.source)


def recorded_params(recording: Recording, max_new_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a replayed request. They are greedy: the recorded tokens are not sampled again.

    SampledReplayModel samples the draft tokens of a draft model and makes them the argmax.
    """
    values = {k: v for k, v in recording.params.items() if recording.greedy or k not in PROBABILITY_FIELDS}
    minimum = min(int(values.get("min_new_tokens", 0)), max_new_tokens)
    return read_params(values, max_new_tokens=max_new_tokens, min_new_tokens=minimum, logprobs=None, stop=())


def check_drafter(engine: Engine) -> None:
    """Raise ConfigError if the drafter failed, because the replay then does not describe it."""
    if engine.draft_failures and engine.drafter is not None:
        error = engine.drafter.last_error
        raise ConfigError(f"the drafter failed in the replay: {type(error).__name__}: {error}")


class _StopAfter:
    """A stop condition that ends the output after `count` tokens."""

    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        remaining, self._left = self._left, self._left - len(token_ids)
        return remaining if self._left <= 0 else None


def _run(engine: Engine, recording: Recording) -> Replay:
    steps: list[list[Step]] = [[] for _ in recording.records]
    sizes = [len(record.prompt) for record in recording.records]
    passes: list[PassCost] = []
    start = perf_counter()
    while engine.has_work:
        done = engine.step()
        if not done:
            continue
        context = max(sizes[step.request_id] for step in done)
        longest = max(step.num_drafted for step in done)
        width = width_of(done, engine.target.capabilities.ragged)
        committed = sum(len(step.token_ids) for step in done)
        passes.append(PassCost(len(done), width, context, committed, longest, done[0].draft_s))
        for step in done:
            steps[step.request_id].append(step)
            sizes[step.request_id] += len(step.token_ids)
    seconds = perf_counter() - start
    check_drafter(engine)
    for record, record_steps in zip(recording.records, steps, strict=True):
        output = [token for step in record_steps for token in step.token_ids]
        if output != list(record.output):
            raise ConfigError(
                f"{record.id} was not replayed as recorded: its output does not end where the recording's end tokens, "
                "stop tokens and context length require; record it again"
            )
    return Replay(tuple(map(tuple, steps)), tuple(passes), seconds, recording.greedy)
