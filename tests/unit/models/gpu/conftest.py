"""Tests of Triton kernels: left out where there is no Triton; in the interpreter, products have one order of sums.

NumPy's depend on the number of rows, as its library has it for the processor. A GPU's tile does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.triton_path import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def _language() -> Iterator[None]:
    from helpers.paged import language_of_the_interpreter  # imports Triton

    with language_of_the_interpreter():
        yield


@pytest.fixture(autouse=True)
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.paged import sum_products_in_order  # imports Triton

    sum_products_in_order(monkeypatch)
