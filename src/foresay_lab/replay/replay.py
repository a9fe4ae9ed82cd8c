"""Replay: any drafter, length policy and cascade on recorded outputs, without the target, with the engine's own loop.

For a greedy recording the Steps equal those of live decoding: a draft token is accepted if and only if it is the recorded
next token. For a sampled recording, acceptance is an estimate (see foresay_lab.replay.sampled). Owns the choice of methods
that can be replayed, the results, and the throughput expected from them. The times of live passes come from a profile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from time import perf_counter
from typing import Any

import torch

from foresay.checks import check_int
from foresay.decoding.acceptance import Speculative
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy, Logits, ModelInput, Rule
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine, Stats
from foresay.errors import ConfigError
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.lengths.throughput import exclude_policy_time
from foresay.models.recording import RecordedText, RecordingModel
from foresay.records.profile import Profile
from foresay.records.recording import Record, Recording, read_params
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


class Timed:
    """A length policy that observes the times of live passes instead of those of the replay; the rest is the inner one's."""

    def __init__(self, inner: LengthPolicy, clock: Clock, drafting: Callable[[int, int], float] | None = None) -> None:
        """drafting: (batch, longest draft) -> seconds; by default the drafting times of the replay."""
        self._inner, self._clock, self._drafting = inner, clock, drafting
        self.spent_s = 0.0
        """Total seconds of all steps so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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
            text = "needs the times of target passes; replay it with a profile of the target"
            raise ConfigError(text, param="length", value="throughput")
        policy = Timed(policy, profile.clock())
    if drafter is not None and not recording.greedy:
        replay_sampled(drafter, recording)
    texts, more = [record.text for record in recording.records], model_settings(recording, profile)
    if target is not None and drafter is not None and drafter.hidden_layers:
        more |= {"states": recorded_states(target, texts, drafter.hidden_layers), "device": target.device}
    model = RecordingModel(texts, **more)
    engine = Engine(model, drafter, rule, policy, max_batch_size=batch_size)
    for record in recording.records:
        submit(engine, record, recording)
    return _run(engine, recording)


def recorded_states(
    target: LanguageModel, texts: Sequence[RecordedText], layers: Sequence[int]
) -> Callable[[int], Mapping[int, torch.Tensor]]:
    """Return a function from a text's index to its hidden states by layer, [S, D] each, computed when a text is first read.

    layers: see ModelInput.hidden_layers. The target runs over a text in pieces, as a prefill does.
    """

    @cache
    @torch.inference_mode()
    def states(index: int) -> Mapping[int, torch.Tensor]:
        text, kv_cache = texts[index], target.new_cache()
        tokens = [*text.prompt, *text.output]
        source = None if text.source is None else list(text.source)
        target.admit(Rows([Row(0, tokens, SamplingParams(), limit=len(tokens) + 1, source=source)]), 0, kv_cache)
        parts, size = [], target.capabilities.prefill_chunk
        for start in range(0, len(tokens), size):
            ids = torch.tensor([tokens[start : start + size]], device=target.device)
            fed = ModelInput(ids, [ids.shape[1]], logits=Logits.NONE, hidden_layers=tuple(layers))
            parts.append(target.forward(fed, kv_cache).hidden)
        return {layer: torch.cat([part[layer][0] for part in parts]) for layer in layers}

    return states


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
        text = "needs the target's logits, which a recording lacks; run it live"
        raise ConfigError(text, param="rule", value=rule.name)
    if any(getattr(one, "filler_top_k", 1) > 1 for one in members(drafter)):
        text = "above 1 learns from the target's logits, which a recording lacks; run it live"
        raise ConfigError(text, param="filler_top_k")
    if drafter is not None and drafter.hidden_layers and not (has_states and recording.greedy):
        text = "reads the target's hidden states, which a recording lacks; run it live"
        raise ConfigError(text, param="drafter", value=type(drafter).__name__)
    if not recording.greedy and rule.name != "speculative":
        text = "cannot be replayed on a sampled recording, only speculative; run it live"
        raise ConfigError(text, param="rule", value=rule.name)


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
        text = f"failed in the replay: {type(error).__name__}: {error}"
        raise ConfigError(text, param="drafter", value=type(engine.drafter).__name__)


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
            text = (
                ": its output does not end as the recording's stop tokens and context length require; record it again"
            )
            raise ConfigError(text, param=record.id)
    return Replay(tuple(map(tuple, steps)), tuple(passes), seconds, recording.greedy)


@dataclass(frozen=True, slots=True)
class Expected:
    """The predicted counts and times of a live run over the recorded prompts."""

    tokens: int
    passes: int
    """Target passes, each over a batch."""
    row_passes: int
    """Sum of the batch sizes of all target passes."""
    seconds: float
    """Total time, including prompt processing."""
    draft_s: float
    fill_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per row and pass."""
        return self.tokens / self.row_passes

    @property
    def latency_s(self) -> float:
        """Mean seconds between two tokens of a request while it decodes."""
        return (self.seconds - self.fill_s) / self.passes / self.tokens_per_pass


def expect(done: Replay, recording: Recording, profile: Profile, drafter: str | None = None) -> Expected:
    """Predict the time of a live run from a replay's passes.

    drafter: the key of the drafter's times in the profile; by default the drafting times of the replay are used, in which the
    drafter runs as it does live. Raises ConfigError for a profile without timings.
    """
    clock = profile.clock()
    fill = sum(profile.fill_seconds(len(record.prompt) - 1) for record in recording.records)
    draft = 0.0
    target = 0.0
    for one in done.passes:
        target += clock(one.batch, one.width, one.context)
        draft += one.draft_s if drafter is None else profile.draft_seconds(drafter, one.batch, one.drafted)
    if drafter is not None:
        draft += profile.draft_fills.get(drafter, 0.0) * sum(len(record.prompt) for record in recording.records)
    return Expected(
        tokens=sum(one.tokens for one in done.passes),
        passes=len(done.passes),
        row_passes=sum(one.batch for one in done.passes),
        seconds=target + draft + fill,
        draft_s=draft,
        fill_s=fill,
    )


def plain_decoding(recording: Recording, batch_size: int, profile: Profile) -> Expected:
    """Predict plain decoding."""
    return expect(replay(recording, None, ConstantLength(0), batch_size=batch_size), recording, profile)
