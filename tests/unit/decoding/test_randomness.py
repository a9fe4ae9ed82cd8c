from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Rows, RuleNeeds
from foresay.decoding.sampling_params import MAX_SEED
from helpers.making import make_row

CPU = torch.device("cpu")
MANY = 20_000
FAR = 4.5 / MANY**0.5
"""A correlation of independent numbers exceeds this once in 150 000 times."""


def one(seed: int = 3, purpose: Purpose = Purpose.DRAFT, level: int = 0, start: int = 10, offset: int = 0) -> float:
    streams = Streams(torch.tensor([seed]), torch.tensor([start]), level=level)
    return float(streams.uniform(purpose, torch.tensor([offset]))[0, 0])


def series(seed: int = 3, purpose: Purpose = Purpose.DRAFT, first: int = 0) -> np.ndarray:
    streams = Streams(torch.tensor([seed]), torch.tensor([10]))
    return streams.uniform(purpose, torch.arange(first, first + MANY))[0].numpy()


def noise(seed: int, start: int, offset: int, vocab: int = 50, level: int = 0) -> torch.Tensor:
    streams = Streams(torch.tensor([seed]), torch.tensor([start]), level=level, shares_noise=True)
    return streams.gumbel(torch.tensor(0), torch.tensor(offset), torch.arange(vocab))


def test_the_same_fields_give_the_same_number() -> None:
    assert one() == one()


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"purpose": Purpose.ACCEPT}, {"level": 1}, {"start": 11}, {"offset": 1}],
    ids=lambda change: next(iter(change)),
)
def test_changing_any_one_field_changes_the_number(change: dict[str, int]) -> None:
    assert one(**change) != one()  # type: ignore[arg-type]


def test_no_two_field_combinations_share_a_number() -> None:
    fields = [
        (seed, purpose, level, start, offset)
        for seed in (0, 1, MAX_SEED)
        for purpose in Purpose
        for level in range(3)
        for start in range(1, 9)
        for offset in range(8)
    ]
    assert len({one(*field) for field in fields}) == len(fields)


@given(st.lists(st.tuples(st.integers(0, MAX_SEED), st.integers(1, 9999)), min_size=2, max_size=6), st.integers(0, 70))
@settings(max_examples=40, deadline=None)
def test_a_row_draws_the_same_alone_or_in_a_batch(rows: list[tuple[int, int]], offset: int) -> None:
    seeds, starts = (torch.tensor(column) for column in zip(*rows, strict=True))
    together = Streams(seeds, starts).uniform(Purpose.ACCEPT, torch.tensor([offset]))[:, 0].tolist()
    assert together == [one(seed, Purpose.ACCEPT, 0, start, offset) for seed, start in rows]


def test_offsets_may_differ_by_row() -> None:
    streams = Streams(torch.tensor([1, 2]), torch.tensor([5, 6]))
    ragged = streams.uniform(Purpose.DRAFT, torch.tensor([[0, 3], [7, 1]]))
    assert ragged.tolist() == [
        [one(1, start=5, offset=0), one(1, start=5, offset=3)],
        [one(2, start=6, offset=7), one(2, start=6, offset=1)],
    ]


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
def test_numbers_are_uniform(seed: int, purpose: Purpose) -> None:
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


@pytest.mark.parametrize(("one_purpose", "other"), list(combinations(Purpose, 2)), ids=str)
def test_purposes_are_uncorrelated(one_purpose: Purpose, other: Purpose) -> None:
    assert abs(np.corrcoef(series(purpose=one_purpose), series(purpose=other))[0, 1]) < FAR


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_offsets_and_adjacent_seeds_are_uncorrelated(lag: int) -> None:
    values = series()
    assert abs(np.corrcoef(values, series(first=lag))[0, 1]) < FAR
    assert abs(np.corrcoef(values, series(seed=3 + lag))[0, 1]) < FAR
    assert np.corrcoef(values, values + 0.1 * series(seed=99))[0, 1] > FAR


def test_gumbel_depends_on_the_position_not_on_how_it_is_reached() -> None:
    here = noise(3, start=5, offset=2)
    assert torch.equal(here, noise(3, start=7, offset=0))
    assert torch.equal(here, noise(3, start=5, offset=2, level=4))
    assert not torch.equal(here, noise(3, start=5, offset=3))
    assert not torch.equal(here, noise(4, start=5, offset=2))


def test_gumbel_is_the_same_in_any_batch_and_vocabulary() -> None:
    streams = Streams(torch.tensor([9, 3, 3]), torch.tensor([1, 5, 7]), shares_noise=True)
    places = zip((1, 2, 0), (2, 0, 6), strict=True)
    batch = [streams.gumbel(torch.tensor(row), torch.tensor(offset), torch.arange(80)) for row, offset in places]
    some = streams.gumbel(torch.tensor(1), torch.tensor(2), torch.tensor([7, 3, 60]))
    assert torch.equal(some, batch[0][[7, 3, 60]])
    assert torch.equal(batch[0][:50], noise(3, start=5, offset=2))
    assert torch.equal(batch[0], batch[1])
    assert not torch.equal(batch[0], batch[2])


def test_gumbel_noise_is_gumbel() -> None:
    values = noise(3, 5, 0, vocab=MANY).numpy()
    assert np.isfinite(values).all()
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-3


def test_gumbel_shares_nothing_with_the_uniforms() -> None:
    uniform = np.exp(-np.exp(-noise(3, 10, 0, vocab=MANY).double().numpy()))
    for purpose in Purpose:
        assert abs(np.corrcoef(uniform, series(purpose=purpose))[0, 1]) < FAR


def test_streams_follow_the_rows_as_they_grow() -> None:
    rows = Rows(
        [make_row([1, 2], seed=5), make_row([1, 2, 3], seed=MAX_SEED)], level=2, needs=RuleNeeds(shares_noise=True)
    )
    before = rows.streams(CPU)
    rows[0].extend([4, 4])
    after = rows.streams(CPU)
    assert (before.seeds.tolist(), before.starts.tolist()) == ([5, MAX_SEED], [2, 3])
    assert (after.starts.tolist(), after.level, after.shares_noise) == ([4, 3], 2, True)
