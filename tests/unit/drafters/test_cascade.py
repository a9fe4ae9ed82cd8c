"""Cascades: how many tokens each drafter drafts, where a row ends, whose distribution a token has, and what stays cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay import Rows, RuleNeeds, TableModel
from foresay.decoding import devices
from foresay.decoding.acceptance import make_rule
from foresay.decoding.stopping import DraftStep, Stopping
from foresay.drafters import Cascade, MaxGram, ModelDrafter
from foresay.drafters.cascade import drafted_at_most
from foresay.lengths import ConfidenceLength, ConstantLength
from helpers.cascading import POLICY, SIZE, ZEROS, Counted, Whole, begun, lists, whole
from helpers.making import By, make_row
from helpers.refusals import refused
from helpers.support import Always

END = torch.eye(SIZE, dtype=torch.float64)


def model(seed: int = 1) -> ModelDrafter:
    return ModelDrafter(whole(seed), SIZE)


def greedy(model: Whole, prompt: Sequence[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(int(model.distribution(context).argmax()))
    return context[len(prompt) :]


@pytest.mark.parametrize(
    ("most", "plan", "budget", "out", "calls"),
    [
        ((9, 9, 9), [2, 3, 1], [64], [[1, 1, 2, 2, 2, 3]], [[{0: (2, 2)}], [{0: (4, 3)}], [{0: (7, 1)}]]),
        # goals are sums: a later drafter makes up for a short one
        ((1, 0, 9), [2, 3, 1], [64], [[1, 3, 3, 3, 3, 3]], [[{0: (2, 2)}], [{0: (3, 4)}], [{0: (3, 5)}]]),
        ((9, 9, 9), [2, 0, 1], [64], [[1, 1, 3]], [[{0: (2, 2)}], [], [{0: (4, 1)}]]),
        (
            (9, 9, 9),
            [2, 3, 1],
            [3, 0, 64, 1],
            [[1, 1, 2], [], [1, 1, 2, 2, 2, 3], [1]],
            [[{0: (2, 2), 2: (2, 2), 3: (2, 1)}], [{0: (4, 1), 2: (4, 3)}], [{2: (7, 1)}]],
        ),
        ((9, 9, 9), [2, 3, 1], [0, 0], [[], []], [[], [], []]),
    ],
    ids=["columns", "short", "zero", "ragged", "no budget"],
)
def test_each_drafter_adds_what_its_column_plans(
    most: Sequence[int], plan: list[int], budget: list[int], out: list[list[int]], calls: list[Any]
) -> None:
    parts = [Counted([i], most=n) for i, n in enumerate(most, 1)]
    cascade = Cascade(parts, [plan, *ZEROS])
    assert lists(cascade.propose(begun(cascade, *[[4, 4]] * len(budget)), budget, POLICY)) == out
    assert [part.requested for part in parts] == calls
    assert drafted_at_most(cascade.k) == sum(plan)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_invalid_token_of_a_part_is_reported(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host knows it, and where a device does: the part's tokens are reviewed by a model."""
    monkeypatch.setattr(devices, "is_remote", lambda device: on_device)
    cascade = Cascade([ModelDrafter(whole(), SIZE, sample=False), Counted([SIZE + 7])], [[2, 0], [0, 2]])
    out = cascade.propose(begun(cascade), [64], POLICY)
    assert isinstance(out.failure, ValueError) and lists(out)[0] and max(lists(out)[0]) < SIZE


def test_the_sources_semantics() -> None:
    """[[5,14,10],[0,1,10],[0,0,10]] with two equal greedy models and a last drafter that is always wrong.

    A review of d1 gets one token of d2 (which rejects ten tokens and drafts one) and ten draft tokens, keeps the first and
    adds its own: 3 reviews make the 5 tokens, 6 in fact, which are kept; 13 of d2's follow up to 19, then 10 tokens.
    """
    models, last = (whole(), whole()), Counted([SIZE - 1])
    distribution, possible = models[0].distribution, torch.arange(SIZE) < SIZE - 1
    for one in models:  # the last drafter's tokens are never the likeliest
        one.distribution = lambda context: distribution(context) * possible + 1e-9  # type: ignore[method-assign]
    cascade = Cascade([ModelDrafter(m, SIZE) for m in models] + [last], [[5, 14, 10], [0, 1, 10], [0, 0, 10]])
    rows = begun(cascade, [1, 2])
    out = lists(cascade.propose(rows, [64], POLICY))[0]
    written = greedy(models[0], [1, 2], 19)
    assert out == written + [SIZE - 1] * 10
    assert last.requested == [{0: (2 + i, 10)} for i in range(20)]
    assert (models[0].passes, models[1].passes) == (3, 3 + 13)
    last.requested.clear()
    out = lists(cascade.propose(rows, [8], POLICY))[0]
    assert out == written[:8], "6 by d1, 2 by d2; a review is never given more draft tokens than it may draft"
    inner = [6, 6, 4, 4, 2, 2, 1]  # of 8 - written so far, one is the reviewer's own
    assert [n for one in last.requested for _, n in one.values()] == inner


def test_a_vertical_cascade_saves_the_larger_models_passes() -> None:
    for k, passes, length in (([[5, 0], [0, 0]], 5, 5), ([[5, 0], [0, 4]], 1, 5), ([[5, 0], [0, 7]], 1, 8)):
        large = whole()
        cascade = Cascade([ModelDrafter(large, SIZE), Always([greedy(large, [1, 2, 3], 12)])], k)
        out = lists(cascade.propose(begun(cascade, [1, 2, 3]), [64], POLICY))[0]
        assert (len(out), large.passes) == (length, passes), "what a review overshoots is kept"


@pytest.mark.parametrize("reviewed", [False, True])
def test_a_row_that_has_ended_is_drafted_for_no_further(reviewed: bool) -> None:
    last, large = Counted([3]), whole()
    large.distribution = lambda context: END[5 if len(context) == 3 else 2] + 1e-9  # type: ignore[method-assign]
    cascade = Cascade([ModelDrafter(large, SIZE), last], [[4, 2], [0, 2 * reviewed]])
    rows = begun(cascade, [1, 1], [1, 1, 1, 1], eos=frozenset({5}))
    out = lists(cascade.propose(rows, [6, 6], POLICY))
    assert out[0][:2] == [2, 5] and (not reviewed or len(out[0]) == 2)
    assert out[1] == [2, 2, 2, 2, 3, 3]
    assert 0 not in last.requested[-1], "the last drafter adds nothing after an end"


class Stops(ConstantLength):
    """Stops row 0 after its token 1, and notes which tokens it is given."""

    def __init__(self) -> None:
        super().__init__(64)
        self.given: list[list[int]] = []

    def stopping(self, rows: Rows) -> Stopping:
        return By(self._keep, rows)

    def _keep(self, step: DraftStep) -> torch.Tensor | None:
        self.given.append(step.index.tolist())
        going = torch.ones(len(step.token_ids), dtype=torch.bool)
        going[0] = step.index[0] != 1
        return going


def test_a_policys_stop_ends_a_row_for_later_drafters_and_a_review() -> None:
    last, policy = Counted([3]), Stops()
    cascade = Cascade([model(1), model(2), last], [[3, 2, 1], *ZEROS])
    out = lists(cascade.propose(begun(cascade, [1], [2]), [64, 64], policy))
    assert [len(tokens) for tokens in out] == [2, 6]
    assert policy.given == [[0, 0], [1, 1], [2, 2], [2, 3], [3, 4]], "the second model counts on where the first ends"
    assert last.requested == [{1: (6, 1)}]
    for k in ([[6, 0], [0, 0]], [[6, 0], [0, 1]]):  # a model that is never sure
        cascade = Cascade([model(), Counted([1])], k)
        assert cascade.propose(begun(cascade, [1]), [20], ConfidenceLength(1.0)).num_tokens[0] <= 2


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_shape_of_matrix_exceeds_a_budget(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    k = [[data.draw(st.integers(0, 5)) if j >= i else 0 for j in range(count)] for i in range(count)]
    k[0][data.draw(st.integers(0, count - 1))] += 1
    drafters = [*(model(i) for i in range(count - 1)), Counted([2, 4])]
    cascade = Cascade(drafters, k, lenience=data.draw(st.sampled_from([1.0, 3.0])))
    rows = begun(cascade, [1], [2, 3], temperature=data.draw(st.sampled_from([0.0, 1.0])))
    budget = [data.draw(st.integers(0, 9)) for _ in rows]
    proposal = cascade.propose(rows, budget, POLICY)
    wanted = [min(b, sum(k[0])) for b in budget]
    assert all(w <= n <= b for w, n, b in zip(wanted, proposal.num_tokens, budget, strict=True)), "all can draft"


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
        ([[1, 2], [0, 3]], 2, "k[1]", [0, 3]),  # only models review
    ],
    ids=str,
)
def test_wrong_matrices_are_refused(k: Any, count: int, param: str, value: Any) -> None:
    with refused(param, value):
        Cascade([Counted() for _ in range(count)], k)


def test_a_cascade_that_reviews_samples_whatever_its_models_do_and_drafts_where_it_is_scored() -> None:
    """A review draws, so that lengths learned from a seed's own numbers would meet them."""
    quiet = [ModelDrafter(TableModel.random(4, seed=i), 4, sample=False) for i in range(2)]
    assert Cascade(quiet, [[2, 0], [0, 2]]).samples and not Cascade(quiet, [[2, 2], [0, 0]]).samples
    elsewhere = TableModel.random(4, seed=1)
    elsewhere.device = torch.device("meta")
    cascade = Cascade([ModelDrafter(elsewhere, 4), MaxGram()], [[0, 2], [0, 0]])
    proposal = cascade.propose(begun(cascade, [1, 2, 1]), [2], POLICY)
    assert proposal.num_tokens == [2] and proposal.token_ids.device.type == "meta"


# -- distributions and caches ----------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[list[list[int]], Callable[[Sequence[ModelDrafter]], list[Any]]]] = {
    "n-grams": ([[4, 2], [0, 3]], lambda m: [m[0], Counted([2, 3])]),
    "two models": ([[3, 2], [0, 2]], lambda m: [m[0], m[1]]),
    "three": ([[3, 3, 2], [0, 2, 2], [0, 0, 2]], lambda m: [m[0], m[1], MaxGram()]),
    "side by side": ([[2, 2, 2], [0, 0, 4], [0, 0, 0]], lambda m: [m[0], m[1], Counted([1])]),
}


@pytest.mark.parametrize("lenience", [1.0, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_distributions_caches_and_budgets_over_contexts_that_come_and_go(shape: str, lenience: float) -> None:
    """Sampled proposals on random, non-monotone contexts: each distribution is its reviewer's own given all tokens before it."""
    generator = torch.Generator().manual_seed(7)

    def rand(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    models, (k, make) = (whole(1), whole(2)), SHAPES[shape]
    cascade = Cascade(make([ModelDrafter(m, SIZE) for m in models]), k, lenience=lenience)
    rows = begun(cascade, *([1 + rand(SIZE - 1) for _ in range(1 + rand(5))] for _ in range(3)), temperature=1.0)
    seen: set[int] = set()
    for step in range(25):
        ahead = rows
        if step % 3:  # contexts of draft tokens, which are taken back at the next proposal
            ahead = rows.with_draft([[rand(SIZE) for _ in range(rand(4))] for _ in rows], step % 2)
        budget = [rand(12) for _ in rows]
        proposal = cascade.propose(ahead, budget, POLICY)
        for i, row in enumerate(ahead):
            assert proposal.num_tokens[i] <= budget[i]
            context = row.tokens.tolist()
            for j, token in enumerate(lists(proposal)[i]):
                at = -1 if proposal.distribution_index is None else int(proposal.distribution_index[i, j])
                if at >= 0:
                    assert proposal.distributions is not None
                    found = proposal.distributions[at].double()
                    fits = [torch.allclose(found, m.distribution(context), atol=1e-5) for m in models]
                    assert any(fits), (step, i, j)
                    seen.add(fits.index(True))
                context.append(token)
        if step % 3 == 0:  # the target's tokens: some of the draft, then something else
            for row, tokens in zip(rows, lists(proposal), strict=True):
                row.extend([*tokens[: rand(4)], rand(SIZE)])
            cascade.observe(rows, None, None)
    drafting = {i for i in (0, 1) if isinstance(cascade.drafters[i], ModelDrafter)}
    reviewed = {i for i in drafting if any(k[i + 1 :][:1] and k[i + 1])}
    assert seen >= drafting - reviewed
    assert (seen & reviewed == set()) if lenience > 1 else (seen >= reviewed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_inner_review_of_the_same_model_changes_nothing_it_writes(temperature: float) -> None:
    """Under a coupled rule, and greedily, the noise decides: cascaded or not, the model writes the same tokens."""
    rows = Rows([make_row([1, 2], seed=5, temperature=temperature)], needs=RuleNeeds(shares_noise=True))
    outputs = []
    for k in ([[6, 0], [0, 0]], [[6, 0], [0, 3]]):
        cascade = Cascade([model(), Counted([1, 2, 3])], k, lenience=3.0)
        cascade.admit(rows, 0)
        outputs.append(lists(cascade.propose(rows, [6], POLICY))[0])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 6


def passes_of(large: Whole, small: Whole, lenience: float) -> int:
    """Passes of the larger model for 12 tokens that the smaller one drafts by threes."""
    cascade = Cascade([ModelDrafter(large, SIZE), ModelDrafter(small, SIZE)], [[12, 0], [0, 3]], lenience=lenience)
    cascade.propose(begun(cascade, [1, 2]), [12], POLICY)
    return large.passes


def test_lenient_reviews_keep_more_but_not_of_a_draft_that_is_certain() -> None:
    """p(x) = 0.3 is not the likeliest; it is kept of a draft that gives it 0.4, and not of one that is certain."""
    assert passes_of(whole(1), whole(2), 50.0) < passes_of(whole(1), whole(2), 1.0)
    weights = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    for draft, passes in ((weights[[1, 0, 2, 3, 4, 5]], 3), (END[1] + 1e-9, 12)):
        large, small = whole(), whole()
        large.distribution = lambda context: weights  # type: ignore[method-assign]
        small.distribution = lambda context, draft=draft: draft  # type: ignore[method-assign, misc]
        assert passes_of(large, small, 2.0) == passes


@pytest.mark.parametrize("k", [[[4, 0], [0, 0]], [[4, 0], [0, 2]]], ids=["alone", "reviewing"])
def test_what_is_cached_is_not_fed_again(k: list[list[int]]) -> None:
    """A context that goes on from the last proposal costs the tokens that the cache lacks, and not one more."""
    one = whole()
    cascade = Cascade([ModelDrafter(one, SIZE), Counted([1])], k)
    rows = begun(cascade, [1, 2, 3, 4, 5, 1, 2, 3])
    first = lists(cascade.propose(rows, [4], POLICY))[0]
    changed = [*first[:2], (first[2] + 1) % SIZE]  # its first two tokens are still cached
    for ahead, tag in ((first, 1), (changed, 0)):
        one.fed = one.passes = 0
        cascade.propose(rows.with_draft([ahead], tag), [1], POLICY)
        assert (one.fed, one.passes) == (1, 1)


def test_confidence_is_the_reviewers_where_a_lossy_rule_needs_it() -> None:
    one = whole()
    cascade = Cascade([ModelDrafter(one, SIZE), Counted([3])], [[3, 2], [0, 2]])
    rows = Rows([make_row([1, 2])], needs=make_rule("lenience").needs)
    cascade.admit(rows, 0)
    proposal = cascade.propose(rows, [64], POLICY)
    context, n = [1, 2], proposal.num_tokens[0]
    assert proposal.confidence is not None and proposal.confidence.shape == proposal.token_ids.shape
    for token, sure in zip(lists(proposal)[0][: n - 2], proposal.confidence[0].tolist(), strict=False):
        assert sure == pytest.approx(float(one.distribution(context)[token]), abs=1e-5)
        context.append(token)
    assert float(proposal.confidence[0, n - 1]) == 1.0, "a token that no model drafted is held for certain"
