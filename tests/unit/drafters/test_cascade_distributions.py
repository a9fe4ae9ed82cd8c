"""Cascades: whose distribution a token carries, and caches that stay true over contexts that come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.rows import Rows, RuleNeeds
from foresay.drafters import Cascade, MaxGram, ModelDrafter
from helpers.cascading import POLICY, SIZE, Counted, Whole, begun, lists, whole
from helpers.making import make_row

SHAPES: list[tuple[list[list[int]], Callable[[Sequence[Whole]], list[Any]]]] = [
    ([[4, 2], [0, 3]], lambda m: [ModelDrafter(m[0], SIZE), Counted([2, 3])]),
    ([[3, 2], [0, 2]], lambda m: [ModelDrafter(m[0], SIZE), ModelDrafter(m[1], SIZE)]),
    ([[3, 3, 2], [0, 2, 2], [0, 0, 2]], lambda m: [ModelDrafter(m[0], SIZE), ModelDrafter(m[1], SIZE), MaxGram()]),
    ([[2, 2, 2], [0, 0, 4], [0, 0, 0]], lambda m: [ModelDrafter(m[0], SIZE), ModelDrafter(m[1], SIZE), Counted([1])]),
]


@pytest.mark.parametrize("lenience", [1.0, 2.0])
@pytest.mark.parametrize(("k", "make"), SHAPES, ids=["a look-up", "two models", "three", "side by side"])
def test_laws_caches_and_budgets_over_contexts_that_come_and_go(k: Any, make: Any, lenience: float) -> None:
    """Sampled proposals on random, non-monotone contexts: each distribution is its reviewer's own given all tokens before it."""
    generator = torch.Generator().manual_seed(7)

    def rand(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    models = (whole(1), whole(2))
    cascade = Cascade(make(models), k, lenience=lenience)
    rows = begun(cascade, *([1 + rand(SIZE - 1) for _ in range(1 + rand(5))] for _ in range(3)), temperature=1.0)
    seen: set[int] = set()
    for step in range(40):
        ahead = rows
        if step % 3:  # contexts of draft tokens, which are taken back at the next proposal
            ahead = rows.with_draft([[rand(SIZE) for _ in range(rand(4))] for _ in rows], step % 2)
        budget = [rand(12) for _ in rows]
        proposal = cascade.propose(ahead, budget, POLICY)
        for i, row in enumerate(ahead):
            assert proposal.num_tokens[i] <= min(budget[i], 12)
            context = row.tokens.tolist()
            for j, token in enumerate(lists(proposal)[i]):
                at = -1 if proposal.distribution_index is None else int(proposal.distribution_index[i, j])
                if at >= 0:
                    assert proposal.distributions is not None
                    fits = [
                        torch.allclose(proposal.distributions[at].double(), m.distribution(context), atol=1e-5)
                        for m in models
                    ]
                    assert any(fits), (step, i, j)
                    seen.add(fits.index(True))
                else:
                    seen.add(-1)
                context.append(token)
        if step % 3 == 0:  # the target's tokens: some of the draft, then something else
            for row, tokens in zip(rows, lists(proposal), strict=True):
                row.extend([*tokens[: rand(4)], rand(SIZE)])
            cascade.observe(rows, None, None)
    reviewed = {i for i in (0, 1) if isinstance(cascade.drafters[i], ModelDrafter) and any(k[i + 1 :][:1] and k[i + 1])}
    alone = {i for i in (0, 1) if isinstance(cascade.drafters[i], ModelDrafter)} - reviewed
    assert seen >= alone
    assert (seen & reviewed == set()) if lenience > 1 else (seen >= reviewed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_inner_review_of_the_same_model_changes_nothing_it_writes(temperature: float) -> None:
    """Under a coupled rule, and greedily, the noise decides: cascaded or not, the model writes the same tokens."""
    rows = Rows([make_row([1, 2], seed=5, temperature=temperature)], needs=RuleNeeds(shares_noise=True))
    outputs = []
    for k in ([[6, 0], [0, 0]], [[6, 0], [0, 3]]):
        cascade = Cascade([ModelDrafter(whole(), SIZE), Counted([1, 2, 3])], k, lenience=3.0)
        cascade.admit(rows, 0)
        outputs.append(lists(cascade.propose(rows, [6], POLICY))[0])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 6


def test_lenient_reviews_keep_more() -> None:
    """A review that lets p > q / 50 pass keeps the draft tokens of a model that an exact one rejects."""
    passes = []
    for lenience in (1.0, 50.0):
        large = whole(1)
        cascade = Cascade(
            [ModelDrafter(large, SIZE), ModelDrafter(whole(2), SIZE)], [[12, 0], [0, 3]], lenience=lenience
        )
        cascade.propose(begun(cascade, [1, 2]), [12], POLICY)
        passes.append(large.passes)
    assert passes[1] < passes[0]


def test_a_greedy_lenient_review_compares_with_what_the_draft_thought() -> None:
    """p(x) = 0.3 is not the likeliest; it is kept of a draft that gives it 0.4, and not of one that is certain."""
    weights = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    passes = []
    for draft in (weights[[1, 0, 2, 3, 4, 5]], torch.eye(SIZE, dtype=torch.float64)[1] + 1e-9):
        large, small = whole(), whole()
        large.distribution = lambda context: weights  # type: ignore[method-assign]
        small.distribution = lambda context, draft=draft: draft  # type: ignore[method-assign, misc]
        cascade = Cascade([ModelDrafter(large, SIZE), ModelDrafter(small, SIZE)], [[8, 0], [0, 3]], lenience=2.0)
        cascade.propose(begun(cascade, [1, 2]), [8], POLICY)
        passes.append(large.passes)
    assert passes == [2, 8]


@pytest.mark.parametrize("k", [[[4, 0], [0, 0]], [[4, 0], [0, 2]]], ids=["alone", "reviewing"])
def test_what_is_cached_is_not_fed_again(k: list[list[int]]) -> None:
    """A context that goes on from the last proposal costs the tokens that the cache lacks, and not one more."""
    model = whole()
    cascade = Cascade([ModelDrafter(model, SIZE), Counted([1])], k)
    rows = begun(cascade, [1, 2, 3, 4, 5, 1, 2, 3])
    first = lists(cascade.propose(rows, [4], POLICY))[0]
    model.fed = model.passes = 0
    cascade.propose(rows.with_draft([first], 1), [1], POLICY)
    assert (model.fed, model.passes) == (1, 1)
    model.fed = model.passes = 0
    cascade.propose(rows.with_draft([[*first[:2], (first[2] + 1) % SIZE]], 0), [1], POLICY)
    assert (model.fed, model.passes) == (1, 1), "the two tokens that are the same are still cached"


def test_confidence_is_the_reviewers_where_a_lossy_rule_asks_for_it() -> None:
    model = whole()
    cascade = Cascade([ModelDrafter(model, SIZE), Counted([3])], [[3, 2], [0, 2]])
    rule = make_rule("lenience")
    rows = Rows([make_row([1, 2])], needs=rule.needs)
    cascade.admit(rows, 0)
    proposal = cascade.propose(rows, [64], POLICY)
    context, n = [1, 2], proposal.num_tokens[0]
    assert proposal.confidence is not None and proposal.confidence.shape == proposal.token_ids.shape
    for token, sure in zip(lists(proposal)[0][: n - 2], proposal.confidence[0].tolist(), strict=False):
        assert sure == pytest.approx(float(model.distribution(context)[token]), abs=1e-5)
        context.append(token)
    assert float(proposal.confidence[0, n - 1]) == 1.0, "a token that no model drafted is held for certain"
