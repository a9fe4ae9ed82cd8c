"""How many threads PyTorch takes where, seen by what runs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from foresay import threads
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import KVCache, LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, ModelDrafter
from foresay.models.table import TableModel
from helpers.support import Always, run

MANY = 3
VOCAB = 7


@pytest.fixture(autouse=True)
def many() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


def here() -> tuple[int, int]:
    """PyTorch's threads, and those of our kernels."""
    return torch.get_num_threads(), threads.num_threads()


def test_alone_is_one_thread_here_and_nowhere_else() -> None:
    with threads.single_threaded():
        assert here() == (1, MANY)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(here).result() == (MANY, MANY)
        with threads.single_threaded():
            assert here() == (1, MANY)
        assert here() == (1, MANY), "nested ones end with the outer one"
        with threads.all_threads(threads.MIN_ELEMENTS - 1):
            assert here() == (1, MANY), "too small an operation"
        with threads.all_threads():
            assert here() == (MANY, MANY)
        assert here() == (1, MANY)
    assert here() == (MANY, MANY)
    with threads.all_threads():
        assert here() == (MANY, MANY), "outside, it changes nothing"


def test_an_error_inside_leaves_what_was() -> None:
    with suppress(KeyError), threads.single_threaded():
        for inner in (threads.single_threaded, threads.all_threads):
            with suppress(ValueError), inner():
                raise ValueError
            assert here() == (1, MANY)
        raise KeyError
    assert here() == (MANY, MANY)


def test_what_the_user_sets_stays() -> None:
    with threads.single_threaded():
        torch.set_num_threads(2)
    assert here() == (2, 2)
    torch.set_num_threads(1)
    with threads.single_threaded(), threads.all_threads():
        assert here() == (1, 1)
    assert here() == (1, 1)


class Watched(TableModel):
    """Remembers how many threads its passes had."""

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        self.__dict__.setdefault("seen", set()).add(torch.get_num_threads())
        return super().forward(model_input, cache)


class Own(Watched):
    """The same with threads of its own, as it states."""

    capabilities = dataclasses.replace(TableModel.capabilities, own_threads=True)


class Foreign(Always):
    """A drafter that was written outside of foresay."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        self.__dict__.setdefault("seen", set()).add(torch.get_num_threads())
        return super().propose(rows, budget, policy)


def table(kind: type[Watched]) -> Any:
    return kind(TableModel.random(VOCAB, seed=4, concentration=0.3).table)


@pytest.mark.parametrize("kind", [Own, Watched])
def test_only_a_target_with_threads_of_its_own_takes_them_from_others(kind: type[Watched]) -> None:
    target, draft, own = table(kind), table(Watched), table(Own)
    foreign, inside = (Foreign([[1] * 6, [2] * 4]) for _ in range(2))
    cascade = Cascade([inside, ModelDrafter(table(Own), VOCAB)], [[2, 2], [0, 0]])
    params = [SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=4, temperature=1.0)]
    for drafter in (ModelDrafter(draft, VOCAB), ModelDrafter(own, VOCAB), foreign, cascade):
        run(target, [[1, 2], [3]], params, drafter=drafter, gamma=2)
    few = {1} if kind is Own else {MANY}
    assert target.seen == own.seen == few
    assert draft.seen == {MANY}, "a draft of PyTorch's operations needs every core"
    assert vars(foreign)["seen"] == vars(inside)["seen"] == {MANY}, "no one knows what it brings, in a cascade too"
