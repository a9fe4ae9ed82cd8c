"""Cascades: the number of tokens that each drafter drafts, and the end of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding import devices
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import DraftStep, Stopping
from foresay.drafters import Cascade, MaxGram, ModelDrafter
from foresay.drafters.cascade import drafted_at_most
from foresay.lengths import ConfidenceLength, ConstantLength
from foresay.models.table import TableModel
from helpers.cascading import POLICY, SIZE, ZEROS, Counted, Whole, begun, lists, whole
from helpers.making import By, make_row
from helpers.refusals import refused


def test_a_cascade_that_reviews_samples_whatever_its_models_say() -> None:
    """A review draws, so that lengths learned from a seed's own numbers would meet them."""
    quiet = [ModelDrafter(TableModel.random(4, seed=i), 4, sample=False) for i in range(2)]
    assert Cascade(quiet, [[2, 0], [0, 2]]).samples and not Cascade(quiet, [[2, 2], [0, 0]]).samples


def test_each_drafter_adds_what_its_column_says() -> None:
    parts = [Counted([1]), Counted([2]), Counted([3])]
    cascade = Cascade(parts, [[2, 3, 1], *ZEROS])
    rows = begun(cascade, [4, 4])
    assert lists(cascade.propose(rows, [64], POLICY)) == [[1, 1, 2, 2, 2, 3]]
    assert [part.asked for part in parts] == [[{0: (2, 2)}], [{0: (4, 3)}], [{0: (7, 1)}]]
    assert drafted_at_most(cascade.k) == 6


def test_a_later_drafter_makes_up_for_a_short_one() -> None:
    """Goals are sums: who comes later works until the proposal is as long as it should be by then."""
    parts = [Counted([1], most=1), Counted([2], most=0), Counted([3])]
    cascade = Cascade(parts, [[2, 3, 1], *ZEROS])
    assert lists(cascade.propose(begun(cascade), [64], POLICY)) == [[1, 3, 3, 3, 3, 3]]
    assert [part.asked for part in parts] == [[{0: (1, 2)}], [{0: (2, 4)}], [{0: (2, 5)}]]


def test_a_column_of_zero_is_not_asked() -> None:
    parts = [Counted([1]), Counted([2]), Counted([3])]
    cascade = Cascade(parts, [[2, 0, 1], *ZEROS])
    assert lists(cascade.propose(begun(cascade), [64], POLICY)) == [[1, 1, 3]]
    assert parts[1].asked == []


def test_ragged_budgets_are_kept() -> None:
    parts = [Counted([1]), Counted([2]), Counted([3])]
    cascade = Cascade(parts, [[2, 3, 1], *ZEROS])
    rows = begun(cascade, [5], [5], [5, 5], [5])
    out = lists(cascade.propose(rows, [3, 0, 64, 1], POLICY))
    assert out == [[1, 1, 2], [], [1, 1, 2, 2, 2, 3], [1]]
    assert [part.asked for part in parts] == [
        [{0: (1, 2), 2: (2, 2), 3: (1, 1)}],
        [{0: (3, 1), 2: (4, 3)}],
        [{2: (7, 1)}],
    ]
    assert cascade.propose(rows, [0, 0, 0, 0], POLICY).width == 0
    assert [len(part.asked) for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("on_device", [False, True])
def test_an_invalid_token_of_a_part_is_reported(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host knows it, and where a device does: the part's tokens are reviewed by a model."""
    monkeypatch.setattr(devices, "is_remote", lambda device: on_device)
    model = ModelDrafter(whole(), SIZE, sample=False)
    cascade = Cascade([model, Counted([SIZE + 7])], [[2, 0], [0, 2]])
    out = cascade.propose(begun(cascade), [64], POLICY)
    assert isinstance(out.failure, ValueError) and lists(out)[0] and max(lists(out)[0]) < SIZE


def test_the_sources_semantics() -> None:
    """[[5,14,10],[0,1,10],[0,0,10]] with two equal greedy models and a last drafter that is always wrong.

    A review of d1 gets one token of d2 (which rejects ten tokens and drafts one) and ten draft tokens, keeps the first and
    adds its own: 3 reviews make the 5 tokens, 6 in fact, which are kept; 13 of d2's follow up to 19, then 10 tokens.
    """
    models, last = (whole(), whole()), Counted([SIZE - 1])
    distribution, possible = models[0].distribution, torch.arange(SIZE) < SIZE - 1
    for model in models:  # the last drafter's tokens are never the likeliest
        model.distribution = lambda context: distribution(context) * possible + 1e-9  # type: ignore[method-assign]
    cascade = Cascade([ModelDrafter(m, SIZE) for m in models] + [last], [[5, 14, 10], [0, 1, 10], [0, 0, 10]])
    rows = begun(cascade, [1, 2])
    out = lists(cascade.propose(rows, [64], POLICY))[0]
    context = [1, 2]
    for _ in range(19):
        context.append(int(models[0].distribution(context).argmax()))
    assert out == context[2:] + [SIZE - 1] * 10
    assert last.asked == [{0: (2 + i, 10)} for i in range(20)]
    assert (models[0].passes, models[1].passes) == (3, 3 + 13)
    last.asked.clear()
    out = lists(cascade.propose(rows, [8], POLICY))[0]
    assert out == context[2:10], "6 by d1, 2 by d2; a review is never given more draft tokens than it may draft"
    inner = [6, 6, 4, 4, 2, 2, 1]  # of 8 - written so far, one is the reviewer's own
    assert [n for one in last.asked for _, n in one.values()] == inner


class Always(Counted):
    """Drafts the output of a greedy model."""

    def __init__(self, model: Whole) -> None:
        super().__init__()
        self.model = model

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        context = rows[row].tokens.tolist()
        for _ in range(budget):
            context.append(int(self.model.distribution(context).argmax()))
        return context[len(context) - budget :]


def test_a_vertical_cascade_saves_the_larger_models_passes() -> None:
    for k, passes, length in (([[5, 0], [0, 0]], 5, 5), ([[5, 0], [0, 4]], 1, 5), ([[5, 0], [0, 7]], 1, 8)):
        model = whole()
        cascade = Cascade([ModelDrafter(model, SIZE), Always(model)], k)
        out = lists(cascade.propose(begun(cascade, [1, 2, 3]), [64], POLICY))[0]
        assert len(out) == length, "what a review overshoots is kept"
        assert model.passes == passes


@pytest.mark.parametrize("reviewed", [False, True])
def test_a_row_that_has_ended_is_drafted_for_no_further(reviewed: bool) -> None:
    last = Counted([3])
    model = whole()
    model.distribution = lambda context: torch.eye(SIZE, dtype=torch.float64)[5 if len(context) == 3 else 2] + 1e-9  # type: ignore[method-assign]
    cascade = Cascade([ModelDrafter(model, SIZE), last], [[4, 2], [0, 2 * reviewed]])
    items = [make_row([1] * n, seed=n, eos=frozenset({5})) for n in (2, 4)]
    rows = Rows(items)
    cascade.admit(rows, 0)
    out = lists(cascade.propose(rows, [6, 6], POLICY))
    assert out[0][:2] == [2, 5] and (not reviewed or len(out[0]) == 2)
    assert out[1] == [2, 2, 2, 2, 3, 3]
    assert 0 not in last.asked[-1], "the last drafter adds nothing after an end"


class Stops(ConstantLength):
    """Stops row 0 after its token 1, and notes which tokens it is given."""

    def __init__(self) -> None:
        super().__init__(64)
        self.told: list[list[int]] = []

    def stopping(self, rows: Rows) -> Stopping:
        return By(self._keep, rows)

    def _keep(self, step: DraftStep) -> torch.Tensor | None:
        self.told.append(step.index.tolist())
        going = torch.ones(len(step.token_ids), dtype=torch.bool)
        going[0] = step.index[0] != 1
        return going


def test_a_policys_stop_ends_a_row_for_those_behind_too() -> None:
    last, policy = Counted([3]), Stops()
    cascade = Cascade([ModelDrafter(whole(1), SIZE), ModelDrafter(whole(2), SIZE), last], [[3, 2, 1], *ZEROS])
    out = lists(cascade.propose(begun(cascade, [1], [2]), [64, 64], policy))
    assert [len(tokens) for tokens in out] == [2, 6]
    assert policy.told == [[0, 0], [1, 1], [2, 2], [2, 3], [3, 4]], (
        "the second model counts on where the first one ends"
    )
    assert last.asked == [{1: (6, 1)}]


def test_a_policys_stop_ends_a_review() -> None:
    """A draft model that is never sure: alone it stops after one token, and likewise when it reviews draft tokens."""
    unsure = ConfidenceLength(1.0)
    for k in ([[6, 0], [0, 0]], [[6, 0], [0, 1]]):
        cascade = Cascade([ModelDrafter(whole(), SIZE), Counted([1])], k)
        assert cascade.propose(begun(cascade, [1]), [20], unsure).num_tokens[0] <= 2


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_shape_of_matrix_exceeds_a_budget(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    numbers = st.integers(0, 5)
    k = [[data.draw(numbers) if j >= i else 0 for j in range(count)] for i in range(count)]
    k[0][data.draw(st.integers(0, count - 1))] += 1
    drafters = [*(ModelDrafter(whole(i), SIZE) for i in range(count - 1)), Counted([2, 4])]
    cascade = Cascade(drafters, k, lenience=data.draw(st.sampled_from([1.0, 3.0])))
    rows = begun(cascade, [1], [2, 3], temperature=data.draw(st.sampled_from([0.0, 1.0])))
    budget = [data.draw(st.integers(0, 9)) for _ in rows]
    proposal = cascade.propose(rows, budget, POLICY)
    assert all(n <= b for n, b in zip(proposal.num_tokens, budget, strict=True))
    wanted = [min(b, sum(k[0])) for b in budget]
    assert all(n >= w for n, w in zip(proposal.num_tokens, wanted, strict=True)), "every drafter here always drafts"


@pytest.mark.parametrize(
    ("k", "count", "param", "value"),
    [
        ([[1]], 0, "drafters", ()),
        ("12", 1, "k", "12"),
        ([1, 2], 2, "k", [1, 2]),
        ([[1, 2]], 2, "k", [[1, 2]]),
        ([[1, 2], [0]], 2, "k", [[1, 2], [0]]),
        ([[1, 65], [0, 0]], 2, "k[0][1]", 65),
        ([[1, 2], [0, True]], 2, "k[1][1]", True),
        ([[1, 2], [3, 1]], 2, "k[1][0]", 3),
        ([[0, 0], [0, 1]], 2, "k[0]", [0, 0]),
    ],
    ids=str,
)
def test_bad_matrices_are_refused(k: Any, count: int, param: str, value: Any) -> None:
    with refused(param, value):
        Cascade([Counted() for _ in range(count)], k)


def test_only_models_review() -> None:
    with refused("k[1]", [0, 3]):
        Cascade([Counted(), Counted()], [[1, 2], [0, 3]])
    with refused("lenience", 0.5):
        Cascade([Counted()], [[1]], lenience=0.5)


def test_a_proposal_is_made_where_it_is_scored() -> None:
    """Draft tokens of an n-gram drafter on the CPU for a model elsewhere are on that model's device."""
    elsewhere = TableModel.random(4, seed=1)
    elsewhere.device = torch.device("meta")
    cascade = Cascade([ModelDrafter(elsewhere, 4), MaxGram()], [[0, 2], [0, 0]])
    proposal = cascade.propose(begun(cascade, [1, 2, 1]), [2], POLICY)
    assert proposal.num_tokens == [2]
    assert proposal.token_ids.device.type == "meta"
