from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest
import torch

from foresay import Engine, LengthPolicy, Proposal, Rows, SamplingParams, Step, TableModel
from foresay.decoding import devices
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.engine.guard import MAX_FAILURES, PAUSE
from helpers.support import Fake, Loop, run

VOCAB = 7
TARGET = TableModel.random(VOCAB, seed=4, concentration=0.3)
PROMPTS = [[1, 2], [3], [4, 5, 6]]
# rows end at different times, so that `rearrange` is called
LENGTHS = [4, 9, 14]
GREEDY = [SamplingParams(max_new_tokens=n) for n in LENGTHS]
SAMPLED = [SamplingParams(max_new_tokens=n, temperature=1.0, seed=n) for n in LENGTHS]
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Failing(Fake):
    """Drafts zeros, and raises at some calls of one method."""

    def __init__(self, bad: Container[int], method: str = "propose", error: BaseException | None = None) -> None:
        """bad: numbers of the calls, from 1. error: None for one that names the call."""
        self.calls = self.admitted = 0
        inner = getattr(self, method)

        def failing(*given: Any) -> Any:
            self.calls += 1
            if self.calls in bad:
                raise error or RuntimeError(f"call {self.calls}")
            return inner(*given)

        setattr(self, method, failing)

    def admit(self, rows: Rows, first: int) -> None:
        self.admitted = len(rows)

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        return [0] * budget


@pytest.mark.parametrize(
    ("method", "at", "error"),
    [
        ("admit", 0, RuntimeError("broken")),
        ("admit", 1, KeyError(3)),
        ("propose", 0, torch.OutOfMemoryError("no room")),
        ("propose", 1, SystemExit(3)),
        ("observe", 0, KeyError(3)),
        ("observe", 1, RuntimeError("broken")),
        ("rearrange", 0, RuntimeError("broken")),
        ("rearrange", 1, torch.OutOfMemoryError("no room")),
        ("reset", 0, RuntimeError("broken")),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, BaseException) else str(one),
)
def test_a_drafter_that_raises_changes_nothing(
    method: str, at: int, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    # the last prompt is admitted in mid-run, so that `admit` has a second call
    plain, _, _ = run(TARGET, PROMPTS, GREEDY, max_batch_size=2)
    drafter = Failing(range(at + 1, 1000), method, error)
    outputs, steps, engine = run(TARGET, PROMPTS, GREEDY, drafter=drafter, max_batch_size=2)
    assert outputs == plain
    assert 1 <= engine.draft_failures <= 4, "tried again when a row joins, and at a reset"
    assert engine.drafter is not None and engine.drafter.last_error is error
    message = f"the drafter failed ({type(error).__name__}: {error}); decoding continues without it"
    assert warnings_of(caplog) == [message]
    assert steps[-1].num_drafted == 0, "the rest is plain decoding"


def test_an_interrupt_is_no_failure_of_the_drafter() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(TARGET, [[1]], GREEDY[:1], drafter=Failing([1], error=KeyboardInterrupt()))
    builder = ProposalBuilder(1, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), builder.keeping():
        raise KeyboardInterrupt
    assert builder.failure is None


class Proposes(Fake):
    """Hands in a fixed answer, whatever the call."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.calls = make, 0

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        self.calls += 1
        out: Proposal = self.make(len(rows))
        return out


def sampled(batch: int, token: int, count: int = 2) -> Proposal:
    """Two tokens of each row: the first one was sampled from a distribution of its own, the second is a point mass."""
    index = torch.tensor([[i, -1] for i in range(batch)])
    return Proposal(torch.full((batch, 2), token), [count] * batch, torch.full((batch, VOCAB), 1 / VOCAB), index)


BAD: dict[str, tuple[Callable[[int], Any], bool]] = {
    "a negative count": (lambda b: Proposal(torch.zeros(b, 2, dtype=torch.int64), [2] * (b - 1) + [-1]), True),
    "an id past the vocabulary": (lambda b: sampled(b, VOCAB), False),
    "too few rows": (lambda b: sampled(b - 1, 0), False),
    "nothing": (lambda b: None, False),
}
"""With whether a part of it is drafted. Others are in unit/decoding/test_proposal_checks.py."""


@BOTH
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_malformed_proposal_changes_nothing(
    name: str,
    params: list[SamplingParams],
    on_device: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device the defect is known after the step's pass: the failure is counted and logged then."""
    plain, _, _ = run(TARGET, PROMPTS, params, drafter=Proposes(lambda b: Proposal.empty(b, torch.device("cpu"))))
    if on_device:
        monkeypatch.setattr(devices, "is_remote", lambda device: True)
    make, is_drafted = BAD[name]
    drafter = Proposes(make)
    outputs, steps, engine = run(TARGET, PROMPTS, params, drafter=drafter)
    assert outputs == plain and (drafter.calls, engine.draft_failures, len(warnings_of(caplog))) == (1, 1, 1)
    first, later = steps[: len(PROMPTS)], steps[len(PROMPTS) :]
    assert any(step.draft_error for step in first) and not any(step.num_drafted for step in later)
    assert on_device or any(step.num_drafted for step in first) == is_drafted


@BOTH
def test_a_sound_drafter_is_neither_counted_nor_logged(
    params: list[SamplingParams], caplog: pytest.LogCaptureFixture
) -> None:
    """Columns that no row uses are trimmed."""

    class Sound(Fake):
        def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
            wide = torch.cat([torch.zeros(len(rows), 2), torch.full((len(rows), 5), VOCAB + 99)], 1).long()
            index = torch.tensor([[i, *[-1] * 6] for i in range(len(rows))])
            probs = torch.full((len(rows), VOCAB), 1 / VOCAB)
            return Proposal(wide, [min(2, n) for n in budget], probs, index)

    _, steps, engine = run(TARGET, PROMPTS, params, drafter=Sound(), join_later=1)
    assert (engine.draft_failures, warnings_of(caplog)) == (0, [])
    assert max(step.num_drafted for step in steps) == 2


# -- failures are forgiven -----------------------------------------------------------------------------------------------


def engine_with(drafter: Any) -> Engine:
    return Loop(TARGET, drafter=drafter, gamma=3).engine


def decode(engine: Engine, new: int = 6) -> list[Step]:
    """Steps of one prompt through an engine that has served others."""
    engine.submit([1], SamplingParams(max_new_tokens=new))
    return [step for _ in iter(lambda: engine.has_work, False) for step in engine.step()]


def test_a_fresh_batch_tries_again_until_it_failed_too_often(caplog: pytest.LogCaptureFixture) -> None:
    """Steps report their own failure, and then the pause. Later requests are drafted for, which was once lost for good."""
    drafter = Failing(range(1, MAX_FAILURES + 1))
    engine, plain = engine_with(drafter), [step.token_ids for step in decode(engine_with(None))]
    for batch in range(1, MAX_FAILURES + 3):
        steps = decode(engine)
        assert sum((one.token_ids for one in steps), ()) == sum(plain, ())
        assert drafter.calls == engine.draft_failures == min(batch, MAX_FAILURES)
        assert (steps[0].draft_error == f"RuntimeError: call {batch}") == (batch <= MAX_FAILURES)
    reason = "drafting is paused after failures of the drafter, the last RuntimeError: call 3"
    assert steps[0].draft_error == reason and len(warnings_of(caplog)) == 1
    assert engine.drafter is not None and not engine.drafter.active
    assert any(step.num_drafted for step in decode(engine, 400))


def test_drafting_goes_on_after_a_pause_in_one_batch() -> None:
    drafter = Failing([2])
    _, steps, engine = run(TARGET, [[1], [2]], SamplingParams(max_new_tokens=200), drafter=drafter, gamma=2)
    assert engine.draft_failures == 1 and drafter.admitted == 2
    drafted = [step.num_drafted > 0 for step in steps if step.request_id == 0]
    assert drafted[0] and not any(drafted[1 : PAUSE + 1]) and any(drafted[PAUSE + 1 : PAUSE + 4])


def test_pauses_double_and_failures_are_forgiven() -> None:
    params = SamplingParams(max_new_tokens=2000)
    _, steps, engine = run(TARGET, [[1]], params, drafter=Failing(range(1, 6)), gamma=1)
    assert engine.draft_failures == 5
    tried = [i for i, step in enumerate(steps) if step.draft_error is not None and "paused" not in step.draft_error]
    assert [b - a for a, b in itertools.pairwise(tried)] == [PAUSE << n for n in range(4)]
    assert engine.drafter is not None and engine.drafter.active
    assert engine.drafter._pauses.failures < 5, "drafts without a failure make up for it"
