"""Distribution tests over a model whose state cannot be truncated: rewinding by snapshots and feeding tokens again.

3 tokens, 5 positions, so that most outputs have rejections in several steps; the controls break the rewinding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.acceptance import Lenience
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.models.cache.snapshots import Snapshot, SnapshotRows, Snapshots
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA
from helpers.reference import joint
from helpers.sequential import value_of
from helpers.support import Loop, Mixed, run

SIZE, LENGTH, SAMPLES, PROMPT = 3, 5, 1500, [1, 2, 1]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=LENGTH)


class StateCache(SnapshotRows):
    """The tokens of each row as one state."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.states: Snapshots[tuple[int, ...]] = Snapshots()

    def truncate(self, lengths: Sequence[int]) -> None:
        for i, length in enumerate(lengths):
            self.lengths[i] = self.states.rewind(i, min(self.lengths[i], length))

    def swap(self, one: int, other: int) -> None:
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]
        self.states.swap(one, other)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        for source, target in moves:
            self.lengths[target] = self.lengths[source]
        del self.lengths[count:]
        self.states.rearrange(moves, count)


class StateTable(TableModel):
    """A table model that continues from a row's state alone, and whose distributions depend on every token of a text."""

    def distribution(self, context: Sequence[int]) -> torch.Tensor:
        return self.table[sum(token * (i + 1) for i, token in enumerate(context)) % SIZE, context[-1]]

    def new_cache(self) -> Any:
        return StateCache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        assert isinstance(cache, StateCache)
        cache.lengths += [0] * (len(rows) - first)
        cache.states.add_rows(len(rows) - first)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        assert isinstance(cache, StateCache)
        batch, columns = model_input.token_ids.shape
        out = torch.zeros(batch, columns, self.vocab_size)
        for i, count in enumerate(model_input.num_tokens):
            row, fed = model_input.first_row + i, model_input.token_ids[i, :count].tolist()
            text = cache.states.present(row).state or ()
            if not count:
                continue
            for column, token in enumerate(fed):
                text = (*text, token)
                out[i, column] = self.distribution(text).log().float()
            cache.lengths[row] += count
            cache.states.record(row, cache.lengths[row], text, replace=model_input.logits is Logits.NONE)
        if model_input.logits is Logits.NONE:
            return ModelOutput(None)
        last = model_input.logits is Logits.LAST
        return ModelOutput(out[torch.arange(batch), model_input.last_columns()][:, None] if last else out)


def table(seed: int) -> StateTable:
    return StateTable(TableModel.random(SIZE, seed=seed, concentration=0.7).table)


def value(rule: str, drafter: str = "model") -> float:
    """The p-value of what the loop generates over states."""
    target = table(1)
    made = ModelDrafter(table(2), SIZE) if drafter == "model" else Mixed(SIZE)
    loop = Loop(target, drafter=made, rule=rule, gamma=3, max_batch_size=500)
    found = value_of(loop, PROMPT, PARAMS, joint(target, PARAMS, PROMPT, LENGTH), SAMPLES)
    requests = len({step.request_id for step in loop.steps})
    assert sum(0 < step.num_accepted < step.num_drafted for step in loop.steps) > requests / 10
    assert sum(step.num_accepted == step.num_drafted > 0 for step in loop.steps) > requests / 10
    return found


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
@pytest.mark.parametrize("drafter", ["model", "mixed"])
def test_output_has_the_distribution_of_the_target(rule: str, drafter: str) -> None:
    assert value(rule, drafter) > ALPHA


def _not_restored(self: Snapshots[Any], row: int, length: int) -> int:
    history = self._rows[row]
    found, last = history.longest(length), history.undo[-1]
    history.undo = [Snapshot(found.length, last.state)]
    return found.length


def _one_token_off(self: Snapshots[Any], row: int, length: int) -> int:
    history = self._rows[row]
    found = history.longest(length)
    history.undo = [found]
    return min(found.length + 1, length)


def _backlog_dropped(self: Snapshots[Any], row: int, length: int) -> int:
    history = self._rows[row]
    history.undo = [Snapshot(length, history.longest(length).state)]
    return length


@pytest.mark.parametrize("broken", [_not_restored, _one_token_off, _backlog_dropped])
@pytest.mark.parametrize("rule", ["speculative", "match"])
def test_broken_rewinding(rule: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_output_has_the_distribution_of_the_target` has the same cells with the intact one."""
    monkeypatch.setattr(Snapshots, "rewind", broken)
    assert value(rule) < ALPHA


def lenient(together: bool) -> list[list[int]]:
    """Greedy texts under `lenience`, whose tokens depend on where drafts end, alone or in one batch."""
    target, params = table(1), SamplingParams(max_new_tokens=24)
    prompts = [[i % 3, i // 3 % 3, i // 9 % 3, 1] for i in range(27)]
    each = [prompts] if together else [[one] for one in prompts]
    found = [
        run(target, one, params, drafter=ModelDrafter(table(2), SIZE), rule=Lenience(2.0), gamma=3) for one in each
    ]
    return [text for texts, _, _ in found for text in texts]


def test_a_lenient_greedy_row_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = lenient(together=False)
    assert lenient(together=True) == alone
    monkeypatch.setattr(Lenience, "exact", True)  # control: shorter drafts after a rejection, in a batch only
    assert lenient(together=True) != alone
