from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foresay.decoding import devices
from foresay.decoding.acceptance import make_rule
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.engine import Engine
from foresay.engine.guard import MAX_FAILURES, PAUSE
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers.support import Always, Fake, run

VOCAB = 7
PROMPTS = [[1, 2], [3], [4, 5, 6]]
# rows end at different times, so that `rearrange` is called
LENGTHS = [4, 9, 14]
GREEDY = [SamplingParams(max_new_tokens=n) for n in LENGTHS]
SAMPLED = [SamplingParams(max_new_tokens=n, temperature=1.0, seed=n) for n in LENGTHS]
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def target() -> TableModel:
    return TableModel.random(VOCAB, seed=4, concentration=0.3)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class RaisesIn(Fake):
    """Drafts zeros, and raises at one call of one method."""

    def __init__(self, method: str, at: int, error: Exception) -> None:
        self.left, self.calls = at, 0
        inner = getattr(self, method)

        def failing(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise error
            return inner(*args)

        setattr(self, method, failing)

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        self.calls += 1
        return [0] * budget


@pytest.mark.parametrize("method", ["admit", "propose", "observe", "rearrange"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("no room"), KeyError(3)], ids=repr)
def test_a_drafter_that_raises_changes_nothing(
    method: str, at: int, error: Exception, target: TableModel, caplog: pytest.LogCaptureFixture
) -> None:
    # the last prompt is admitted in mid-run, so that `admit` has a second call
    plain, _, _ = run(target, PROMPTS, GREEDY, max_batch_size=2)
    drafter = RaisesIn(method, at, error)
    outputs, steps, engine = run(target, PROMPTS, GREEDY, drafter=drafter, max_batch_size=2)
    assert outputs == plain
    assert 1 <= engine.draft_failures <= 3, "tried again when a row joins, three times at most"
    assert engine.drafter is not None and engine.drafter.last_error is error
    message = f"the drafter failed ({type(error).__name__}: {error}); decoding continues without it"
    assert warnings_of(caplog) == [message]
    assert steps[-1].num_drafted == 0, "the rest is plain decoding"


def test_a_sound_drafter_is_neither_counted_nor_logged(target: TableModel, caplog: pytest.LogCaptureFixture) -> None:
    plain, _, _ = run(target, PROMPTS, GREEDY)
    outputs, steps, engine = run(target, PROMPTS, GREEDY, drafter=Always(plain), join_later=1)
    assert outputs == plain
    assert (engine.draft_failures, warnings_of(caplog)) == (0, [])
    assert any(step.num_accepted for step in steps)


def test_a_drafter_that_cannot_be_reset_changes_nothing(target: TableModel, caplog: pytest.LogCaptureFixture) -> None:
    plain, _, _ = run(target, PROMPTS, GREEDY)
    outputs, steps, engine = run(target, PROMPTS, GREEDY, drafter=RaisesIn("reset", 0, RuntimeError("x")))
    assert outputs == plain
    assert engine.draft_failures == 3, "when the engine was made, when the first batch began, and when its rows joined"
    assert len(warnings_of(caplog)) == 1
    assert not any(step.num_drafted for step in steps)


class Proposes(Fake):
    """Hands in a fixed answer, whatever the call."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.calls = make, 0

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        self.calls += 1
        out: Proposal = self.make(len(rows))
        return out


def tokens(batch: int, width: int = 2, value: int = 0) -> torch.Tensor:
    return torch.full((batch, width), value, dtype=torch.int64)


def distributions(count: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.full((count, vocab), 1 / vocab)


def first_sampled(batch: int) -> torch.Tensor:
    """distribution_index: the first column was sampled from distribution i, the second is a point mass."""
    return torch.tensor([[i, -1] for i in range(batch)])


BAD: dict[str, Callable[[int], Any]] = {
    "more than the budget": lambda b: Proposal(tokens(b, 9), [9] * b),
    "more than its own width": lambda b: Proposal(tokens(b, 2), [3] * b),
    "a negative count": lambda b: Proposal(tokens(b), [2] * (b - 1) + [-1]),
    "too few counts": lambda b: Proposal(tokens(b), [2] * (b - 1)),
    "too few rows": lambda b: Proposal(tokens(b - 1), [2] * (b - 1)),
    "too many rows": lambda b: Proposal(tokens(b + 1), [2] * (b + 1)),
    "an id past the vocabulary": lambda b: Proposal(tokens(b, value=VOCAB), [2] * b),
    "a negative id": lambda b: Proposal(tokens(b, value=-1), [2] * b),
    "a row of ids": lambda b: Proposal(tokens(b)[:, 0], [1] * b),
    "a third dimension": lambda b: Proposal(tokens(b)[..., None], [2] * b),
    "ids that are floats": lambda b: Proposal(tokens(b).float(), [2] * b),
    "ids in a list": lambda b: Proposal([[0, 0]] * b, [2] * b),  # type: ignore[arg-type]
    "counts that are floats": lambda b: Proposal(tokens(b), [1.5] * b),  # type: ignore[list-item]
    "nothing": lambda b: None,
    "an id past the vocabulary, with distributions": lambda b: Proposal(
        tokens(b, value=VOCAB), [2] * b, distributions(b), first_sampled(b)
    ),
    "a negative id, with distributions": lambda b: Proposal(
        tokens(b, value=-1), [2] * b, distributions(b), first_sampled(b)
    ),
    "distributions of a wider vocabulary": lambda b: Proposal(
        tokens(b), [2] * b, distributions(b, VOCAB + 2), first_sampled(b)
    ),
    "distributions of a narrower vocabulary": lambda b: Proposal(
        tokens(b), [2] * b, distributions(b, VOCAB - 2), first_sampled(b)
    ),
    "an index past the distributions": lambda b: Proposal(tokens(b), [2] * b, distributions(1), first_sampled(b) + 1),
    "an index of another width": lambda b: Proposal(tokens(b), [2] * b, distributions(b), first_sampled(b)[:, :1]),
    "an index of another batch": lambda b: Proposal(tokens(b), [2] * b, distributions(b), first_sampled(b + 1)),
}


@BOTH
@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_a_malformed_proposal_changes_nothing(
    make: Callable[[int], Any], params: list[SamplingParams], target: TableModel, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _, _ = run(target, PROMPTS, params, drafter=Proposes(lambda b: Proposal.empty(b, torch.device("cpu"))))
    drafter = Proposes(make)
    outputs, steps, engine = run(target, PROMPTS, params, drafter=drafter)
    assert outputs == plain
    drafted = [step.num_drafted for step in steps]
    assert not any(drafted[len(PROMPTS) :]), "one proposal was drafted"
    assert any(drafted) == (
        make in (BAD["more than the budget"], BAD["more than its own width"], BAD["a negative count"])
    )
    assert (drafter.calls, engine.draft_failures, len(warnings_of(caplog))) == (1, 1, 1)


@BOTH
@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_a_malformed_proposal_on_a_device_changes_nothing(
    make: Callable[[int], Any],
    params: list[SamplingParams],
    target: TableModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the defect is known after the step's pass: the failure is counted and logged then."""
    plain, _, _ = run(target, PROMPTS, params, drafter=Proposes(lambda b: Proposal.empty(b, torch.device("cpu"))))
    monkeypatch.setattr(devices, "is_remote", lambda device: True)
    drafter = Proposes(make)
    outputs, steps, engine = run(target, PROMPTS, params, drafter=drafter)
    assert outputs == plain and (drafter.calls, engine.draft_failures, len(warnings_of(caplog))) == (1, 1, 1)
    assert any(step.draft_error for step in steps[: len(PROMPTS)])


class Sound(Fake):
    """The same kind of proposal, well-formed: one sampled token and one point mass, as far as the budget goes."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        counts = [min(2, n) for n in budget]
        return Proposal(tokens(len(rows)), counts, distributions(len(rows)), first_sampled(len(rows)))


@BOTH
def test_a_well_formed_proposal_with_laws_is_taken(
    params: list[SamplingParams], target: TableModel, caplog: pytest.LogCaptureFixture
) -> None:
    _, steps, engine = run(target, PROMPTS, params, drafter=Sound())
    assert (engine.draft_failures, warnings_of(caplog)) == (0, [])
    assert max(step.num_drafted for step in steps) == 2


def test_columns_that_no_row_uses_are_trimmed(target: TableModel) -> None:
    plain, _, _ = run(target, PROMPTS, GREEDY)

    class Wide(Always):
        def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
            inner = super().propose(rows, budget, policy)
            pads = torch.full((len(rows), 5), VOCAB + 99)
            return Proposal(torch.cat([inner.token_ids, pads], 1), inner.num_tokens)

    outputs, steps, engine = run(target, PROMPTS, GREEDY, drafter=Wide(plain))
    assert outputs == plain
    assert engine.draft_failures == 0
    assert any(step.num_accepted for step in steps)


def decode(engine: Engine) -> list[int]:
    """One prompt through an engine that has served others."""
    engine.submit([1], SamplingParams(max_new_tokens=6))
    out: list[int] = []
    while engine.has_work:
        out += [token for step in engine.step() for token in step.token_ids]
    return out


def engine_with(target: TableModel, drafter: Any) -> Engine:
    return Engine(target, drafter, make_rule("speculative"), ConstantLength(3))


def test_a_fresh_batch_tries_again_until_it_failed_too_often(
    target: TableModel, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(batch: int) -> Proposal:
        raise RuntimeError("again")

    drafter = Proposes(broken)
    engine, plain = engine_with(target, drafter), decode(engine_with(target, None))
    for batch in range(1, MAX_FAILURES + 3):
        assert decode(engine) == plain
        assert drafter.calls == engine.draft_failures == min(batch, MAX_FAILURES)
    assert len(warnings_of(caplog)) == 1
    assert engine.drafter is not None and not engine.drafter.active


def test_one_failure_ends_drafting_for_its_batch_only(target: TableModel) -> None:
    drafter = RaisesIn("propose", 0, RuntimeError("once"))
    engine = engine_with(target, drafter)
    decode(engine)
    assert drafter.calls == 0
    drafter.left = 99
    decode(engine)
    assert drafter.calls > 0
    assert engine.draft_failures == 1


def test_what_is_no_failure_of_the_drafter_is_not_caught(target: TableModel) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(target, [[1]], GREEDY[:1], drafter=RaisesIn("propose", 0, KeyboardInterrupt()))  # type: ignore[arg-type]


def test_a_drafter_that_exits_changes_nothing(target: TableModel) -> None:
    plain, _, _ = run(target, PROMPTS, GREEDY)
    outputs, _, engine = run(target, PROMPTS, GREEDY, drafter=RaisesIn("propose", 1, SystemExit(3)))  # type: ignore[arg-type]
    assert outputs == plain and engine.draft_failures == 1


# -- failures are forgiven -----------------------------------------------------------------------------------------------


class Flaky(Fake):
    """Drafts zeros; raises in the given calls."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.calls, self.admitted = bad, 0, 0

    def admit(self, rows: Rows, first: int) -> None:
        self.admitted = len(rows)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        self.calls += 1
        if self.calls in self.bad:
            raise RuntimeError(f"call {self.calls}")
        return super().propose(rows, budget, policy)

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        return [0] * budget


def test_drafting_goes_on_after_a_pause_in_one_batch(target: TableModel) -> None:
    drafter = Flaky({2})
    _, steps, engine = run(target, [[1], [2]], SamplingParams(max_new_tokens=200), drafter=drafter, gamma=2)
    assert engine.draft_failures == 1 and drafter.admitted == 2
    drafted = [step.num_drafted > 0 for step in steps if step.request_id == 0]
    assert drafted[0] and not any(drafted[1 : PAUSE + 1]) and any(drafted[PAUSE + 1 : PAUSE + 4])


def test_pauses_double_and_failures_are_forgiven(target: TableModel) -> None:
    drafter = Flaky(set(range(1, 6)))
    params = SamplingParams(max_new_tokens=3000)
    _, steps, engine = run(target, [[1]], params, drafter=drafter, gamma=1)
    assert engine.draft_failures == 5
    tried = [i for i, step in enumerate(steps) if step.draft_error is not None and "paused" not in step.draft_error]
    assert [b - a for a, b in itertools.pairwise(tried)] == [PAUSE << n for n in range(4)]
    assert engine.drafter is not None and engine.drafter.active
    assert engine.drafter._pauses.failures < 5, "drafts without a failure make up for it"


def test_later_requests_are_drafted_for_although_earlier_ones_failed(target: TableModel) -> None:
    """Three failures once ended drafting for good, without a word."""
    drafter = Flaky({1, 2, 3})
    engine = engine_with(target, drafter)
    for _ in range(3):
        decode(engine)
    assert engine.draft_failures == 3
    engine.submit([1], SamplingParams(max_new_tokens=400))
    steps = [step for _ in iter(lambda: engine.has_work, False) for step in engine.step()]
    assert any(step.num_drafted for step in steps)


def test_a_step_tells_its_own_failure_and_no_older_one(target: TableModel) -> None:
    drafter = Flaky({1})
    engine = engine_with(target, drafter)
    errors = []
    for _ in range(2):
        engine.submit([1], SamplingParams(max_new_tokens=6))
        errors.append([step.draft_error for _ in iter(lambda: engine.has_work, False) for step in engine.step()])
    assert errors[0][0] == "RuntimeError: call 1" and not any(errors[1])


def test_a_step_of_a_pause_tells_why(target: TableModel) -> None:
    engine = engine_with(target, Flaky(set(range(1, 99))))
    for _ in range(MAX_FAILURES):
        decode(engine)
    engine.submit([1], SamplingParams(max_new_tokens=4))
    told = [step.draft_error for _ in iter(lambda: engine.has_work, False) for step in engine.step()]
    assert told[0] == "drafting is paused after failures of the drafter, the last RuntimeError: call 3"


def test_an_interrupt_is_no_failure_of_a_draft_under_way() -> None:
    builder = ProposalBuilder(1, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), builder.keeping():
        raise KeyboardInterrupt
    assert builder.failure is None
