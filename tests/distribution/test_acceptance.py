"""The rules' identities in float64, by enumeration and over random distributions, no loop involved."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foresay.decoding.acceptance import Block, _extra_tokens, _joint, make_rule, residual
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.randomness import Streams


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


@pytest.mark.parametrize("kind_p", KINDS)
def test_accepted_and_residual_mass_add_up_to_the_target(kind_p: str) -> None:
    """min(p, q) + (1 - alpha) * residual = p (Leviathan et al. 2023, Theorem 1)."""
    generator = torch.Generator().manual_seed(1)
    for size, kind_q, _ in itertools.product((2, 5, 50), KINDS, range(10)):
        p, q = distribution(generator, size, kind_p), distribution(generator, size, kind_q)
        overlap = torch.minimum(p, q)
        out = overlap + (1 - overlap.sum()) * residual(p, q)
        torch.testing.assert_close(out, p, atol=1e-12, rtol=0)
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]).double(), torch.tensor([0.0, 0.0, 0.3, 0.7]).double()
    torch.testing.assert_close(residual(p, q), p)
    torch.testing.assert_close(residual(p, p), p)


Table = dict[tuple[int, ...], torch.Tensor]


def _table(generator: torch.Generator, size: int, depth: int, kind: str) -> Table:
    """A distribution after each prefix of less than `depth` tokens."""
    prefixes = (prefix for n in range(depth) for prefix in itertools.product(range(size), repeat=n))
    return {prefix: distribution(generator, size, kind) for prefix in prefixes}


def _thresholds(target: Table, draft: Table, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """pi and h of one draft."""
    k = len(tokens)
    p = Distributions(
        torch.zeros(1, k + 1, dtype=torch.int64),
        torch.stack([target[tokens[:i]] for i in range(k + 1)]),
        torch.arange(k + 1)[None],
    )
    q = torch.stack([draft[tokens[:i]] for i in range(k)])
    proposal = Proposal(torch.tensor([tokens]), [k], q, torch.arange(k)[None])
    pi = _joint(p.prob_of(proposal.token_ids), q[torch.arange(k), torch.tensor(tokens)][None])
    return pi[0], Block._thresholds(p, proposal, pi)[0]


def _probability(table: Table, tokens: tuple[int, ...], start: int = 0) -> float:
    return math.prod(float(table[tokens[:i]][tokens[i]]) for i in range(start, len(tokens)))


def _written_by_blocks(target: Table, draft: Table, k: int, size: int) -> torch.Tensor:
    """The distribution of the first k + 1 tokens under one block verification, continued by the target, by enumeration."""
    out = torch.zeros((size,) * (k + 1), dtype=torch.float64)
    for tokens in itertools.product(range(size), repeat=k):
        if (q := _probability(draft, tokens)) == 0:
            continue
        pi, h = _thresholds(target, draft, tokens)
        h = torch.where(pi > 0, h.clamp(0, 1), 0.0)
        for count in range(k, -1, -1):
            prob = q * math.prod(1 - float(one) for one in h[count:]) * (float(h[count - 1]) if count else 1.0)
            p = target[tokens[:count]]
            if count < k:
                p = residual(p * (float(pi[count - 1]) if count else 1.0), draft[tokens[:count]])
            for rest in itertools.product(range(size), repeat=k + 1 - count):
                whole = (*tokens[:count], *rest)
                out[whole] += prob * float(p[rest[0]]) * _probability(target, whole, count + 1)
    return out


@pytest.mark.parametrize(
    ("kind_p", "kind_q"), [("dense", "dense"), ("zeros", "dense"), ("dense", "zeros"), ("peaked", "zeros")]
)
@pytest.mark.parametrize(("size", "k"), [(2, 1), (2, 3), (3, 2)])
def test_block_verification_writes_the_targets_distribution(size: int, k: int, kind_p: str, kind_q: str) -> None:
    """Sun et al. 2024, Theorem 1, by enumeration of every draft, count and extra token."""
    generator = torch.Generator().manual_seed(size * 10 + k)
    target, draft = _table(generator, size, k + 1, kind_p), _table(generator, size, k, kind_q)
    out = _written_by_blocks(target, draft, k, size)
    for tokens in itertools.product(range(size), repeat=k + 1):
        assert float(out[tokens]) == pytest.approx(_probability(target, tokens), abs=1e-9)


def test_block_verification_accepts_no_less_than_token_verification() -> None:
    """Expected accepted length, by enumeration (Sun et al. 2024, Theorem 2)."""
    generator = torch.Generator().manual_seed(3)
    size, k, gains = 3, 3, []
    for _ in range(6):
        target, draft = _table(generator, size, k + 1, "dense"), _table(generator, size, k, "dense")
        gain = 0.0
        for tokens in itertools.product(range(size), repeat=k):
            _, h = _thresholds(target, draft, tokens)
            block = sum(i * float(h[i - 1]) * math.prod(1 - float(one) for one in h[i:]) for i in range(1, k + 1))
            ratios = [float(target[tokens[:i]][tokens[i]] / draft[tokens[:i]][tokens[i]]) for i in range(k)]
            token = sum(math.prod(min(1.0, one) for one in ratios[:i]) for i in range(1, k + 1))
            gain += _probability(draft, tokens) * (block - token)
        gains.append(gain)
    assert min(gains) > -1e-9 and max(gains) > 1e-3


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
    assert 0 in accepted and max(accepted) > 0


def test_a_rejected_point_mass_is_never_the_extra_token() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]])
    target = Distributions(torch.zeros(1, 2, dtype=torch.int64), p.repeat(2, 1), torch.tensor([[0, 1]]))
    proposal = Proposal(torch.tensor([[2]]), [1])
    drawn = {
        int(_extra_tokens(target, proposal, torch.tensor([0]), torch.tensor([u], dtype=torch.float64))[0])
        for u in torch.linspace(0.001, 0.999, 200).tolist()
    }
    assert drawn == {0, 1}
