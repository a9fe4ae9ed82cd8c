"""A length policy whose decisions come out at random, as measured times might make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from foresay.decoding.rows import Rows
from foresay.decoding.stopping import DraftStep, Stopping, StoppingRule
from foresay.lengths import ThroughputLength
from foresay.lengths.measured_drafter import Draft


class Forced(ThroughputLength):
    """Measured times that came out as they please: any lengths, and any number of what was found."""

    def __init__(self, salt: int, *, sampled: int | None = None) -> None:
        super().__init__(sampled=sampled)
        self.random = torch.Generator().manual_seed(salt)
        self.ended = 0
        """Drafts that were set to end."""

    def _budgets(self, rows: Rows) -> list[int]:
        super()._budgets(rows)
        return [self._any(8) if n is None else n for n in self._fixed_lengths(rows)]

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        return self._changed(rows, super().num_to_score(rows, counts, matched), counts)

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
        return self._changed(rows, super().fallback_budget(rows, most), most)

    def rule(self, rows: Rows) -> StoppingRule:
        drafter, batch = self._fallback if self._is_hybrid else self._primary, len(rows)
        draft = drafter.draft.find(rows) or Draft([], [[0] * self.high for _ in range(batch)])
        draft.budgets = [self.high] * batch
        drafter.draft.put(rows, draft)
        cost = float(torch.rand(1, generator=self.random))
        return dataclasses.replace(super().rule(rows), threshold=0.0, per_row=cost)

    def stopping(self, rows: Rows) -> Stopping:
        return _Counting(self, rows)

    def _changed(self, rows: Rows, chosen: Sequence[int], most: Sequence[int]) -> list[int]:
        free = [one is None for one in self._fixed_lengths(rows)]
        return [self._any(bound) if on else n for n, bound, on in zip(chosen, most, free, strict=True)]

    def _any(self, most: int) -> int:
        return int(torch.randint(most + 1, (1,), generator=self.random))


class _Counting(Stopping):
    def __init__(self, policy: Forced, rows: Rows) -> None:
        super().__init__(policy.rule(rows), rows)
        self._policy = policy

    def keep(self, step: DraftStep) -> torch.Tensor | None:
        found = super().keep(step)
        if found is not None:
            self._policy.ended += int((~found).sum())
        return found
