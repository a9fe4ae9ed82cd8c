"""The rules that are not exact, against their formulas: by enumeration, by counting uniforms, and decision by decision."""

from __future__ import annotations

import math

import pytest
import torch

from foresay import Proposal, Rows, SamplingParams, TableModel
from foresay.decoding.acceptance import Lenience, Rule, Typical
from foresay.decoding.distributions import Distributions, build_distributions
from foresay.decoding.randomness import Streams
from foresay.drafters import ModelDrafter, PromptLookup
from helpers.making import make_row
from helpers.support import run

BATCH = 12_000
"""Rows that differ in their seeds alone, so that frequencies stand for probabilities."""
ERROR = 4 * math.sqrt(0.25 / BATCH)


def distribution(*weights: float) -> torch.Tensor:
    return torch.tensor(weights) / sum(weights)


P, AFTER, Q = distribution(5, 3, 1.5, 0.5, 0), distribution(1, 1, 1, 1, 6), distribution(0, 5, 4, 0.5, 0.5)


def verified(
    rule: Rule, tokens: list[int], q: torch.Tensor | None, *distributions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, extra token) of BATCH sampled rows with these target distributions. q: of the draft; None for point masses."""
    width, count = len(distributions), len(tokens)
    target = Distributions(
        torch.zeros(BATCH, width, dtype=torch.int64),
        torch.stack(distributions),
        torch.arange(width).expand(BATCH, width),
        torch.stack(distributions).log().expand(BATCH, -1, -1),
    )
    sampled = () if q is None else (q[None], torch.zeros(BATCH, count, dtype=torch.int64))
    proposal = Proposal(torch.tensor(tokens).expand(BATCH, -1), [count] * BATCH, *sampled)
    streams = Streams(torch.arange(BATCH) * 7 + 3, torch.full((BATCH,), 11))
    verification = rule.verify(target, proposal, streams)
    return verification.num_accepted, verification.token_ids


def shares(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=5) / max(1, len(tokens))


@pytest.mark.parametrize("lenience", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "point"])
def test_lenience_divides_q(lenience: float, sampled: bool) -> None:
    """Kept with min(1, l p / q), and else a draw from norm(max(0, p - q / l)); q = 1 for a point mass.

    Sampled drafts write sum_x q(x) (a(x) [x] + (1 - a(x)) residual), the target's distribution at l = 1 and not at 2.
    """
    written = torch.zeros(5)
    for token in range(1, 5):
        q = Q if sampled else torch.eye(5)[token]
        accepted, extra = verified(Lenience(lenience), [token], Q if sampled else None, P, AFTER)
        wanted = min(1.0, lenience * float(P[token]) / float(q[token]))
        assert float((accepted == 1).float().mean()) == pytest.approx(wanted, abs=ERROR)
        left = (P - q / lenience).clamp(min=0)
        if wanted < 1:
            torch.testing.assert_close(shares(extra[accepted == 0]), left / left.sum(), atol=0.04, rtol=0)
        if wanted > 0.05:
            torch.testing.assert_close(shares(extra[accepted == 1]), AFTER, atol=0.04, rtol=0)
        written += Q[token] * shares(torch.where(accepted == 1, token, extra))
    if sampled:
        accept = (lenience * P / Q.clamp(min=1e-9)).clamp(max=1)
        expected = Q * accept + (Q * (1 - accept)).sum() * left / left.sum()
        torch.testing.assert_close(written, expected, atol=0.01, rtol=0)
        assert bool((expected - P).abs().max() < 1e-6) == (lenience == 1.0)


def test_a_lenient_draft_ends_at_its_first_rejection() -> None:
    accepted, _ = verified(Lenience(2.0), [1, 4, 2], Q, P, P, P, AFTER)
    assert set(accepted.unique().tolist()) == {1}, "1 is always kept, p(4) = 0 never"


ONE_ROW = Streams(torch.tensor([1]), torch.tensor([5]))


def greedy_target(*distributions: torch.Tensor) -> Distributions:
    return build_distributions(torch.stack(distributions).log()[None], Rows([make_row()]))


@pytest.mark.parametrize(
    ("lenience", "token", "confidence", "kept"),
    [
        (2.0, 0, 1.0, True),
        (1.0, 0, None, True),
        (2.0, 1, 0.59, True),  # 0.3 > 0.59 / 2
        (2.0, 1, 0.61, False),
        (3.5, 1, None, True),  # no model drafted it: q = 1, and 0.3 > 1 / 3.5
        (3.3, 1, None, False),
        (1e6, 4, 0.5, False),  # impossible for the target
        (1.0, 1, None, False),
        (1.0, 1, 0.1, False),  # 1 is exact, for the draft of a model too
    ],
)
def test_a_greedy_row_also_keeps_what_is_likely_enough(
    lenience: float, token: int, confidence: float | None, kept: bool
) -> None:
    """p(x) > q(x) / l, with p and q the softmax at temperature 1; its own choice always stays, and it goes on greedily."""
    sure = None if confidence is None else torch.tensor([[confidence]])
    proposal = Proposal(torch.tensor([[token]]), [1], confidence=sure)
    verification = Lenience(lenience).verify(greedy_target(P, AFTER), proposal, ONE_ROW)
    assert bool(verification.num_accepted[0]) == kept
    assert int(verification.token_ids[0]) == int((AFTER if kept else P).argmax())


@pytest.mark.parametrize(("eps", "delta"), [(0.3, 0.09), (0.2, 0.5), (0.0, 0.5)])
def test_typical_acceptance_is_its_formula(eps: float, delta: float) -> None:
    """x is kept iff p(x) > min(eps, delta exp(-H(p))), whatever q; then, and after a rejection, a draw from p."""
    for p in (P, distribution(1, 1, 1, 1, 1), distribution(97, 1, 1, 1, 0), distribution(1, 0, 0, 0, 0)):
        bar = min(eps, delta * math.exp(sum(x * math.log(x) for x in p.tolist() if x)))
        for token in range(5):
            accepted, extra = verified(Typical(eps, delta), [token], (Q, None)[token % 2], p, AFTER)
            kept = float(p[token]) > bar
            assert bool((accepted == int(kept)).all())
            torch.testing.assert_close(shares(extra), AFTER if kept else p, atol=0.02, rtol=0)


def test_typical_acceptance_of_a_greedy_row_keeps_its_argmax_alone() -> None:
    target = greedy_target(P, P, P, AFTER)
    for rule in (Typical(0.0, 0.0), Typical(1.0, 1.0)):
        verification = rule.verify(target, Proposal(torch.tensor([[0, 0, 1]]), [3]), ONE_ROW)
        assert (int(verification.num_accepted[0]), int(verification.token_ids[0])) == (2, 0)
    both = build_distributions(P.log().expand(2, 2, -1), Rows([make_row(), make_row(temperature=1.0)]))
    streams = Streams(*torch.ones(2, 2).long())
    verification = Typical(1.0, 1.0).verify(both, Proposal(torch.tensor([[0], [3]]), [1, 1]), streams)
    assert verification.num_accepted.tolist() == [1, 0], "next to a sampled row too"


@pytest.mark.parametrize("rule", [Lenience(3.0), Typical()], ids=lambda rule: rule.name)
def test_a_row_is_verified_as_if_alone(rule: Rule) -> None:
    """Greedy and sampled rows with ragged drafts write in a batch what they write alone, and report that they are lossy."""
    model, draft = (TableModel.random(5, seed=seed, concentration=0.6) for seed in (3, 4))
    prompts = [[1], [2, 3], [4], [0, 1], [2]]
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=20) for i in range(5)]
    for drafter in (lambda: PromptLookup(min_ngram=1), lambda: ModelDrafter(draft, 5)):
        together, steps, engine = run(model, prompts, params, drafter=drafter(), rule=rule, join_later=2)
        assert engine.draft_failures == 0 and any(s.num_accepted < s.num_drafted for s in steps)
        for prompt, one, output in zip(prompts, params, together, strict=True):
            assert run(model, [prompt], one, drafter=drafter(), rule=rule)[0] == [output]
    assert rule.exact is False and not rule.needs.shares_noise
    assert rule.needs.confidence is (rule.name == "lenience")
