"""The rules' identities in float64, by enumeration and over random distributions, no loop involved."""

from __future__ import annotations

import itertools

import pytest
import torch

from foresay.decoding.acceptance import Block, _extra_tokens, _joint, make_rule, residual
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.randomness import Streams
from foresay.errors import UnknownNameError


def distribution(generator: torch.Generator, size: int, kind: str) -> torch.Tensor:
    """A distribution of a kind: dense, with zeros, one-hot, or nearly one-hot."""
    weights = torch.rand(size, generator=generator, dtype=torch.float64)
    if kind == "zeros":
        weights[torch.rand(size, generator=generator) < 0.5] = 0
        weights[int(torch.randint(size, (1,), generator=generator))] += 0.1
    elif kind == "point":
        weights = torch.eye(size, dtype=torch.float64)[int(torch.randint(size, (1,), generator=generator))]
    elif kind == "peaked":
        weights = weights**20
    return weights / weights.sum()


KINDS = ["dense", "zeros", "point", "peaked"]


@pytest.mark.parametrize(("kind_p", "kind_q"), list(itertools.product(KINDS, KINDS)))
def test_accepted_and_residual_mass_add_up_to_the_target(kind_p: str, kind_q: str) -> None:
    """min(p, q) + (1 - alpha) * residual = p (Leviathan et al. 2023, Theorem 1)."""
    generator = torch.Generator().manual_seed(1)
    for size in (2, 5, 50):
        for _ in range(20):
            p, q = distribution(generator, size, kind_p), distribution(generator, size, kind_q)
            overlap = torch.minimum(p, q)
            out = overlap + (1 - overlap.sum()) * residual(p, q)
            torch.testing.assert_close(out, p, atol=1e-12, rtol=0)


def test_disjoint_and_equal_laws() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]).double(), torch.tensor([0.0, 0.0, 0.3, 0.7]).double()
    torch.testing.assert_close(residual(p, q), p)
    torch.testing.assert_close(residual(p, p), p)
    assert not residual(p, p).isnan().any()


def _places(distributions: list[torch.Tensor]) -> Distributions:
    """One row whose positions have these distributions."""
    probs = torch.stack(distributions)
    return Distributions(
        torch.zeros(1, len(distributions), dtype=torch.int64), probs, torch.arange(len(distributions))[None]
    )


def _block_output_distribution(
    target: dict[tuple[int, ...], torch.Tensor], draft: dict[tuple[int, ...], torch.Tensor], k: int, size: int
) -> torch.Tensor:
    """The distribution of the first k + 1 tokens under one block verification, continued by the target, by enumeration."""
    out = torch.zeros((size,) * (k + 1), dtype=torch.float64)
    for draft_tokens in itertools.product(range(size), repeat=k):
        q_guess = 1.0
        for i in range(k):
            q_guess *= float(draft[draft_tokens[:i]][draft_tokens[i]])
        if q_guess == 0:
            continue
        distributions = _places([target[draft_tokens[:i]] for i in range(k + 1)])
        proposal = Proposal(
            torch.tensor([draft_tokens]),
            [k],
            torch.stack([draft[draft_tokens[:i]] for i in range(k)]),
            torch.arange(k)[None],
        )
        q_places = torch.tensor(
            [[float(draft[draft_tokens[:i]][draft_tokens[i]]) for i in range(k)]], dtype=torch.float64
        )
        pi = _joint(distributions.prob_of(proposal.token_ids), q_places)
        h = Block._thresholds(distributions, proposal, pi)[0].clamp(0, 1)
        h = torch.where(pi[0] > 0, h, 0.0)
        for count in range(k, -1, -1):
            prob = q_guess * (float(h[count - 1]) if count else 1.0)
            for j in range(count, k):
                prob *= 1 - float(h[j])
            if prob <= 0:
                continue
            p = target[draft_tokens[:count]]
            extra = (
                residual(p * (float(pi[0, count - 1]) if count else 1.0), draft[draft_tokens[:count]])
                if count < k
                else p
            )
            _round_robin(out, [*draft_tokens[:count]], prob * extra, target, k)
    return out


def _round_robin(
    out: torch.Tensor, prefix: list[int], weights: torch.Tensor, target: dict[tuple[int, ...], torch.Tensor], k: int
) -> None:
    """Add the mass of prefix + next token, continued by the target to k + 1 tokens."""
    for token, weight in enumerate(weights.tolist()):
        if weight <= 0:
            continue
        now = [*prefix, token]
        if len(now) == k + 1:
            out[tuple(now)] += weight
        else:
            _round_robin(out, now, weight * target[tuple(now)], target, k)


def _tree(generator: torch.Generator, size: int, depth: int, kind: str) -> dict[tuple[int, ...], torch.Tensor]:
    return {
        prefix: distribution(generator, size, kind)
        for n in range(depth)
        for prefix in itertools.product(range(size), repeat=n)
    }


@pytest.mark.parametrize(
    ("kind_p", "kind_q"), [("dense", "dense"), ("zeros", "dense"), ("dense", "zeros"), ("peaked", "zeros")]
)
@pytest.mark.parametrize(("size", "k"), [(2, 1), (2, 3), (3, 2)])
def test_block_verification_writes_the_targets_law(size: int, k: int, kind_p: str, kind_q: str) -> None:
    """Sun et al. 2024, Theorem 1, by enumeration of every draft, count and extra token."""
    generator = torch.Generator().manual_seed(size * 10 + k)
    target, draft = _tree(generator, size, k + 1, kind_p), _tree(generator, size, k, kind_q)
    out = _block_output_distribution(target, draft, k, size)
    for tokens in itertools.product(range(size), repeat=k + 1):
        want = 1.0
        for i, token in enumerate(tokens):
            want *= float(target[tokens[:i]][token])
        assert float(out[tokens]) == pytest.approx(want, abs=1e-9)


def test_block_verification_accepts_no_less_than_token_verification() -> None:
    """Expected accepted length, by enumeration (Sun et al. 2024, Theorem 2)."""
    generator = torch.Generator().manual_seed(3)
    size, k = 3, 3
    gains = []
    for _ in range(10):
        target, draft = _tree(generator, size, k + 1, "dense"), _tree(generator, size, k, "dense")
        block = token = 0.0
        for draft_tokens in itertools.product(range(size), repeat=k):
            q = [float(draft[draft_tokens[:i]][draft_tokens[i]]) for i in range(k)]
            p = [float(target[draft_tokens[:i]][draft_tokens[i]]) for i in range(k)]
            weight = float(torch.tensor(q).prod())
            distributions = _places([target[draft_tokens[:i]] for i in range(k + 1)])
            proposal = Proposal(
                torch.tensor([draft_tokens]),
                [k],
                torch.stack([draft[draft_tokens[:i]] for i in range(k)]),
                torch.arange(k)[None],
            )
            pi = _joint(torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64))
            h = Block._thresholds(distributions, proposal, pi)[0]
            none_later = 1.0
            for i in range(k, 0, -1):
                block += weight * i * float(h[i - 1]) * none_later
                none_later *= 1 - float(h[i - 1])
            kept = 1.0
            for i in range(k):
                kept *= min(1.0, p[i] / q[i])
                token += weight * kept
        gains.append(block - token)
    assert min(gains) > -1e-9
    assert max(gains) > 1e-3


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_ragged_rows_are_judged_as_if_alone(rule: str) -> None:
    """Each row of a ragged batch of sampled, mixed and greedy proposals gets the verification it gets by itself."""
    generator = torch.Generator().manual_seed(5)
    size, width, batch = 6, 4, 16
    counts = [i % (width + 1) for i in range(batch)]
    tokens = torch.randint(size, (batch, width), generator=generator)
    p = torch.stack([distribution(generator, size, KINDS[i % 4]) for i in range(batch * (width + 1))]).float()
    q = torch.stack([distribution(generator, size, "dense") for _ in range(batch * width)]).float()
    index = torch.arange(batch * width).view(batch, width).clone()
    index[torch.rand(batch, width, generator=generator) < 0.4] = -1
    target_index = torch.arange(batch * (width + 1)).view(batch, width + 1).clone()
    target_index[::5] = -1
    points = torch.randint(size, (batch, width + 1), generator=generator)
    target = Distributions(points, p, target_index)
    starts, seeds = torch.arange(batch) + 3, torch.arange(batch) * 11
    verify = make_rule(rule).verify
    together = verify(target, Proposal(tokens, counts, q, index), Streams(seeds, starts))
    accepted = []
    for i, n in enumerate(counts):
        alone = verify(
            Distributions(points[i : i + 1, : n + 1], p, target_index[i : i + 1, : n + 1]),
            Proposal(tokens[i : i + 1, :n], [n], q, index[i : i + 1, :n]),
            Streams(seeds[i : i + 1], starts[i : i + 1]),
        )
        assert int(alone.num_accepted[0]) == int(together.num_accepted[i])
        assert int(alone.token_ids[0]) == int(together.token_ids[i])
        accepted.append(int(alone.num_accepted[0]))
    assert 0 in accepted
    assert max(accepted) > 0


def test_a_rejected_point_mass_is_never_the_extra_token() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]])
    target = Distributions(torch.zeros(1, 2, dtype=torch.int64), p.repeat(2, 1), torch.tensor([[0, 1]]))
    proposal = Proposal(torch.tensor([[2]]), [1])
    drawn = {
        int(_extra_tokens(target, proposal, torch.tensor([0]), torch.tensor([u], dtype=torch.float64))[0])
        for u in torch.linspace(0.001, 0.999, 200).tolist()
    }
    assert drawn == {0, 1}


def test_an_unknown_rule_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'coupled'"):
        make_rule("couple")
