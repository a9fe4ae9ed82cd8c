from __future__ import annotations

from collections.abc import Sequence
from time import sleep
from typing import Any, ClassVar

import pytest
import torch

from foresay import ConstantLength, Proposal, Row, Rows, SamplingParams, Verification
from foresay.decoding.acceptance import make_rule
from foresay.decoding.clock import Clock, one_time
from foresay.decoding.outcome import FinishReason, Origin
from foresay.decoding.prefill import prefill_chunk
from foresay.decoding.protocols import ModelOutput, Move
from foresay.decoding.step import cut, propose, step
from foresay.models.table import TableCache, TableModel
from helpers.making import make_row
from helpers.support import Always, Fake, run

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
D, R, B = Origin.DRAFT, Origin.RESIDUAL, Origin.BONUS
EOS = frozenset({9})


@pytest.mark.parametrize(
    ("settings", "block", "kept", "reason"),
    [
        ({"eos": EOS}, [1, 2, 3, 4], 4, None),
        ({"eos": EOS}, [9, 2, 3], 1, STOP),
        ({"eos": EOS}, [1, 2, 9], 3, STOP),
        ({"eos": EOS}, [1, 9, 9, 2], 2, STOP),
        ({"stop_token_ids": (9,)}, [1, 9, 2], 2, STOP),
        ({"eos": EOS, "ignore_eos": True}, [1, 9, 2], 3, None),
        ({"limit": 2}, [1, 2, 3], 1, LENGTH),
        ({"limit": 4}, [1, 2, 3], 3, LENGTH),
        ({"limit": 5}, [1, 2, 3], 3, None),
        ({"limit": 9, "prompt": [5], "output": [5] * 6}, [1, 2, 3], 2, LENGTH),
        ({"limit": 3, "eos": EOS}, [1, 9, 2], 2, STOP),
        ({"limit": 3, "eos": EOS}, [1, 2, 9], 2, LENGTH),
        # as the mask has it: a stop token may be written once `min_new_tokens` tokens stand before it
        ({"eos": EOS, "min_new_tokens": 2}, [1, 9, 2, 9, 3], 4, STOP),
        ({"eos": EOS, "min_new_tokens": 2, "output": [5]}, [1, 9, 2], 2, STOP),
        ({"eos": EOS, "min_new_tokens": 2, "output": [5, 5]}, [9, 1], 1, STOP),
    ],
)
def test_a_block_ends_at_the_first_stop(
    settings: dict[str, Any], block: list[int], kept: int, reason: FinishReason | None
) -> None:
    assert cut(make_row(**settings), block) == (block[:kept], reason)


class StopAt:
    """A stop condition that keeps state, as stop strings do."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.seen: list[int] = []

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        before = len(self.seen)
        self.seen += token_ids
        return self.total - before if before < self.total <= len(self.seen) else None


@pytest.mark.parametrize(
    ("total", "settings", "kept", "reason", "seen"),
    [
        (1, {}, 1, STOP, 4),
        (4, {}, 4, STOP, 4),
        (2, {"eos": EOS}, 2, STOP, 3),
        (4, {"eos": EOS}, 3, STOP, 3),
        (4, {"limit": 3}, 2, LENGTH, 2),
        (2, {"limit": 3}, 2, STOP, 2),
    ],
)
def test_a_stop_condition_sees_only_what_may_be_committed(
    total: int, settings: dict[str, Any], kept: int, reason: FinishReason, seen: int
) -> None:
    block, condition = [1, 2, 9, 3], StopAt(total)
    assert cut(make_row(stop=condition, **settings), block) == (block[:kept], reason)
    assert condition.seen == block[:seen]


def test_a_stop_condition_sees_every_committed_token_once() -> None:
    condition = StopAt(7)
    row = make_row(stop=condition)
    for block in ([1, 2], [3], [4, 5, 6]):
        assert cut(row, block) == (block, None)
        row.extend(block)
    assert condition.seen == [1, 2, 3, 4, 5, 6] and cut(row, [7, 8]) == ([7], STOP)


class Budgets(Fake):
    """Drafts nothing and records what it may."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def propose(self, rows: Rows, budget: Sequence[int], policy: object) -> Proposal:
        self.given.append(list(budget))
        return Proposal.empty(len(rows), torch.device("cpu"))


TARGET = TableModel.random(7, seed=2, concentration=0.3)


def test_the_budget_leaves_room_for_the_targets_own_token() -> None:
    """And a drafter without one is not called."""
    drafter, cache = Budgets(), TARGET.new_cache()
    propose(
        Rows([make_row(limit=1 + room) for room in (9, 5, 4, 2, 1)]),
        TARGET,
        cache,
        drafter,
        ConstantLength(4),
        exact=True,
    )
    for limit, made, length in ((2, drafter, 4), (9, drafter, 0), (9, None, 4)):
        rows = Rows([make_row(limit=limit)])
        assert propose(rows, TARGET, cache, made, ConstantLength(length), exact=True).width == 0
    assert drafter.given == [[4, 4, 3, 1, 0]]


def ready(rows: Rows) -> TableCache:
    """A cache that lacks exactly each row's last token."""
    cache = TARGET.new_cache()
    TARGET.admit(rows, 0, cache)
    while prefill_chunk(TARGET, cache, rows, 0):
        pass
    return cache


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    out = list(prompt)
    for _ in range(count):
        out.append(int(TARGET.distribution(out).argmax()))
    return out[len(prompt) :]


class Watching(Always):
    """Records the state it observes: the verification and the rows after the commit."""

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        assert verification is not None and target is not None
        self.noted = verification.num_accepted.tolist(), [row.size for row in rows]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        raise AssertionError("a step moves no rows")


def test_one_step_commits_and_rewinds() -> None:
    """Drafts that are right, wrong later, wrong at once, and none: no padded column is committed."""
    prompts, counts = [[1, 2, 3], [4], [2, 2], [5]], [4, 2, 1, 1]
    truth = [greedy(prompt, 6) for prompt in prompts]
    drafts: list[list[int]] = [truth[0], [*truth[1]], [*truth[2]], []]
    drafts[1][1], drafts[2][0] = (truth[1][1] + 1) % 7, (truth[2][0] + 1) % 7
    rows = Rows([Row(i, p, make_row().params, limit=99) for i, p in enumerate(prompts)])
    cache, drafter = ready(rows), Watching(drafts)
    steps = step(rows, TARGET, cache, drafter, make_rule("speculative"), ConstantLength(3))
    assert [list(one.token_ids) for one in steps] == [out[:n] for out, n in zip(truth, counts, strict=True)]
    assert [one.origins for one in steps] == [(D, D, D, B), (D, R), (R,), (B,)]
    numbers = [(one.num_drafted, one.num_accepted, one.num_tested) for one in steps]
    assert numbers == [(3, 3, 3), (3, 1, 2), (3, 0, 1), (0, 0, 0)]
    assert [(one.request_id, one.batch_size, one.finish_reason) for one in steps] == [(i, 4, None) for i in range(4)]
    assert cache.lengths == [row.size - 1 for row in rows] == [6, 2, 2, 1]
    assert drafter.noted == ([3, 1, 0, 0], [7, 3, 3, 2])
    assert [row.tokens.tolist() for row in rows] == [
        p + out[:n] for p, out, n in zip(prompts, truth, counts, strict=True)
    ]


def test_logprobs_are_of_the_raw_logits() -> None:
    for wanted, given in ((None, 0), (0, 0), (2, 2), (50, 7)):
        params = SamplingParams(max_new_tokens=6, logprobs=wanted, temperature=0.5, seed=1, banned_token_ids=(0,))
        [output], steps, _ = run(TARGET, [[1, 2]], params, drafter=Always([greedy([1, 2], 6)]))
        if wanted is None:
            assert not any(one.logprobs for one in steps)
            continue
        found = [entry for one in steps for entry in one.logprobs or ()]
        for i, (token, entry) in enumerate(zip(output, found, strict=True)):
            expected = TARGET.distribution([1, 2, *output[:i]]).log()
            best = expected.argsort(descending=True)[:given].tolist()
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
            assert [one for one, _ in entry.top] == best
            assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_a_step_that_stops_inside_the_block_rewinds_to_the_stop() -> None:
    truth, row = greedy([1, 2], 6), make_row([1, 2], stop=StopAt(2))
    cache = ready(Rows([row]))
    [only] = step(Rows([row]), TARGET, cache, Always([truth]), make_rule("speculative"), ConstantLength(4))
    assert (list(only.token_ids), only.origins, only.finish_reason) == (truth[:2], (D, D), STOP)
    assert (only.num_drafted, only.num_accepted, row.num_new, cache.lengths) == (2, 2, 2, [3])


# -- times -------------------------------------------------------------------------------------------------------------


def test_parts_follow_one_another() -> None:
    clock = Clock(torch.device("cpu"))
    sleep(0.02)
    clock.mark()
    clock.mark()
    first, second = clock.parts()
    assert first >= 0.02 > second >= 0 and clock.total() >= first


def test_what_happens_once_is_not_counted() -> None:
    """Nor is a capture that fails."""
    clock = Clock(torch.device("cpu"))
    with one_time():
        sleep(0.05)
    with pytest.raises(ValueError, match="length must be non-negative"), one_time():
        sleep(sleep(0.05) or -1)
    clock.mark()
    assert clock.parts()[0] < 0.05 and clock.total() < 0.05


class _Event:
    """An event of a GPU, whose times are given."""

    made: ClassVar[list[_Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = (0.0, 30.0, 70.0)[len(self.made)]
        self.made.append(self)

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, other: _Event) -> float:
        assert other.reached
        return other.at - self.at


def test_on_a_gpu_parts_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = Clock(torch.device("cuda"))
    clock.mark()
    clock.mark()
    assert clock.parts() == pytest.approx([0.03, 0.04])
