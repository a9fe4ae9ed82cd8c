"""Length policies: the heuristic by hand, thresholds by their distributions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from foresay import Rows, Step, TableModel
from foresay.decoding.distributions import build_distributions
from foresay.decoding.stopping import DraftStep
from foresay.drafters import ModelDrafter
from foresay.lengths import ConfidenceLength, EntropyLength, HeuristicLength
from helpers.making import make_row, make_rows

SIZE = 5


def step(drafted: int, accepted: int) -> Step:
    return Step(0, (0,) * (accepted + 1), (), drafted, accepted)


def trace(policy: HeuristicLength, *outcomes: tuple[int, int]) -> list[int]:
    """The budgets before each outcome (drafted, accepted), and after the last."""
    rows = Rows([make_row()])
    out = policy.budget(rows)
    for drafted, accepted in outcomes:
        policy.observe(rows, [step(drafted, accepted)])
        out += policy.budget(rows)
    return out


def test_the_heuristic_by_hand_and_row_by_row() -> None:
    assert trace(HeuristicLength(), (5, 5), (7, 6), (6, 6), (8, 0)) == [5, 7, 6, 8, 7]
    assert trace(HeuristicLength(), (3, 3)) == [5, 7], "a draft that is shorter than its budget may hold whole"
    assert trace(HeuristicLength(), (0, 0), (0, 0)) == [5, 5, 5], "no draft changes nothing"
    assert trace(HeuristicLength(2), *[(2, 0)] * 3) == [2, 1, 1, 1]
    assert trace(HeuristicLength(19), (19, 19), (20, 20), (20, 3)) == [19, 20, 20, 19]
    assert trace(HeuristicLength(4, up=3, down=2, low=2, high=8), (4, 4), (7, 7), (8, 1), (6, 0), (4, 0), (2, 0)) == [
        *(4, 7, 8, 6, 4, 2, 2)
    ]
    policy, rows = HeuristicLength(), Rows([make_row(), make_row(), make_row()])
    policy.observe(rows, [step(5, 5), step(5, 1), step(0, 0)])
    assert policy.budget(rows) == [7, 4, 5]
    assert policy.budget(Rows([rows[2], rows[0], make_row()])) == [5, 7, 5], "a row takes its length along"


PROBS = torch.tensor([0.5, 0.2, 0.2, 0.06, 0.04])


def draft_tokens(*tokens: int, params: tuple[dict[str, Any], ...]) -> DraftStep:
    """One drawn token for each row, all from the same raw scores."""
    rows = make_rows(*params)
    distributions = build_distributions(PROBS.log().expand(len(tokens), 1, -1).clone(), rows)
    return DraftStep(torch.zeros(len(tokens), dtype=torch.int64), torch.tensor(tokens), distributions)


GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
COLD: dict[str, Any] = {"temperature": 0.5}
TOP: dict[str, Any] = {"temperature": 1.0, "top_k": 1}


def going(policy: ConfidenceLength | EntropyLength, one: DraftStep, index: int = 0) -> list[bool]:
    rows = make_rows(*[{}] * len(one.token_ids))
    going_on = policy.stopping(rows).keep(dataclasses.replace(one, index=one.index + index))
    assert going_on is not None
    return going_on.tolist()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.19, [True, True, True, True, False]),
        (0.45, [True, False, True, True, False]),
        (0.55, [False, False, True, True, False]),
        (0.9, [False, False, False, True, False]),
    ],
)
def test_confidence_looks_at_what_was_drawn_from(threshold: float, expected: list[bool]) -> None:
    """q(x) of a sampled token after all processing; of a greedy one the softmax at temperature 1."""
    q_cold = float(PROBS[0] ** 2 / (PROBS**2).sum())
    assert 0.55 < q_cold < 0.9
    one = draft_tokens(0, 1, 0, 0, 4, params=(GREEDY, SAMPLED, COLD, TOP, SAMPLED))
    assert going(ConfidenceLength(threshold), one) == expected
    assert going(ConfidenceLength(threshold), draft_tokens(0, params=(GREEDY,))) == [expected[0]]
    all_sampled = draft_tokens(1, 4, params=(SAMPLED, SAMPLED))
    assert going(ConfidenceLength(threshold), all_sampled) == [expected[1], expected[4]]


def entropy(distribution: torch.Tensor) -> float:
    return -sum(p * math.log(p) for p in distribution.tolist() if p)


def test_entropy_is_of_the_law_drawn_from_in_nats() -> None:
    raw, cold = entropy(PROBS), entropy(PROBS**2 / (PROBS**2).sum())
    assert cold < raw - 0.2
    one = draft_tokens(0, 1, 1, 0, params=(GREEDY, SAMPLED, COLD, TOP))
    for threshold, expected in ((raw + 0.01, [True] * 4), (raw - 0.01, [False, False, True, True])):
        assert going(EntropyLength(threshold), one) == expected
    assert going(EntropyLength(cold - 0.01), one) == [False, False, False, True]
    assert going(EntropyLength(0.0), one)[3], "a distribution of one token has no entropy"
    for margin in (-0.01, 0.01):
        assert going(EntropyLength(raw + margin), draft_tokens(0, params=(GREEDY,))) == [margin > 0]
    # a score of minus infinity does no harm
    scores = torch.tensor([0.5, 0.5, 0.0]).log()[None, None]
    for params in (GREEDY, SAMPLED):
        one = DraftStep(torch.tensor([0]), torch.tensor([0]), build_distributions(scores.clone(), make_rows(params)))
        assert going(EntropyLength(math.log(2) + 0.001), one) == [True]
        assert going(ConfidenceLength(0.499), one) == [True]


@pytest.mark.parametrize("kind", [ConfidenceLength, EntropyLength])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_unsure_token_stays_within_the_bounds(kind: type, params: dict[str, Any]) -> None:
    """A policy that nothing satisfies drafts `low` tokens, one that anything does `high`, never more than may be kept."""
    model = TableModel.random(SIZE, seed=2)
    never, always = (1.0, 0.0) if kind is ConfidenceLength else (0.0, 100.0)
    for threshold, low, high, wanted in ((never, 1, 6, 1), (never, 3, 6, 3), (always, 1, 6, 6), (never, 6, 6, 6)):
        drafter, policy = ModelDrafter(model, SIZE), kind(threshold, low=low, high=high)
        rows = Rows([make_row([1], **params), make_row([2, 3], **params)])
        drafter.admit(rows, 0)
        assert policy.budget(rows) == [high, high]
        proposal = drafter.propose(rows, policy.budget(rows), policy)
        assert list(proposal.num_tokens) == [wanted, wanted]


def test_rows_stop_one_by_one_and_at_the_first_unsure_token() -> None:
    """Each row's draft ends with its first token below the threshold, whatever the others do."""
    model = TableModel.random(SIZE, seed=4, concentration=0.5)
    drafter, policy = ModelDrafter(model, SIZE), ConfidenceLength(0.5, high=12)
    rows = Rows([make_row([i, j], seed=3 * i + j, temperature=float(j > 2)) for i in range(4) for j in range(SIZE)])
    drafter.admit(rows, 0)
    proposal = drafter.propose(rows, policy.budget(rows), policy)
    for row, tokens, n in zip(rows, proposal.token_ids.tolist(), proposal.num_tokens, strict=True):
        context = row.tokens.tolist()
        sure = []
        for token in tokens[:n]:
            sure.append(float(model.distribution(context)[token]) >= 0.5)
            context.append(token)
        assert all(sure[:-1]) and (n == 12 or not sure[-1])
    assert len(set(proposal.num_tokens)) > 3
