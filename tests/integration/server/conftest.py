"""A tiny model, and servers over it that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import foresay
from helpers import tiny
from helpers.serving import Running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> foresay.Generator:
    return foresay.load(str(tiny.save(tmp_path_factory.mktemp("served"), chat=True)), num_draft_tokens=3)


@pytest.fixture
def serve(model: foresay.Generator) -> Iterator[Any]:
    begun: list[Running] = []

    def start(generator: foresay.Generator = model, **settings: Any) -> Running:
        begun.append(Running(generator, **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.close()
