from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Rows, RuleNeeds
from foresay.decoding.sampling_params import MAX_SEED
from helpers.making import make_row

CPU = torch.device("cpu")
MANY = 20_000
FAR = 4.5 / MANY**0.5
"""A correlation of independent numbers exceeds this once in 150 000 times."""


def series(seed: int = 3, purpose: Purpose = Purpose.DRAFT, first: int = 0) -> np.ndarray:
    streams = Streams(torch.tensor([seed]), torch.tensor([10]))
    return streams.uniform(purpose, torch.arange(first, first + MANY))[0].numpy()


def noise(seed: int, start: int, offset: int, vocab: int = 50, level: int = 0) -> torch.Tensor:
    streams = Streams(torch.tensor([seed]), torch.tensor([start]), level=level, shares_noise=True)
    return streams.gumbel(torch.tensor(0), torch.tensor(offset), torch.arange(vocab))


def test_no_two_field_combinations_share_a_number() -> None:
    seeds, purposes, levels, starts, offsets = (0, 1, MAX_SEED), list(Purpose), range(3), range(1, 9), range(8)
    rows = [(seed, start) for seed in seeds for start in starts]
    together = [
        Streams(*(torch.tensor(column) for column in zip(*rows, strict=True)), level=level).uniform(
            purpose, torch.tensor(offsets)
        )
        for level in levels
        for purpose in purposes
    ]
    assert len(torch.cat(together).unique()) == len(seeds) * len(purposes) * len(levels) * len(starts) * len(offsets)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_are_uniform(purpose: Purpose) -> None:
    for seed in (0, 1, MAX_SEED):
        values = series(seed, purpose)
        assert values.min() > 0 and values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_numbers_of_adjacent_seeds_and_starts_are_uniform() -> None:
    offsets = torch.zeros(1, dtype=torch.int64)
    by_seed = Streams(torch.arange(MANY), torch.full((MANY,), 9)).uniform(Purpose.ACCEPT, offsets)[:, 0]
    by_start = Streams(torch.full((MANY,), 9), torch.arange(MANY)).uniform(Purpose.ACCEPT, offsets)[:, 0]
    assert stats.kstest(by_seed.numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(by_start.numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(by_start.numpy() ** 1.05, "uniform").pvalue < 1e-3, "the test has the power to see a bend"


def test_purposes_offsets_and_adjacent_seeds_are_uncorrelated() -> None:
    for purpose, other in combinations(Purpose, 2):
        assert abs(np.corrcoef(series(purpose=purpose), series(purpose=other))[0, 1]) < FAR
    values = series()
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(values, series(first=lag))[0, 1]) < FAR
        assert abs(np.corrcoef(values, series(seed=3 + lag))[0, 1]) < FAR
    assert np.corrcoef(values, values + 0.1 * series(seed=99))[0, 1] > FAR


def test_gumbel_noise_depends_on_the_position_not_on_how_it_is_reached() -> None:
    """Nor on the batch, the vocabulary or the tokens that it is computed for."""
    here = noise(3, start=5, offset=2)
    assert torch.equal(here, noise(3, start=7, offset=0))
    assert torch.equal(here, noise(3, start=5, offset=2, level=4))
    assert not torch.equal(here, noise(3, start=5, offset=3))
    assert not torch.equal(here, noise(4, start=5, offset=2))
    streams = Streams(torch.tensor([9, 3, 3]), torch.tensor([1, 5, 7]), shares_noise=True)
    wide, same, other = (
        streams.gumbel(torch.tensor(row), torch.tensor(offset), torch.arange(80))
        for row, offset in ((1, 2), (2, 0), (0, 6))
    )
    assert torch.equal(wide[:50], here) and torch.equal(wide, same) and not torch.equal(wide, other)
    some = streams.gumbel(torch.tensor(1), torch.tensor(2), torch.tensor([7, 3, 60]))
    assert torch.equal(some, wide[[7, 3, 60]])


def test_gumbel_noise_is_gumbel_and_shares_nothing_with_the_uniforms() -> None:
    values = noise(3, 10, 0, vocab=MANY).double().numpy()
    assert np.isfinite(values).all() and stats.kstest(values, "gumbel_r").pvalue > 1e-3
    for purpose in Purpose:
        assert abs(np.corrcoef(np.exp(-np.exp(-values)), series(purpose=purpose))[0, 1]) < FAR


def test_streams_follow_the_rows_as_they_grow() -> None:
    rows = Rows(
        [make_row([1, 2], seed=5), make_row([1, 2, 3], seed=MAX_SEED)], level=2, needs=RuleNeeds(shares_noise=True)
    )
    before = rows.streams(CPU)
    rows[0].extend([4, 4])
    after = rows.streams(CPU)
    assert (before.seeds.tolist(), before.starts.tolist()) == ([5, MAX_SEED], [2, 3])
    assert (after.starts.tolist(), after.level, after.shares_noise) == ([4, 3], 2, True)
