"""The device of these tests. FORESAY_TEST_DEVICE=cpu runs them without a GPU, to see that the tests themselves are in order."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> str:
    name = os.environ.get("FORESAY_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return name
