from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import FinishReason, Origin
from foresay.decoding.prefill import prefill_chunk
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import ModelOutput, Move
from foresay.decoding.rows import Row, Rows
from foresay.decoding.step import commit, cut, propose, step
from foresay.lengths import ConstantLength
from foresay.models.table import TableCache, TableModel
from helpers.making import make_row
from helpers.support import Always, Fake

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
D, R, B = Origin.DRAFT, Origin.RESIDUAL, Origin.BONUS
EOS = frozenset({9})
BLOCK = [1, 2, 3, 4]


def test_nothing_to_stop_at_keeps_the_block() -> None:
    assert cut(make_row(eos=EOS), BLOCK) == (BLOCK, None)


@pytest.mark.parametrize("place", range(4))
def test_a_stop_token_ends_the_block_and_stays(place: int) -> None:
    block = [9 if i == place else t for i, t in enumerate(BLOCK)]
    assert cut(make_row(eos=EOS), block) == (block[: place + 1], STOP)
    assert cut(make_row(stop_token_ids=(9,)), block) == (block[: place + 1], STOP)
    assert cut(make_row(eos=EOS, ignore_eos=True), block) == (block, None)


def test_the_first_of_several_stop_tokens_counts() -> None:
    assert cut(make_row(eos=EOS), [1, 9, 9, 2]) == ([1, 9], STOP)


@pytest.mark.parametrize("room", range(1, 7))
def test_the_limit_ends_the_block(room: int) -> None:
    row = make_row([5], [5], limit=2 + room)
    assert cut(row, BLOCK) == (BLOCK[:room], LENGTH if room <= 4 else None)


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert cut(make_row(limit=3, eos=EOS), [1, 9, 2]) == ([1, 9], STOP)


def test_a_stop_token_past_the_limit_is_not_seen() -> None:
    assert cut(make_row(limit=3, eos=EOS), [1, 2, 9]) == ([1, 2], LENGTH)


@pytest.mark.parametrize(("output", "kept"), [(0, [1, 9, 2, 9]), (1, [1, 9]), (2, [1, 9])])
def test_no_stop_token_ends_the_output_before_min_new_tokens(output: int, kept: list[int]) -> None:
    """As the mask has it: a stop token may be written once `min_new_tokens` tokens stand before it."""
    row = make_row(output=[5] * output, eos=EOS, min_new_tokens=2)
    assert cut(row, [1, 9, 2, 9, 3]) == (kept, STOP)


class StopAt:
    """A stop condition that keeps state, as stop strings do."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.seen: list[int] = []

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        before = len(self.seen)
        self.seen += token_ids
        return self.total - before if before < self.total <= len(self.seen) else None


@pytest.mark.parametrize("place", range(1, 5))
def test_a_stop_condition_ends_the_block(place: int) -> None:
    assert cut(make_row(stop=StopAt(place)), BLOCK) == (BLOCK[:place], STOP)


def test_a_stop_condition_before_a_stop_token_wins() -> None:
    assert cut(make_row(stop=StopAt(2), eos=EOS), [1, 2, 9, 3]) == ([1, 2], STOP)


def test_a_stop_condition_never_sees_what_is_not_committed() -> None:
    past_eos, past_limit = StopAt(4), StopAt(4)
    assert cut(make_row(stop=past_eos, eos=EOS), [1, 9, 2, 3]) == ([1, 9], STOP)
    assert cut(make_row(stop=past_limit, limit=3), BLOCK) == ([1, 2], LENGTH)
    assert (past_eos.seen, past_limit.seen) == ([1, 9], [1, 2])


def test_a_stop_condition_sees_every_committed_token_once() -> None:
    condition = StopAt(7)
    row = make_row(stop=condition)
    for block in ([1, 2], [3], [4, 5, 6]):
        kept, reason = cut(row, block)
        assert (kept, reason) == (block, None)
        row.extend(kept)
    assert condition.seen == [1, 2, 3, 4, 5, 6]
    assert cut(row, [7, 8]) == ([7], STOP)


def test_a_stop_condition_at_the_limit_is_a_stop() -> None:
    assert cut(make_row(stop=StopAt(2), limit=3), BLOCK) == ([1, 2], STOP)


# --- commit ---


NO_LAWS = Distributions(torch.zeros(1, 1, dtype=torch.int64))


def said(accepted: Sequence[int], extra: Sequence[int]) -> Verification:
    """A verification over chains of three at most."""
    return Verification(torch.tensor(accepted), torch.tensor(extra), torch.tensor([n + 1 for n in accepted]))


def committed(row: Row, drafted: Sequence[int], accepted: int, extra: int) -> tuple[list[int], tuple[Origin, ...]]:
    proposal = Proposal(torch.tensor([drafted], dtype=torch.int64), [len(drafted)])
    output = ModelOutput(torch.zeros(1, 5, 10))
    [one], [path] = commit(Rows([row]), proposal, said([accepted], [extra]), output, NO_LAWS)
    kept, origins = list(one.token_ids), one.origins
    assert path == list(range(one.num_accepted))
    after_a_stop = len(kept) <= accepted  # and counted nowhere
    counted = (len(kept),) * 2 if after_a_stop else (len(drafted), accepted)
    assert (one.num_drafted, one.num_accepted) == counted
    assert sum(one.tested) == (len(kept) if after_a_stop else accepted + 1)
    assert row.tokens.tolist()[row.size - len(kept) :] == kept
    return kept, origins


def test_origins_tell_a_rejection_from_a_full_acceptance() -> None:
    assert committed(make_row(), [1, 2, 3], 3, 4) == ([1, 2, 3, 4], (D, D, D, B))
    assert committed(make_row(), [1, 2, 3], 1, 4) == ([1, 4], (D, R))
    assert committed(make_row(), [1, 2, 3], 0, 4) == ([4], (R,))
    assert committed(make_row(), [], 0, 4) == ([4], (B,))


def test_nothing_behind_a_stop_is_committed() -> None:
    row = make_row(eos=EOS)
    assert committed(row, [1, 9, 3], 3, 4) == ([1, 9], (D, D))
    assert row.tokens.tolist() == [1, 1, 9]


def test_a_padded_column_of_a_ragged_batch_is_never_committed() -> None:
    rows = Rows([make_row(), make_row()])
    proposal = Proposal(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1])
    out, _ = commit(rows, proposal, said([2, 1], [7, 8]), ModelOutput(torch.zeros(2, 4, 10)), NO_LAWS)
    assert [(one.token_ids, one.origins) for one in out] == [((1, 2, 7), (D, D, R)), ((4, 8), (D, B))]


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = torch.randn(2, 3, 6)
    rows = Rows([make_row(logprobs=2, temperature=0.5, banned_token_ids=(0,)), make_row()])
    proposal = Proposal(torch.tensor([[1, 2], [1, 2]]), [2, 2])
    (first, second), _ = commit(rows, proposal, said([2, 2], [3, 3]), ModelOutput(scores), NO_LAWS)
    assert second.logprobs is None
    entries = first.logprobs
    assert entries is not None and len(entries) == 3
    expected = scores[0].log_softmax(-1)
    for column, (token, entry) in enumerate(zip([1, 2, 3], entries, strict=True)):
        assert entry.logprob == pytest.approx(float(expected[column, token]))
        best = expected[column].argsort(descending=True)[:2].tolist()
        assert [token for token, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx(expected[column, best].tolist())


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (3, 3), (6, 6), (50, 6)])
def test_no_more_logprobs_than_tokens(asked: int, given: int) -> None:
    proposal = Proposal.empty(1, torch.device("cpu"))
    rows, output = Rows([make_row(logprobs=asked)]), ModelOutput(torch.randn(1, 1, 6))
    [one], _ = commit(rows, proposal, said([0], [3]), output, NO_LAWS)
    assert one.logprobs is not None and len(one.logprobs[0].top) == given


# --- propose and step ---


class Budgets(Fake):
    """Drafts nothing and writes down what it may."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, rows: Rows, budget: Sequence[int], policy: object) -> Proposal:
        self.asked.append(list(budget))
        return Proposal.empty(len(rows), torch.device("cpu"))


@pytest.fixture
def target() -> TableModel:
    return TableModel.random(7, seed=2, concentration=0.3)


def test_the_budget_leaves_room_for_the_targets_own_token(target: TableModel) -> None:
    drafter = Budgets()
    rows = Rows([make_row(limit=1 + room) for room in (9, 5, 4, 2, 1)])
    propose(rows, target, target.new_cache(), drafter, ConstantLength(4), exact=True)
    assert drafter.asked == [[4, 4, 3, 1, 0]]


def test_a_drafter_without_a_budget_is_not_asked(target: TableModel) -> None:
    drafter, cache = Budgets(), target.new_cache()
    assert propose(Rows([make_row(limit=2)]), target, cache, drafter, ConstantLength(4), exact=True).width == 0
    assert propose(Rows([make_row()]), target, cache, drafter, ConstantLength(0), exact=True).width == 0
    assert propose(Rows([make_row()]), target, cache, None, ConstantLength(4), exact=True).width == 0
    assert drafter.asked == []


def ready(target: TableModel, rows: Rows) -> TableCache:
    """A cache that lacks exactly each row's last token."""
    cache = target.new_cache()
    target.admit(rows, 0, cache)
    first = 0
    while prefill_chunk(target, cache, rows, first):
        pass
    return cache


def greedy(target: TableModel, prompt: Sequence[int], count: int) -> list[int]:
    out = list(prompt)
    for _ in range(count):
        out.append(int(target.distribution(out).argmax()))
    return out[len(prompt) :]


class Watching(Always):
    """Notes the state it observes: the verification and the rows after the commit."""

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        super().__init__(outputs)
        self.noted: list[tuple[list[int], list[int]]] = []

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        assert verification is not None and target is not None
        self.noted.append((verification.num_accepted.tolist(), [row.size for row in rows]))

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        raise AssertionError("a step moves no rows")


def test_one_step_commits_and_rewinds(target: TableModel) -> None:
    prompts = [[1, 2, 3], [4]]
    truth = [greedy(target, prompt, 6) for prompt in prompts]
    wrong = [*truth[1][:1], (truth[1][1] + 1) % 7, *truth[1][2:]]
    rows = Rows([Row(i, p, make_row().params, limit=99) for i, p in enumerate(prompts)])
    cache, drafter = ready(target, rows), Watching([truth[0], wrong])
    first, second = step(rows, target, cache, drafter, make_rule("speculative"), ConstantLength(3))
    assert (list(first.token_ids), first.origins) == (truth[0][:4], (D, D, D, B))
    assert (list(second.token_ids), second.origins) == (truth[1][:2], (D, R))
    assert (first.num_drafted, first.num_accepted, second.num_drafted, second.num_accepted) == (3, 3, 3, 1)
    assert (first.request_id, second.request_id, first.batch_size, first.finish_reason) == (0, 1, 2, None)
    assert cache.lengths == [row.size - 1 for row in rows] == [6, 2]
    assert drafter.noted == [([3, 1], [7, 3])]
    assert [row.tokens.tolist() for row in rows] == [prompts[0] + truth[0][:4], prompts[1] + truth[1][:2]]


def test_a_step_that_stops_inside_the_block_rewinds_to_the_stop(target: TableModel) -> None:
    truth = greedy(target, [1, 2], 6)
    row = make_row([1, 2], stop=StopAt(2))
    rows = Rows([row])
    cache = ready(target, rows)
    [only] = step(rows, target, cache, Always([truth]), make_rule("speculative"), ConstantLength(4))
    assert (list(only.token_ids), only.origins, only.finish_reason) == (truth[:2], (D, D), STOP)
    assert (only.num_drafted, only.num_accepted, row.num_new, cache.lengths) == (2, 2, 2, [3])


def test_a_plain_step_writes_one_bonus_token(target: TableModel) -> None:
    rows = Rows([make_row([1, 2])])
    [only] = step(rows, target, ready(target, rows), None, make_rule("speculative"), ConstantLength(4))
    assert (list(only.token_ids), only.origins, only.num_drafted) == (greedy(target, [1, 2], 1), (B,), 0)
