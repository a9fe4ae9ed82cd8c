"""How many threads PyTorch takes where, seen by what runs there."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
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


def elsewhere() -> list[int]:
    """Settings of a thread that begins now."""
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.extend([torch.get_num_threads(), threads.num_threads()]))
    other.start()
    other.join()
    return seen


def test_alone_is_one_thread_here_and_nowhere_else() -> None:
    with threads.single_threaded():
        assert (torch.get_num_threads(), threads.num_threads()) == (1, MANY)
        assert elsewhere() == [MANY, MANY]
    assert (torch.get_num_threads(), threads.num_threads()) == (MANY, MANY)


def test_what_is_worth_it_gets_every_core_inside() -> None:
    with threads.single_threaded():
        with threads.all_threads(threads.MIN_ELEMENTS - 1):
            assert torch.get_num_threads() == 1
        with threads.all_threads():
            assert (torch.get_num_threads(), threads.num_threads()) == (MANY, MANY)
        assert (torch.get_num_threads(), threads.num_threads()) == (1, MANY)
    assert torch.get_num_threads() == MANY


def test_together_outside_changes_nothing() -> None:
    with threads.all_threads():
        assert (torch.get_num_threads(), threads.num_threads()) == (MANY, MANY)


@pytest.mark.parametrize("inner", [threads.single_threaded, threads.all_threads])
def test_an_error_inside_leaves_what_was(inner: Any) -> None:
    with threads.single_threaded():
        with pytest.raises(KeyError), inner():
            raise KeyError
        assert (torch.get_num_threads(), threads.num_threads()) == (1, MANY)
    with pytest.raises(KeyError), threads.single_threaded():
        raise KeyError
    assert (torch.get_num_threads(), threads.num_threads()) == (MANY, MANY)


def test_nested_ends_with_the_outer_one() -> None:
    with threads.single_threaded():
        with threads.single_threaded():
            assert threads.num_threads() == MANY
        assert (torch.get_num_threads(), threads.num_threads()) == (1, MANY)
    assert torch.get_num_threads() == MANY


def test_what_the_user_sets_inside_stays() -> None:
    with threads.single_threaded():
        torch.set_num_threads(2)
    assert (torch.get_num_threads(), threads.num_threads()) == (2, 2)


def test_a_user_with_one_thread_keeps_it() -> None:
    torch.set_num_threads(1)
    with threads.single_threaded(), threads.all_threads():
        assert (torch.get_num_threads(), threads.num_threads()) == (1, 1)
    assert torch.get_num_threads() == 1


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
    made = TableModel.random(VOCAB, seed=4, concentration=0.3)
    return kind(made.table)


def decode(target: Any, drafter: Any) -> None:
    params = [SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=4, temperature=1.0)]
    run(target, [[1, 2], [3]], params, drafter=drafter, gamma=2)


@pytest.mark.parametrize("kind", [Own, Watched])
def test_only_a_target_with_threads_of_its_own_takes_them_from_others(kind: type[Watched]) -> None:
    target, draft, own, foreign = table(kind), table(Watched), table(Own), Foreign([[1] * 6, [2] * 4])
    for drafter in (ModelDrafter(draft, VOCAB), ModelDrafter(own, VOCAB), foreign):
        decode(target, drafter)
    inside = Foreign([[1] * 6, [2] * 4])
    decode(target, Cascade([inside, ModelDrafter(table(Own), VOCAB)], [[2, 2], [0, 0]]))
    assert inside.__dict__["seen"] == {MANY}, "in a cascade too"
    few = {1} if kind is Own else {MANY}
    assert target.seen == few
    assert draft.seen == {MANY}, "a draft of PyTorch's operations needs every core"
    assert own.seen == few
    assert foreign.__dict__["seen"] == {MANY}, "no one knows what it brings"
