"""Replaying against decoding: greedy recordings give the Steps of a live run, sampled ones an estimate that holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, LengthPolicy, ModelInput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, ModelDrafter, NgramStoreDrafter, SelfDrafter, SuffixDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.engine import Engine
from foresay.engine.stats import Stats
from foresay.lengths import ConfidenceLength, ConstantLength, HeuristicLength, ThroughputLength
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.recording import RecordingCache, RecordingModel
from foresay.models.table import TableModel
from foresay.records.profile import Profile, Timing
from foresay.records.recording import Record, Recording
from foresay.text.stream import StopStrings
from foresay_lab.replay import replay as replaying
from foresay_lab.replay import sampled as coupled
from foresay_lab.replay.precomputed import can_precompute, precompute
from foresay_lab.replay.record import record
from foresay_lab.replay.replay import Replay, ratio, replay
from foresay_lab.replay.sampled import SampledReplayModel
from helpers.blocks import random_block
from helpers.families import VOCAB, make, make_seq2seq
from helpers.heads import random_head
from helpers.recordings import Numbers, loaded, noisy, numbered
from helpers.refusals import refused, refuses
from helpers.support import Fake, PromptLookup, Renumbered

PARAMS = SamplingParams(max_new_tokens=28)
ITEMS = numbered(5)


def fused(weights: Any) -> CausalModel:
    model = CausalModel(weights)
    model.use_fused()
    return model


def draft(**changes: Any) -> ModelDrafter:
    return ModelDrafter(fused(noisy(lambda: make("llama", **changes))), VOCAB)


def itself() -> SelfDrafter:
    return SelfDrafter(first_layers(fused(make("llama")), 2), VOCAB)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt_lookup": lambda: PromptLookup(min_ngram=1),
    "max_gram": MaxGram,
    "suffix": SuffixDrafter,
    "ngram_store": lambda: NgramStoreDrafter(3, stop_unknown=False),
    "model": draft,
    "self": itself,
    "cascade": lambda: Cascade([draft(), MaxGram()], [[3, 2], [0, 2]]),
    "translated": lambda: CrossTokenizerDrafter(fused(make("llama")), VOCAB, Renumbered(VOCAB, 9)),
}
LENGTHS: dict[str, Callable[[], LengthPolicy]] = {
    "constant": lambda: ConstantLength(4),
    "heuristic": lambda: HeuristicLength(3, high=9),
    "confidence": lambda: ConfidenceLength(0.5, high=8),
}
Shown = tuple[tuple[int, ...], tuple[str, ...], int, int, FinishReason | None]


def shown(steps: Sequence[Step]) -> list[Shown]:
    return [(s.token_ids, tuple(s.origins), s.num_drafted, s.num_accepted, s.finish_reason) for s in steps]


def live(
    target: Any, recording: Recording, params: SamplingParams, drafter: Drafter, policy: LengthPolicy, batch: int = 1
) -> list[list[Shown]]:
    """Steps of decoding the recorded prompts, by prompt."""
    generator = loaded(target)
    engine = Engine(generator.target.model, drafter, make_rule("speculative"), policy, max_batch_size=batch)
    for r in recording.records:
        stop = StopStrings(Numbers(), params.stop, params.min_new_tokens) if params.stop else None
        engine.submit(r.prompt, params, eos=generator.target.eos_token_ids, stop=stop, source=r.source)
    steps: list[list[Step]] = [[] for _ in recording.records]
    while engine.has_work:
        for step in engine.step():
            steps[step.request_id].append(step)
    assert engine.draft_failures == 0
    return [shown(one) for one in steps]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(loaded(), ITEMS, tmp_path_factory.mktemp("plain") / "r.jsonl", PARAMS)


def replayed(recording: Recording, drafter: Drafter | None, gamma: int = 4, **options: Any) -> list[list[Shown]]:
    return steps_of(replay(recording, drafter, ConstantLength(gamma), **options))


def steps_of(done: Replay) -> list[list[Shown]]:
    return [shown(steps) for steps in done.steps]


def exact(
    recording: Recording,
    made: Callable[[], Drafter],
    policy: Callable[[], LengthPolicy] = lambda: ConstantLength(4),
    batch: int = 1,
    target: Callable[[], Any] = lambda: make("llama"),
    params: SamplingParams = PARAMS,
) -> Replay:
    """The replay, whose Steps are those of decoding."""
    done = replay(recording, made(), policy(), batch_size=batch)
    assert steps_of(done) == live(target(), recording, params, made(), policy(), batch)
    return done


WAYS = [("constant", 1), ("heuristic", 4), ("confidence", 3)]


@pytest.mark.parametrize(
    ("drafter", "length", "batch"),
    [(one, *way) for i, one in enumerate(DRAFTERS) for j, way in enumerate(WAYS) if (i + j) % 3],
)
def test_the_steps_of_live_decoding(plain: Recording, drafter: str, length: str, batch: int) -> None:
    done = exact(plain, DRAFTERS[drafter], LENGTHS[length], batch)
    stats = done.stats
    assert done.exact and stats.num_tokens == plain.num_tokens
    assert stats.num_accepted < stats.num_drafted, "rejections"
    assert stats.num_accepted > 0 or drafter == "translated", "and acceptances: other tokens are read as another text"
    assert sum(p.tokens for p in done.passes) == stats.num_tokens
    assert sum(p.batch for p in done.passes) == stats.num_passes
    assert max(p.batch for p in done.passes) == batch


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # what is requested, how the model is made, and how long drafts are
    "penalties": (
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "banned_token_ids": (36,), "logit_bias": {7: 3.0}},
        {},
        4,
    ),
    "only some tokens": ({"allowed_token_ids": tuple(range(40))}, {}, 4),
    "an end in the block": ({"logit_bias": {0: 7.0}}, {}, 6),
    "no end too early": ({"min_new_tokens": 40, "logit_bias": {0: 7.0}}, {}, 4),
    "an end after a while": ({"min_new_tokens": 15, "logit_bias": {0: 7.0}}, {}, 4),
    "past the end": ({"ignore_eos": True, "logit_bias": {0: 1.0}}, {}, 4),
    "a stop token": ({"stop_token_ids": (36, 47, 14)}, {}, 6),
    "stop strings": ({"stop": ("36 ", "14 4", "47 36")}, {}, 6),
    "the context's end": ({"max_new_tokens": 64}, {"max_position_embeddings": 30}, 5),
    "an end near the context's": ({"max_new_tokens": 64, "logit_bias": {0: 7.0}}, {"max_position_embeddings": 30}, 14),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "batch"), [(case, 1 + 3 * (i % 2)) for i, case in enumerate(CASES)])
def test_the_steps_whatever_ends_or_changes_the_output(tmp_path: Path, case: str, batch: int) -> None:
    """Draft tokens past the end are counted neither live nor in the replay."""
    asked, changes, gamma = CASES[case]
    params, perfect = SamplingParams(**{"max_new_tokens": 40, **asked}), case == "a stop token"
    recording = record(loaded(make("llama", **changes)), ITEMS, tmp_path / "r.jsonl", params)
    assert not case.startswith("an end") or "stop" in {r.finish_reason for r in recording.records}
    makers: list[Callable[[], Drafter]] = [draft if batch == 1 else lambda: PromptLookup(min_ngram=1)]
    makers += [lambda: draft(**changes)] * bool(changes)
    makers += [lambda: ModelDrafter(CausalModel(make("llama")), VOCAB)] * perfect
    for made in makers:
        done = exact(recording, made, lambda: ConstantLength(gamma), batch, lambda: make("llama", **changes), params)
        assert done.stats.num_accepted > 0
    last = [steps[-1] for steps in done.steps]
    inside = [s.finish_reason is FinishReason.STOP and len(s.token_ids) == s.num_drafted < gamma for s in last]
    assert any(inside) or not perfect, "inside of a draft"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "batch"), [("t5", 3), ("bart", 1)])
def test_the_steps_of_an_encoder_decoder(tmp_path: Path, family: str, batch: int) -> None:
    recording = record(loaded(make_seq2seq(family)), ITEMS[:4], tmp_path / "r.jsonl", PARAMS)
    sources = [tuple(int(word) for word in str(item.prompt).split()) for item in ITEMS[:4]]
    assert [r.source for r in recording.records] == sources
    assert family != "t5" or {r.prompt for r in recording.records} == {(0,)}
    smaller = lambda: ModelDrafter(Seq2SeqModel(noisy(lambda: make_seq2seq(family), 0.05)), VOCAB)  # noqa: E731
    makers: list[Callable[[], Drafter]] = [lambda: Cascade([smaller(), MaxGram()], [[3, 2], [0, 2]])]
    makers += [smaller, MaxGram, SuffixDrafter] if family == "t5" else [draft, lambda: PromptLookup(min_ngram=1)]
    done = [exact(recording, made, batch=batch, target=lambda: make_seq2seq(family)) for made in makers]
    assert sum(one.stats.num_accepted for one in done) > 20


def test_all_exact_rules_and_plain_decoding(plain: Recording) -> None:
    wanted = replayed(plain, draft())
    for rule in ("block", "match", "coupled"):
        assert replayed(plain, draft(), rule=make_rule(rule)) == wanted, rule
    done = replay(plain, None, ConstantLength(0), batch_size=4)
    assert done.stats.num_passes == done.stats.num_tokens == plain.num_tokens and done.rate() is None
    assert {p.width for p in done.passes} == {1}


def altered(recording: Recording, place: int = 7) -> Recording:
    """With one token of one output changed."""
    first, *rest = recording.records
    output = list(first.output)
    output[place] = 1 + output[place] % (VOCAB - 1)
    return dataclasses.replace(recording, records=(dataclasses.replace(first, output=tuple(output)), *rest))


def test_an_altered_recording_gives_other_steps(plain: Recording) -> None:
    wanted = live(make("llama"), plain, PARAMS, draft(), ConstantLength(4))
    other = replayed(altered(plain), draft())
    assert [a == b for a, b in zip(other, wanted, strict=True)] == [False] + [True] * (len(ITEMS) - 1)
    assert replayed(plain, precompute(draft(), altered(plain))) != replayed(plain, draft()), "what another text taught"


def test_a_recording_read_one_position_off_or_in_other_rows_is_caught(
    plain: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RecordingModel.forward

    def off_by_one(self: RecordingModel, model_input: ModelInput, cache: Any) -> Any:
        cache.lengths = [n + 1 for n in cache.lengths]
        out = honest(self, model_input, cache)
        cache.lengths = [n - 1 for n in cache.lengths]
        return out

    with monkeypatch.context() as patch, refused("p0"):
        patch.setattr(RecordingModel, "forward", off_by_one)
        replayed(plain, MaxGram())
    monkeypatch.setattr(
        RecordingCache, "rearrange", lambda self, moves, count: self.lengths.__delitem__(slice(count, None))
    )
    with pytest.raises(Exception):  # noqa: B017, PT011 - a shape that does not fit, or a text that does not
        replayed(plain, MaxGram(), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["", "penalties", "an end after a while"])
def test_a_taught_draft_makes_the_same_steps(plain: Recording, tmp_path: Path, case: str) -> None:
    """But that after a miss either draft may have stopped at an end token of its own."""
    short: Callable[[], Drafter] = lambda: draft(max_position_embeddings=24)  # noqa: E731
    ways = [(draft, ConstantLength(4), 4), (draft, HeuristicLength(), 1)]
    ways += [(itself, ConstantLength(1), 4), (itself, ConstantLength(11), 1), (short, ConstantLength(11), 1)]
    if case:
        params = SamplingParams(**{"max_new_tokens": 40, **CASES[case][0]})
        plain, ways = record(loaded(), ITEMS, tmp_path / "r.jsonl", params), ways[:1]
    for made, policy, batch in ways:
        assert can_precompute(made(), policy, plain)
        taught, wanted = (
            replay(plain, one, policy, batch_size=batch).steps for one in (precompute(made(), plain), made())
        )
        for a, b in zip(itertools.chain(*taught), itertools.chain(*wanted), strict=True):
            known = ("request_id", "token_ids", "origins", "num_accepted", "finish_reason")
            assert [getattr(a, name) for name in known] == [getattr(b, name) for name in known]
            assert a.num_drafted == b.num_drafted or min(a.num_drafted, b.num_drafted) > b.num_accepted


def test_what_cannot_be_taught(plain: Recording) -> None:
    sampled = dataclasses.replace(plain, params={"temperature": 1.0})
    read = dataclasses.replace(plain, records=(dataclasses.replace(plain.records[0], source=(3,)),))
    cases: list[tuple[Drafter, LengthPolicy, Recording, bool]] = [
        (draft(), HeuristicLength(), plain, True),
        (draft(), ConstantLength(4), plain, True),
        *((draft(), reads_scores, plain, False) for reads_scores in (ConfidenceLength(), ThroughputLength())),
        *((DRAFTERS[name](), ConstantLength(4), plain, False) for name in ("max_gram", "translated", "cascade")),
        *((draft(), ConstantLength(4), other, False) for other in (sampled, read)),
    ]
    for drafter, policy, recording, can in cases:
        assert can_precompute(drafter, policy, recording) is can, (drafter, policy)


def proposals(drafter: Drafter) -> list[tuple[int, int, list[int]]]:
    """Receives the request, the length and the draft of each row that a drafter drafts for."""
    found: list[tuple[int, int, list[int]]] = []
    known = drafter.propose

    def propose(rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        out = known(rows, budget, policy)
        for i, (row, count) in enumerate(zip(rows, out.num_tokens, strict=True)):
            found.append((row.request_id, row.size, out.token_ids[i, :count].tolist()))
        return out

    drafter.propose = propose  # type: ignore[method-assign]
    return found


def reading(kind: str, target: CausalModel) -> Drafter:
    if kind == "block":
        return BlockDrafter(BlockModel(random_block(target, layers=(0, 2)), target), VOCAB)
    return HeadDrafter(HeadModel(random_head(target), target), VOCAB, nodes=6 if kind == "tree" else 0)


@pytest.mark.parametrize(("kind", "batch"), [("head", 1), ("head", 3), ("tree", 2), ("block", 1)])
def test_drafts_of_hidden_states_are_those_of_live_decoding(
    plain: Recording, kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over each text computes the states. Control: the states of the next position."""
    target = CausalModel(make("llama"))
    decoding = reading(kind, target)
    wanted = proposals(decoding)
    steps = live(make("llama"), plain, PARAMS, decoding, ConstantLength(4), batch)

    def both() -> tuple[list[list[Shown]], list[tuple[int, int, list[int]]]]:
        drafter = reading(kind, target)
        found = proposals(drafter)
        return replayed(plain, drafter, batch_size=batch, target=target), found

    assert both() == (steps, wanted) and wanted
    honest = replaying.recorded_states

    def shifted(*of: Any) -> Callable[[int], dict[int, torch.Tensor]]:
        states = honest(*of)
        return lambda text: {layer: one.roll(-1, 0) for layer, one in states(text).items()}

    monkeypatch.setattr(replaying, "recorded_states", shifted)
    assert both()[1] != wanted
    with refused("drafter"):
        replayed(plain, reading(kind, target))


class Failing(Fake):
    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        raise RuntimeError("no more")


def test_what_no_recording_can_answer(plain: Recording, caplog: pytest.LogCaptureFixture) -> None:
    filler = NgramStoreDrafter(3, filler_top_k=2)
    calls: list[tuple[Callable[[], Any], str, Any]] = [
        (lambda: replayed(plain, MaxGram(), rule=make_rule("lenience")), "rule", "lenience"),
        (lambda: replayed(plain, filler), "filler_top_k", ANY),
        (lambda: replayed(plain, Cascade([filler, MaxGram()], [[2, 2], [0, 0]])), "filler_top_k", ANY),
        (lambda: replayed(plain, Failing()), "drafter", "GuardedDrafter"),
    ]
    for call, param, value in calls:
        refuses(call, param, value)
    assert "the drafter failed" in caplog.text


def test_throughput_receives_the_targets_times(plain: Recording) -> None:
    """With passes that cost the same however wide they are it drafts; where each draft token costs three passes it does not."""

    def at(seconds: Callable[[int], float], known: float | None = None, **options: bool) -> Replay:
        policy = ThroughputLength(start=4, high=8)
        return replay(plain, Oracle(plain, **options), policy, profile=profile(seconds, known))

    wide, slow = at(lambda columns: 1e3), at(lambda columns: 1e4 * (3 * columns - 2))
    assert wide.stats.num_drafted > 3 * max(1, slow.stats.num_drafted)
    assert wide.efficiency()[0] > 2.5 and wide.efficiency()[0] > 1.5 * slow.efficiency()[0]
    # as live over llama.cpp, whose columns are expensive: what the model reports it need not find out by drafting
    known, found_out = (at(lambda columns: 1e3 * (0.1 + 0.9 * columns), one, wrong=True) for one in (0.9, None))
    assert known.stats.num_drafted < found_out.stats.num_drafted
    contexts: list[float] = []

    class Watched(Profile):
        def clock(self) -> Callable[[int, float, float], float]:
            return lambda batch, columns, context: contexts.append(context) or 1.0

    replay(plain, Oracle(plain), ThroughputLength(), profile=Watched("m", "float32", {}, (), ()))
    assert min(contexts) >= 2 and max(contexts) > 30, "the rows' sizes"


def profile(seconds: Callable[[int], float], column_cost: float | None = None) -> Profile:
    """Passes of one row, by their columns; so long that drafting takes nothing of them, however busy this machine is."""
    timings = tuple(Timing(1, c, 40, s := seconds(c), s, s) for c in (1, 2, 5, 9))
    return Profile("m", "float32", {}, timings, ((256, 1.0),), ragged=True, column_cost=column_cost)


class Oracle(Fake):
    """Drafts what is recorded, or anything but that."""

    def __init__(self, recording: Recording, *, wrong: bool = False) -> None:
        self.texts, self.off = [r.output for r in recording.records], int(wrong)

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        one = rows[row]
        return [(token + self.off) % VOCAB for token in self.texts[one.request_id][one.num_new : one.num_new + budget]]


def test_ratios() -> None:
    value, low, high = ratio([(1, 2), (3, 4), (2, 4)])
    squares = sum((a - 0.6 * b) ** 2 for a, b in ((1, 2), (3, 4), (2, 4)))
    reach = 1.959964 * math.sqrt(3 / 2 * squares) / 10
    assert (value, low, high) == pytest.approx((0.6, 0.6 - reach, 0.6 + reach))
    assert ratio([(3, 4)]) == (0.75, -math.inf, math.inf)
    narrow = ratio([(1, 2), (3, 4), (2, 4)], confidence=0.5)
    assert low < narrow[1] < narrow[2] < high
    numbers, covered = np.random.default_rng(0), 0
    for _ in range(400):
        rates = numbers.beta(4, 2, size=60)  # prompts differ
        tested = numbers.integers(20, 60, size=60)
        _, low, high = ratio(list(zip(numbers.binomial(tested, rates).tolist(), tested.tolist(), strict=True)))
        covered += low <= 4 / 6 <= high
    assert 0.91 <= covered / 400 <= 0.985, "95% intervals"


SIZE = 8
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.8, top_p=0.95, seed=8, ignore_eos=True)
TARGET = TableModel.random(SIZE, seed=1, concentration=0.7)
DRAFT = TableModel(0.6 * TARGET.table + 0.4 * TableModel.random(SIZE, seed=2, concentration=0.7).table)
PROMPTS = numbered(40, high=SIZE, longest=6, seed=9)


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    generator = loaded(TARGET, batch=40, tokenizer=Numbers(SIZE))
    return record(generator, PROMPTS, tmp_path_factory.mktemp("sampled") / "r.jsonl", SAMPLED)


def counts(steps: Sequence[Sequence[Step]]) -> list[tuple[float, float]]:
    return [(float(s.num_accepted), float(s.num_tested)) for s in map(Stats.of, steps)]


@functools.cache
def truth(drafter: str) -> list[tuple[float, float]]:
    """(accepted, tested) of each prompt in live speculative sampling with a seed of its own."""
    engine = Engine(TARGET, SAMPLING[drafter](), make_rule("speculative"), ConstantLength(4), max_batch_size=40)
    for i, item in enumerate(PROMPTS):
        params = SamplingParams.of(SAMPLED, seed=10**6 + i)
        engine.submit([int(word) for word in str(item.prompt).split()], params)
    steps: list[list[Step]] = [[] for _ in PROMPTS]
    while engine.has_work:
        for step in engine.step():
            steps[step.request_id].append(step)
    assert engine.draft_failures == 0
    return counts(steps)


def apart(estimate: Sequence[tuple[float, float]], true: Sequence[tuple[float, float]]) -> float:
    """Standard errors between two acceptance rates."""
    (a, a_low, _), (b, b_low, _) = ratio(estimate), ratio(true)
    return (a - b) / math.hypot((a - a_low) / 1.96, (b - b_low) / 1.96)


SAMPLING: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(DRAFT, SIZE),
    "narrow model": lambda: ModelDrafter(TableModel.random(SIZE - 2, seed=4), SIZE),
    "max_gram": MaxGram,
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", SAMPLING)
def test_estimates_of_sampled_recordings(sampled: Recording, drafter: str) -> None:
    done = replay(sampled, SAMPLING[drafter](), ConstantLength(4), batch_size=40)
    assert not done.exact and done.stats.num_tokens == sampled.num_tokens == 40 * 30
    true = truth(drafter)
    assert abs(apart(counts(done.steps), true)) < 3
    rate, efficiency = done.rate(0.999), done.efficiency()
    assert rate is not None and rate[1] < ratio(true)[0] < rate[2], (
        "the 99.9% interval covers it, which 1 of 1,000 does not"
    )
    assert 0.1 < rate[0] < 0.95 and efficiency[1] < efficiency[0] < efficiency[2]


@pytest.mark.slow
def test_the_estimate_of_a_known_acceptance(tmp_path: Path) -> None:
    """Tables whose distributions are all the same: alpha = sum min(p, q), whatever was written before."""
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.2, 0.2, 0.5, 0.1])
    target, other = (TableModel(distribution.expand(4, 4, -1).contiguous()) for distribution in (p, q))
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    items = numbered(40, high=4, longest=4)
    recording = record(loaded(target, batch=40, tokenizer=Numbers(4)), items, tmp_path / "r.jsonl", params)
    for gamma in (1, 5):
        value, low, high = (
            replay(recording, ModelDrafter(other, 4), ConstantLength(gamma), batch_size=40).rate() or (0,) * 3
        )
        alpha = float(torch.minimum(p, q).sum())
        assert abs(value - alpha) < 3 * (high - low) / 3.92 and low < alpha < high


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["p", "chance", "q"])
def test_an_estimate_that_ignores_something_is_far_off(
    sampled: Recording, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    """Negative controls: acceptance q(y) instead of min(1, q(y) / p(y)); always where q > 0; and q uniform."""
    changed = sampled
    if ignored == "q":
        honest = coupled.build_distributions
        monkeypatch.setattr(coupled, "build_distributions", lambda scores, rows: honest(torch.zeros_like(scores), rows))
    else:
        p = 1.0 if ignored == "p" else 1e-9
        records = tuple(dataclasses.replace(r, token_probs=(p,) * len(r.output)) for r in sampled.records)
        changed = dataclasses.replace(sampled, records=records)
    done = replay(changed, SAMPLING["model"](), ConstantLength(4), batch_size=40)
    assert abs(apart(counts(done.steps), truth("model"))) > 5


def first(recording: Recording, count: int) -> Recording:
    return dataclasses.replace(recording, records=recording.records[:count])


@pytest.mark.slow
def test_neither_an_earlier_replay_nor_the_batch_shows(sampled: Recording, plain: Recording) -> None:
    some, made = first(sampled, 20), SAMPLING["model"]
    others = dataclasses.replace(sampled, records=sampled.records[20:36])
    wanted, drafter = [replayed(one, made(), batch_size=7) for one in (some, others)], made()
    assert [replayed(one, drafter, batch_size=7) for one in (some, some, others)] == [wanted[0], *wanted]
    assert replayed(some, made(), batch_size=1) == wanted[0]
    reused = draft()
    assert replayed(plain, reused) == replayed(plain, reused)


@pytest.mark.slow
def test_a_draft_in_bf16_is_coupled_too(sampled: Recording) -> None:
    """A little more than the greatest score is that score in bf16: the drawn token would lose a tie."""

    class Rounded(TableModel):
        def forward(self, *args: Any, **more: Any) -> Any:
            out = super().forward(*args, **more)
            return out if out.logits is None else dataclasses.replace(out, logits=(out.logits + 20).to(torch.bfloat16))

    done = replay(sampled, ModelDrafter(Rounded(DRAFT.table), SIZE), ConstantLength(4), batch_size=40)
    assert abs(apart(counts(done.steps), truth("model"))) < 3


def test_a_decoder_only_draft_of_an_encoder_decoder_is_held_against_the_right_places() -> None:
    """Source and output are one text there; what the decoder starts from, one token or two, is none of it."""
    for start in ((0,), (0, 3)):
        one = Record("a", start, (4, 5, 6), source=(7, 1, 2), token_probs=(1e-9, 1e-9, 1e-9))
        recording = Recording((one,), SIZE, params={"temperature": 1.0})
        model = SampledReplayModel(DRAFT, recording)
        for place, token in enumerate(one.output):
            scores = torch.zeros(SIZE)
            model._choose(scores, 0, 3 + place)
            assert int(scores.argmax()) == token
        for position in (2, 6):
            model._choose(scores := torch.zeros(SIZE), 0, position)
            assert not scores.any(), "nothing is known there"


def test_sampled_recordings_that_hold_too_little(sampled: Recording) -> None:
    made = SAMPLING["model"]
    bare = dataclasses.replace(sampled, records=(dataclasses.replace(sampled.records[0], token_probs=None),))
    refuses(lambda: replayed(bare, made()), "recording")
    assert replay(bare, MaxGram(), ConstantLength(4)).stats.num_tokens == 30, "n-gram drafters need none"
    penalised = dataclasses.replace(sampled, params={**sampled.params, "presence_penalty": 1.0})
    refuses(lambda: replayed(penalised, made()), "draft")
    refuses(lambda: replayed(sampled, CrossTokenizerDrafter(DRAFT, SIZE, Renumbered(SIZE))), "draft")
    refuses(lambda: replayed(sampled, made(), rule=make_rule("coupled")), "rule", "coupled")
    assert set(coupled.PROBABILITY_FIELDS) == {"temperature", "top_k", "top_p", "min_p"}
