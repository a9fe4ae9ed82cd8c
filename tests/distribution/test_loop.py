"""The whole loop over a table: the distribution of what is written equals the enumerated distribution of the target.

Each cell compares up to 300 to 1,000 outputs of LENGTH tokens with their enumerated distribution by chi-squared, in looks (see
helpers/sequential.py). Seeds are fixed; with ALPHA = 1e-6 and 105 cells the odds that correct code would have failed when the
seeds were chosen are at most 1e-4.
`pytest tests/distribution --long` runs the full product of 5,040 with 3,000 outputs each.
"""

from __future__ import annotations

import itertools

import pytest

from foresay.decoding.sampling_params import SamplingParams
from helpers.distribution_cells import (
    ALPHA,
    COUNTS,
    DRAFT,
    LENGTH,
    PARAMS,
    PROMPT,
    SAMPLES,
    TARGET,
    Cell,
    pairwise,
    product,
    value,
)
from helpers.reference import joint


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        cells = product() if metafunc.config.getoption("--long") else pairwise()
        metafunc.parametrize("cell", cells, ids=["-".join(map(str, c)) for c in cells])


def test_output_has_the_targets_law(cell: Cell, request: pytest.FixtureRequest) -> None:
    samples = SAMPLES if request.config.getoption("--long") else COUNTS[cell[4]]
    assert value(cell, joint(TARGET, PARAMS[cell[3]], PROMPT, LENGTH), samples) > ALPHA


def test_the_comparison_sees_another_law() -> None:
    """The draft's own distribution, and a distribution one parameter away, differ from the target's at this sample size."""
    cell = ("none", "speculative", "0", "plain", "joining")
    assert value(cell, joint(DRAFT, PARAMS["plain"], PROMPT, LENGTH)) < ALPHA
    warmer = SamplingParams.of(PARAMS["plain"], temperature=1.5)
    assert value(cell, joint(TARGET, warmer, PROMPT, LENGTH)) < ALPHA


def test_the_stored_cells_hold_every_pair() -> None:
    def pairs(cells: list[Cell]) -> set[tuple[int, str, int, str]]:
        return {(i, c[i], j, c[j]) for c in cells for i, j in itertools.combinations(range(5), 2)}

    assert set(pairwise()) <= set(product())
    assert pairs(pairwise()) == pairs(product()), "scripts/distribution_cells.py stores them anew"
