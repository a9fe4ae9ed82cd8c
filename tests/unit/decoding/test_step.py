from __future__ import annotations

from collections.abc import Sequence
from time import sleep
from typing import Any, ClassVar

import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.clock import Clock, one_time
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import FinishReason, Origin
from foresay.decoding.prefill import prefill_chunk
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import ModelOutput, Move
from foresay.decoding.rows import Row, Rows
from foresay.decoding.step import _read, commit, cut, propose, step
from foresay.lengths import ConstantLength
from foresay.models.table import TableCache, TableModel
from helpers.making import make_row
from helpers.support import Always, Fake

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


def committed(
    rows: Rows, proposal: Proposal, accepted: Sequence[int], extra: Sequence[int], scores: torch.Tensor | None = None
) -> Any:
    """The steps of a commit, and the committed draft tokens' indices."""
    verification = Verification(torch.tensor(accepted), torch.tensor(extra), torch.tensor([n + 1 for n in accepted]))
    output, verified = (
        ModelOutput(torch.zeros(len(rows), 5, 10) if scores is None else scores),
        _read(proposal, verification),
    )
    return commit(rows, verified(), proposal, output, Distributions(torch.zeros(1, 1, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("drafted", "accepted", "written", "origins", "num_drafted", "num_tested"),
    [
        ([1, 2, 3], 3, [1, 2, 3, 4], (D, D, D, B), 3, 4),
        ([1, 2, 3], 1, [1, 4], (D, R), 3, 2),
        ([1, 2, 3], 0, [4], (R,), 3, 1),
        ([], 0, [4], (B,), 0, 1),
        ([1, 9, 3], 3, [1, 9], (D, D), 2, 2),  # nothing after a stop is counted
    ],
)
def test_origins_tell_a_rejection_from_a_full_acceptance(
    drafted: list[int], accepted: int, written: list[int], origins: object, num_drafted: int, num_tested: int
) -> None:
    row = make_row(eos=EOS)
    proposal = Proposal(torch.tensor([drafted], dtype=torch.int64), [len(drafted)])
    [one], [path] = committed(Rows([row]), proposal, [accepted], [4])
    assert (list(one.token_ids), one.origins, one.num_drafted) == (written, origins, num_drafted)
    assert path == list(range(one.num_accepted)) and one.num_accepted == min(accepted, num_drafted)
    assert sum(one.tested) == num_tested and row.tokens.tolist() == [1, *written]


def test_a_padded_column_of_a_ragged_batch_is_never_committed() -> None:
    proposal = Proposal(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1])
    out, _ = committed(Rows([make_row(), make_row()]), proposal, [2, 1], [7, 8])
    assert [(one.token_ids, one.origins) for one in out] == [((1, 2, 7), (D, D, R)), ((4, 8), (D, B))]


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = torch.randn(2, 3, 6)
    rows = Rows([make_row(logprobs=2, temperature=0.5, banned_token_ids=(0,)), make_row()])
    proposal = Proposal(torch.tensor([[1, 2], [1, 2]]), [2, 2])
    (first, second), _ = committed(rows, proposal, [2, 2], [3, 3], scores)
    assert second.logprobs is None and len(first.logprobs) == 3
    for column, entry in enumerate(first.logprobs):
        expected = scores[0, column].log_softmax(-1)
        best = expected.argsort(descending=True)[:2].tolist()
        assert entry.logprob == pytest.approx(float(expected[column + 1]))
        assert [token for token, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist())
    for requested, given in ((0, 0), (3, 3), (50, 6)):
        rows = Rows([make_row(logprobs=requested)])
        [one], _ = committed(rows, Proposal.empty(1, torch.device("cpu")), [0], [3], scores[:1, :1])
        assert len(one.logprobs[0].top) == given


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
    prompts = [[1, 2, 3], [4]]
    truth = [greedy(prompt, 6) for prompt in prompts]
    wrong = [*truth[1][:1], (truth[1][1] + 1) % 7, *truth[1][2:]]
    rows = Rows([Row(i, p, make_row().params, limit=99) for i, p in enumerate(prompts)])
    cache, drafter = ready(rows), Watching([truth[0], wrong])
    first, second = step(rows, TARGET, cache, drafter, make_rule("speculative"), ConstantLength(3))
    assert (list(first.token_ids), first.origins) == (truth[0][:4], (D, D, D, B))
    assert (list(second.token_ids), second.origins) == (truth[1][:2], (D, R))
    assert (first.num_drafted, first.num_accepted, second.num_drafted, second.num_accepted) == (3, 3, 3, 1)
    assert (first.request_id, second.request_id, first.batch_size, first.finish_reason) == (0, 1, 2, None)
    assert cache.lengths == [row.size - 1 for row in rows] == [6, 2]
    assert drafter.noted == ([3, 1], [7, 3])
    assert [row.tokens.tolist() for row in rows] == [prompts[0] + truth[0][:4], prompts[1] + truth[1][:2]]


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
