"""The rules that are not exact, against their formulas: by enumeration, by counting uniforms, and decision by decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foresay.decoding.acceptance import Lenience, Rule, Speculative, Typical
from foresay.decoding.distributions import Distributions, build_distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter, PromptLookup
from foresay.models.table import TableModel
from helpers.making import make_row
from helpers.support import run

BATCH = 12_000
"""Rows that differ in their seeds alone, so that frequencies stand for probabilities."""
ERROR = 4 * math.sqrt(0.25 / BATCH)


def distribution(*weights: float) -> torch.Tensor:
    return torch.tensor(weights) / sum(weights)


P, AFTER, Q = distribution(5, 3, 1.5, 0.5, 0), distribution(1, 1, 1, 1, 6), distribution(0, 5, 4, 0.5, 0.5)


def verified(rule: Rule, proposal: Proposal, *distributions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, extra token) of BATCH sampled rows, all with these target distributions at their positions."""
    width = len(distributions)
    target = Distributions(
        torch.zeros(BATCH, width, dtype=torch.int64),
        torch.stack(distributions),
        torch.arange(width).expand(BATCH, width),
        torch.stack(distributions).log().expand(BATCH, -1, -1),
    )
    streams = Streams(torch.arange(BATCH) * 7 + 3, torch.full((BATCH,), 11))
    verification = rule.verify(target, proposal, streams)
    return verification.num_accepted, verification.token_ids


def drafted(*tokens: int, q: torch.Tensor | None = None) -> Proposal:
    """The same draft for BATCH rows, drawn from q; point masses when there is none."""
    ids, counts = torch.tensor(tokens).expand(BATCH, -1), [len(tokens)] * BATCH
    if q is None:
        return Proposal(ids, counts)
    return Proposal(ids, counts, q[None], torch.zeros(BATCH, len(tokens), dtype=torch.int64))


def shares(tokens: torch.Tensor, size: int = 5) -> torch.Tensor:
    return torch.bincount(tokens, minlength=size) / max(1, len(tokens))


@pytest.mark.parametrize("lenience", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "point"])
@pytest.mark.parametrize("token", range(1, 5))
def test_lenience_divides_q(lenience: float, sampled: bool, token: int) -> None:
    """Kept with min(1, l p / q), and else a draw from norm(max(0, p - q / l)); q = 1 for a point mass."""
    q = Q if sampled else torch.eye(5)[token]
    accepted, extra = verified(Lenience(lenience), drafted(token, q=Q if sampled else None), P, AFTER)
    wanted = min(1.0, lenience * float(P[token]) / float(q[token]))
    assert float((accepted == 1).float().mean()) == pytest.approx(wanted, abs=ERROR)
    left = (P - q / lenience).clamp(min=0)
    if wanted < 1:
        torch.testing.assert_close(shares(extra[accepted == 0]), left / left.sum(), atol=0.04, rtol=0)
    if wanted > 0.05:
        torch.testing.assert_close(shares(extra[accepted == 1]), AFTER, atol=0.04, rtol=0)


@pytest.mark.parametrize("lenience", [1.0, 2.0])
def test_the_law_that_a_lenient_rule_writes(lenience: float) -> None:
    """Enumerated over the draft token: sum_x q(x) (a(x) [x] + (1 - a(x)) residual). The target's at l = 1, not at 2."""
    accept = (lenience * P / Q.clamp(min=1e-9)).clamp(max=1)
    left = (P - Q / lenience).clamp(min=0)
    wanted = Q * accept + (Q * (1 - accept)).sum() * left / left.sum()
    got = torch.zeros(5)
    for token in range(1, 5):
        accepted, extra = verified(Lenience(lenience), drafted(token, q=Q), P, AFTER)
        first = torch.where(accepted == 1, token, extra)
        got += Q[token] * shares(first)
    torch.testing.assert_close(got, wanted, atol=0.01, rtol=0)
    assert bool((wanted - P).abs().max() < 1e-6) == (lenience == 1.0)


def test_a_lenient_draft_ends_at_its_first_rejection() -> None:
    accepted, _ = verified(Lenience(2.0), drafted(1, 4, 2, q=Q), P, P, P, AFTER)
    assert set(accepted.unique().tolist()) == {1}, "1 is always kept, p(4) = 0 never"


def test_lenience_of_one_decides_as_speculative_sampling_does() -> None:
    """Sampled rows, and greedy ones whose draft tokens no model made: the same verifications from the same streams."""
    generator = torch.Generator().manual_seed(1)
    size, width, batch = 7, 5, 64
    p = torch.rand(batch * (width + 1), size, generator=generator) ** 4
    q = torch.rand(batch * width, size, generator=generator) ** 4
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(size, (batch, width), generator=generator)
    index = torch.arange(batch * width).view(batch, width)
    unsampled = torch.rand(batch, width, generator=generator) < 0.3  # for which speculative uses other numbers
    places = torch.arange(batch * (width + 1)).view(batch, width + 1)
    points = p[places].argmax(-1)
    points[:, :3] = torch.where(torch.rand(batch, 3, generator=generator) < 0.7, tokens[:, :3], points[:, :3])
    for greedy in (slice(0, 0), slice(0, batch, 3), slice(0, batch)):
        at = places.clone()
        at[greedy] = -1
        named = torch.where(unsampled & (at[:, :1] < 0), -1, index)
        target = Distributions(points, p, at, p[places].log())
        proposal = Proposal(tokens, [i % (width + 1) for i in range(batch)], q, named)
        streams = Streams(torch.arange(batch), torch.arange(batch) + 5)
        one, other = (rule.verify(target, proposal, streams) for rule in (Lenience(1.0), Speculative()))
        assert torch.equal(one.num_accepted, other.num_accepted) and torch.equal(one.token_ids, other.token_ids)
        assert len(one.num_accepted.unique()) > 2


def greedy_target(*distributions: torch.Tensor) -> Distributions:
    rows = Rows([make_row()])
    return build_distributions(torch.stack(distributions).log()[None], rows)


def accepts(lenience: float, p: torch.Tensor, token: int, confidence: float | None) -> bool:
    sure = None if confidence is None else torch.tensor([[confidence]])
    verification = Lenience(lenience).verify(
        greedy_target(p, AFTER),
        Proposal(torch.tensor([[token]]), [1], confidence=sure),
        Streams(torch.tensor([1]), torch.tensor([5])),
    )
    count, extra = int(verification.num_accepted[0]), int(verification.token_ids[0])
    assert extra == int((AFTER if count else p).argmax()), "a greedy row goes on with the target's own token"
    return count == 1


def test_a_greedy_row_also_keeps_what_is_likely_enough() -> None:
    """p(x) > q(x) / l, with p and q the softmax at temperature 1; its own choice always stays."""
    assert accepts(2.0, P, 0, 1.0) and accepts(1.0, P, 0, None)
    assert accepts(2.0, P, 1, 0.59), "0.3 > 0.59 / 2"
    assert not accepts(2.0, P, 1, 0.61)
    assert accepts(3.5, P, 1, None), "no model drafted it: q = 1, and 0.3 > 1 / 3.5"
    assert not accepts(3.3, P, 1, None)
    assert not accepts(1e6, P, 4, 0.5), "what the target thinks impossible never stays"
    assert not accepts(1.0, P, 1, None)


def test_lenience_of_one_is_exact_for_a_greedy_row_and_a_draft_model_too() -> None:
    """The class documents that 1 is exact speculative sampling."""
    target, draft = TableModel.random(6, seed=1, concentration=2.0), TableModel.random(6, seed=2, concentration=9.0)
    params = SamplingParams(max_new_tokens=60)
    exact = run(target, [[1], [2]], params, gamma=0)[0]
    assert run(target, [[1], [2]], params, drafter=ModelDrafter(draft, 6), rule=Lenience(1.0))[0] == exact


@pytest.mark.parametrize(("eps", "delta"), [(0.3, 0.09), (0.2, 0.5), (0.07, 1.0), (1.0, 1.0), (0.0, 0.5)])
def test_typical_acceptance_is_its_formula(eps: float, delta: float) -> None:
    """x is kept iff p(x) > min(eps, delta exp(-H(p))), whatever q; then, and after a rejection, a draw from p."""
    for p in (P, distribution(1, 1, 1, 1, 1), distribution(97, 1, 1, 1, 0), distribution(1, 0, 0, 0, 0)):
        entropy = -sum(x * math.log(x) for x in p.tolist() if x)
        bar = min(eps, delta * math.exp(-entropy))
        for token in range(5):
            for q in (Q, None):
                accepted, extra = verified(Typical(eps, delta), drafted(token, q=q), p, AFTER)
                kept = float(p[token]) > bar
                assert bool((accepted == int(kept)).all())
                torch.testing.assert_close(shares(extra), AFTER if kept else p, atol=0.02, rtol=0)


def test_typical_acceptance_of_a_greedy_row_keeps_its_argmax_alone() -> None:
    streams = Streams(torch.tensor([1]), torch.tensor([5]))
    target = greedy_target(P, P, P, AFTER)
    for rule in (Typical(0.0, 0.0), Typical(1.0, 1.0)):
        verification = rule.verify(target, Proposal(torch.tensor([[0, 0, 1]]), [3]), streams)
        assert (int(verification.num_accepted[0]), int(verification.token_ids[0])) == (2, 0)
    both = build_distributions(P.log().expand(2, 2, -1), Rows([make_row(), make_row(temperature=1.0)]))
    verification = Typical(1.0, 1.0).verify(
        both, Proposal(torch.tensor([[0], [3]]), [1, 1]), Streams(*torch.ones(2, 2).long())
    )
    assert verification.num_accepted.tolist() == [1, 0], "next to a sampled row too"


@pytest.mark.parametrize("rule", [Lenience(3.0), Typical()], ids=lambda rule: rule.name)
def test_a_row_is_judged_as_if_alone(rule: Rule) -> None:
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


def test_lossy_rules_keep_more_than_exact_ones() -> None:
    model, draft = (TableModel.random(5, seed=seed, concentration=0.6) for seed in (3, 4))
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=100) for i in range(4)]
    kept: dict[str, int] = {}
    for name, rule in {"exact": Speculative(), "two": Lenience(2.0), "nine": Lenience(9.0)}.items():
        steps: Any = run(model, [[1]] * 4, params, drafter=ModelDrafter(draft, 5), rule=rule)[1]
        kept[name] = len(steps)
    assert kept["exact"] > kept["two"] > kept["nine"]
