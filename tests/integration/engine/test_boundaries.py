"""Stops inside a block, budgets inside a block, full contexts, K = 0, cancellation and abandoned iterators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import sleep

import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import FinishReason, Origin
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import KVCache, LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import Stopping
from foresay.drafters import ModelDrafter, PromptLookup
from foresay.engine import Engine, Stats
from foresay.errors import ContextLengthError, PromptError
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.models.huggingface.causal import CausalModel
from foresay.models.table import TableModel
from helpers.families import VOCAB, make
from helpers.making import By
from helpers.refusals import refused
from helpers.support import Always, Never, Sometimes, run

SIZE = 11
TARGET = TableModel.random(SIZE, seed=3, concentration=0.5)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]


def greedy(new: int = 30, **changes: object) -> list[list[int]]:
    return run(TARGET, PROMPTS, SamplingParams.of(SamplingParams(max_new_tokens=new), **changes), gamma=0)[0]


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_a_stop_token_inside_an_accepted_block_ends_the_output_there(gamma: int) -> None:
    plain = greedy()
    stop = plain[0][5]
    wanted = [out[: out.index(stop) + 1] if stop in out else out for out in plain]
    ours, steps, engine = run(
        TARGET, PROMPTS, SamplingParams(max_new_tokens=30, stop_token_ids=(stop,)), drafter=Always(plain), gamma=gamma
    )
    assert ours == wanted
    assert engine.draft_failures == 0
    last = next(s for s in steps if s.request_id == 0 and s.finish_reason is not None)
    assert last.finish_reason is FinishReason.STOP
    assert sum(len(s.token_ids) for s in steps) == sum(map(len, wanted))


def test_ignore_eos_and_min_new_tokens() -> None:
    plain = greedy()
    first = next(i for i, token in enumerate(plain[0]) if i > 0 and token not in plain[0][:i])
    eos = frozenset([plain[0][first]])
    stopped = run(TARGET, PROMPTS[:1], SamplingParams(max_new_tokens=30), eos=eos, drafter=Always(plain))[0][0]
    assert stopped == plain[0][: first + 1]
    through = run(
        TARGET, PROMPTS[:1], SamplingParams(max_new_tokens=30, ignore_eos=True), eos=eos, drafter=Always(plain)
    )[0]
    assert through == plain[:1]
    later = SamplingParams(max_new_tokens=30, min_new_tokens=9)
    a = run(TARGET, PROMPTS[:1], later, eos=eos, gamma=0)[0][0]
    b = run(TARGET, PROMPTS[:1], later, eos=eos, drafter=Sometimes([a], SIZE))[0][0]
    assert a == b
    assert not set(a[:9]) & eos


@pytest.mark.parametrize("new", [1, 2, 5, 6, 7])
def test_the_budget_ends_inside_a_block(new: int) -> None:
    plain = greedy()
    ours, steps, _ = run(TARGET, PROMPTS, SamplingParams(max_new_tokens=new), drafter=Always(plain), gamma=4)
    assert ours == [out[:new] for out in plain]
    assert all(s.num_drafted <= new - 1 for s in steps)
    assert {s.finish_reason for s in steps if s.finish_reason} == {FinishReason.LENGTH}


@pytest.mark.parametrize("drafter", ["always", "never", "model"])
def test_a_full_context_ends_the_output(drafter: str) -> None:
    target = TableModel(TARGET.table, max_length=12)
    plain = run(target, PROMPTS, SamplingParams(max_new_tokens=50), gamma=0)[0]
    assert [len(p) + len(o) for p, o in zip(PROMPTS, plain, strict=True)] == [12] * 4
    made = {"always": Always(plain), "never": Never(plain, SIZE), "model": ModelDrafter(target, SIZE)}[drafter]
    ours, steps, engine = run(target, PROMPTS, SamplingParams(max_new_tokens=50), drafter=made, gamma=5)
    assert ours == plain
    assert engine.draft_failures == 0
    assert any(s.num_drafted for s in steps)


def test_a_draft_with_a_shorter_context_stops_drafting() -> None:
    draft = TableModel(TARGET.table, max_length=10)
    plain = greedy()
    ours, steps, engine = run(
        TARGET, PROMPTS, SamplingParams(max_new_tokens=30), drafter=ModelDrafter(draft, SIZE), gamma=4
    )
    assert ours == plain
    assert engine.draft_failures == 0
    assert any(s.num_drafted == 0 for s in steps)
    assert any(s.num_drafted == 4 for s in steps)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom"])
def test_a_real_model_writes_up_to_its_last_position(family: str) -> None:
    """Pads past the context limit take spare slots and never reach a learned position table."""
    changes = {"n_positions": 24} if family == "gpt2" else {"max_position_embeddings": 24}
    changes = {"seq_length": 24} if family == "bloom" else changes
    model = CausalModel(make(family, **changes))
    assert model.max_length == 24
    prompts = [[5, 6, 7], [8] * 20, [9, 10, 11, 12, 13, 14, 15]]
    plain = run(model, prompts, SamplingParams(max_new_tokens=99), gamma=0)[0]
    assert [len(p) + len(o) for p, o in zip(prompts, plain, strict=True)] == [24] * 3
    ours, _, engine = run(model, prompts, SamplingParams(max_new_tokens=99), drafter=Sometimes(plain, VOCAB), gamma=6)
    assert ours == plain
    assert engine.draft_failures == 0


def test_zero_draft_tokens_is_plain_decoding() -> None:
    ours, steps, _ = run(TARGET, PROMPTS, SamplingParams(max_new_tokens=9), drafter=Always([[0]] * 4), gamma=0)
    assert ours == greedy(9)
    assert all(s.num_drafted == 0 and s.origins == (Origin.BONUS,) for s in steps)
    assert Stats.of(steps).acceptance_rate is None


def _engine(**kwargs: int) -> Engine:
    return Engine(TARGET, None, make_rule("speculative"), ConstantLength(0), **kwargs)


def test_cancelling_waiting_and_active_requests() -> None:
    engine = _engine(max_batch_size=2)
    params = SamplingParams(max_new_tokens=8)
    ids = [engine.submit(prompt, params) for prompt in PROMPTS]
    outputs: dict[int, list[int]] = {i: [] for i in ids}
    reasons = {}
    for round_ in range(100):
        if round_ == 2:
            engine.cancel(ids[0])
            engine.cancel(ids[3])
        for step in engine.step():
            outputs[step.request_id] += step.token_ids
            if step.finish_reason:
                reasons[step.request_id] = step.finish_reason
        if not engine.has_work:
            break
    plain = greedy(8)
    assert reasons[ids[0]] is FinishReason.CANCELLED
    assert reasons[ids[3]] is FinishReason.CANCELLED
    assert outputs[ids[0]] == plain[0][:2]
    assert outputs[ids[1]] == plain[1]
    assert outputs[ids[2]] == plain[2]
    assert outputs[ids[3]] == []
    engine.cancel(12345)
    assert engine.step() == []


def test_bad_requests_are_refused_before_anything_is_decoded() -> None:
    engine = _engine()
    good = SamplingParams()
    with refused("prompt", kind=PromptError):
        engine.submit([], good)
    with refused("prompt", 11, PromptError):
        engine.submit([1, 11], good)
    with refused("prompt", -1, PromptError):
        engine.submit([-1], good)
    with pytest.raises(ContextLengthError, match="has 4096 tokens; the model's context is 4096"):
        engine.submit([1] * 4096, good)
    with pytest.raises(ContextLengthError, match="min_new_tokens=300"):
        engine.submit([1] * 4000, SamplingParams(max_new_tokens=300, min_new_tokens=300))
    with refused("stop_token_ids", 99):
        engine.submit([1], SamplingParams(stop_token_ids=(99,)))
    with refused("banned_token_ids"):
        engine.submit([1], SamplingParams(banned_token_ids=tuple(range(11))))
    with refused("max_batch_size", 0):
        _engine(max_batch_size=0)
    assert not engine.has_work


def test_long_prompts_are_filled_in_chunks_while_others_decode() -> None:
    """A prompt of many chunks joins late and neither stalls the others nor changes anybody's output."""
    model = CausalModel(make("llama", max_position_embeddings=4096))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (4, 7, 1500)]
    alone = [run(model, [p], SamplingParams(max_new_tokens=12), gamma=0)[0][0] for p in prompts]
    engine = Engine(model, None, make_rule("speculative"), ConstantLength(0))
    outputs = {engine.submit(p, SamplingParams(max_new_tokens=12)): [] for p in prompts[:2]}
    engine.step()
    outputs[engine.submit(prompts[2], SamplingParams(max_new_tokens=12))] = []
    between = 0
    while engine.has_work:
        steps = engine.step()
        between += bool(steps) and not outputs[2]
        for step in steps:
            outputs[step.request_id] += step.token_ids
    assert between >= 2, "the short rows must go on while the long prompt is filled"
    assert [len(o) for o in outputs.values()] == [11, 11, 12]
    assert [o[-11:] for o in list(outputs.values())[:2]] == [a[1:] for a in alone[:2]]
    assert outputs[2] == alone[2]


def test_a_longrope_model_fills_the_context_it_is_served_to_in_a_ragged_batch() -> None:
    """Pads after a nearly full row must not make the model change every row's frequencies."""
    model = CausalModel(make("phi3_longrope"))
    assert model.max_length == 64
    prompts = [[5 + i % 40 for i in range(55)], [9, 8, 7]]
    alone = [run(model, [p], SamplingParams(max_new_tokens=99), gamma=0)[0][0] for p in prompts]
    ours, _, engine = run(model, prompts, SamplingParams(max_new_tokens=99), drafter=Sometimes(alone, VOCAB), gamma=8)
    assert ours == alone
    assert engine.draft_failures == 0


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_embeddings_larger_than_the_head(rule: str) -> None:
    """Ids that can be read but not written: prompts may hold them, drafts may look them up, nothing writes them."""
    reference = make("llama")
    reference.resize_token_embeddings(VOCAB + 8)
    reference.lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    model = CausalModel(reference)
    prompts = [[100, 101, 102, 100, 101], [3, 4, 5], [102, 102, 102]]
    params = [SamplingParams(max_new_tokens=12, temperature=t, seed=i) for i, t in enumerate((1.0, 0.0, 2.0))]
    for drafter in (ModelDrafter(model, model.vocab_size), PromptLookup(min_ngram=1)):
        ours, steps, engine = run(model, prompts, params, drafter=drafter, rule=rule, gamma=3)
        assert engine.draft_failures == 0
        assert all(token < VOCAB for output in ours for token in output)
        assert any(s.num_drafted for s in steps)
        assert ours[1] == run(model, prompts[1:2], params[1], gamma=0)[0][0]


def _alternating(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A grammar: the next token has the other parity. It refuses a context that it forbids."""
    tokens = ids[0].tolist()[3:]
    assert all((a - b) % 2 for a, b in pairwise(tokens)), f"queried about {tokens}, which plain decoding never reaches"
    if tokens:
        scores[:, tokens[-1] % 2 :: 2] = -torch.inf
    return scores


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_a_processor_never_sees_a_context_that_plain_decoding_cannot_reach(rule: str) -> None:
    prompts = [[1, 2, 3], [4, 4, 4], [5, 5, 6]]
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=15, temperature=temperature, seed=3, processors=(_alternating,))
        ours, steps, engine = run(TARGET, prompts, params, drafter=PromptLookup(min_ngram=1), rule=rule, gamma=5)
        assert engine.draft_failures == 0
        assert all((a - b) % 2 for out in ours for a, b in pairwise(out))
        assert any(s.num_drafted for s in steps)
        if temperature == 0 or rule == "coupled":
            assert ours == run(TARGET, prompts, params, rule=rule, gamma=0)[0]


def test_a_request_whose_processor_fails_ends_alone() -> None:
    calls = []

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(len(ids[0]))
        if len(calls) > 4:
            raise ValueError("broken")
        return scores

    engine = Engine(TARGET, ModelDrafter(TARGET, SIZE), make_rule("speculative"), ConstantLength(3))
    good = SamplingParams(max_new_tokens=20)
    outputs = {engine.submit(PROMPTS[0], good): []}
    bad = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=20, processors=(broken,)))
    outputs[engine.submit(PROMPTS[2], good)] = []
    reasons, errors = {}, {}
    while engine.has_work:
        for step in engine.step():
            outputs.setdefault(step.request_id, []).extend(step.token_ids)
            reasons[step.request_id], errors[step.request_id] = step.finish_reason, step.error
    plain = greedy(20)
    assert reasons[bad] is FinishReason.ERROR
    assert isinstance(errors[bad].__cause__, ValueError)
    assert outputs[0] == plain[0]
    assert outputs[2] == plain[2]


def test_a_draft_that_lacks_every_allowed_token_hurts_nobody() -> None:
    draft = TableModel.random(5, seed=9)
    params = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, allowed_token_ids=(7, 8))]
    prompts = [[1, 2, 3], [1, 2]]
    plain = run(TARGET, prompts, params, gamma=0)[0]
    ours, steps, engine = run(TARGET, prompts, params, drafter=ModelDrafter(draft, SIZE), gamma=3)
    assert ours == plain
    assert engine.draft_failures == 0
    assert any(s.num_drafted for s in steps if s.request_id == 0)


def test_contradictions_between_tokens_are_found_when_a_request_is_submitted() -> None:
    engine = _engine()
    with refused("allowed_token_ids"):
        engine.submit([1], SamplingParams(allowed_token_ids=(3,), stop_token_ids=(3,), min_new_tokens=2))
    with refused("prompt", kind=PromptError):
        engine.submit([1.7, 2.0], SamplingParams())  # type: ignore[list-item]


def test_a_policy_may_stop_rows_while_they_are_drafted() -> None:
    """Rows stop at different positions, also for good, and ride on as pads; the output stays what it is."""

    class Uneven(ConstantLength):
        def stopping(self, rows: Rows) -> Stopping:
            return By(lambda step: torch.arange(len(step.token_ids)) > step.index, rows)

    plain = greedy()
    ours, steps, engine = run(
        TARGET,
        PROMPTS,
        SamplingParams(max_new_tokens=30),
        drafter=ModelDrafter(TARGET, SIZE),
        policy=Uneven(6),
    )
    assert ours == plain
    assert engine.draft_failures == 0
    assert {s.num_drafted for s in steps if s.batch_size == 4} >= {1, 2, 3, 4}


class _Slow(Never):
    """Always wrong, and slower than the target."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        sleep(0.02)
        return super().propose(rows, budget, policy)


class _Costly(CausalModel):
    """Each token of a pass takes a millisecond, whatever else the machine does."""

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        sleep(0.001 * sum(model_input.num_tokens))
        return super().forward(model_input, cache)


@pytest.mark.parametrize("drafter", [Never, _Slow])
def test_the_throughput_policy_changes_no_token_and_stops_drafting(drafter: type[Never]) -> None:
    target, params = _Costly(make("llama")), SamplingParams(max_new_tokens=60)
    prompts = [[5, 6, 7], [8] * 20, [9, 4]]
    plain = run(target, prompts, params, gamma=0)[0]
    ours, steps, engine = run(target, prompts, params, drafter=drafter(plain, VOCAB), policy=ThroughputLength())
    assert ours == plain
    assert engine.draft_failures == 0
    assert any(s.num_drafted for s in steps), "it never tried"
    assert sum(s.num_drafted == 0 for s in steps) > 0.5 * len(steps)


def test_an_admission_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows at work decode on, and the new one is admitted when there is room again."""
    wanted = greedy()
    engine = _engine()
    outputs: dict[int, list[int]] = {engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=30)): []}
    intact, refuse = engine.target.admit, [True]

    def admit(rows: Rows, first: int, cache: KVCache) -> None:
        intact(rows, first, cache)
        if first and refuse.pop():
            raise MemoryError("no room for another row")

    monkeypatch.setattr(engine.target, "admit", admit)

    def advance() -> None:
        for step in engine.step():
            outputs[step.request_id] += step.token_ids

    advance()
    outputs[engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=30))] = []
    refuse[:] = [False, True]
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.num_active == 1 and len(engine._cache.lengths) == 1
    while engine.has_work:
        advance()
    assert [outputs[i] for i in sorted(outputs)] == wanted[:2]
