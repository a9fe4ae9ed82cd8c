"""A length policy whose decisions come out at random, as measured times might make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.protocols import DraftStep
from foresay.decoding.rows import Rows
from foresay.lengths import ThroughputLength
from foresay.lengths.measured_drafter import Draft


class Forced(ThroughputLength):
    """Measured times that came out as they please: any lengths, and any number of what was found."""

    def __init__(self, salt: int, *, sampled: int | None = None) -> None:
        super().__init__(sampled=sampled)
        self.random = torch.Generator().manual_seed(salt)
        self.ended = 0
        """Drafts that were told to end."""

    def _budgets(self, rows: Rows) -> list[int]:
        super()._budgets(rows)
        return [self._any(8) if n is None else n for n in self._fixed_lengths(rows)]

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        return self._changed(rows, super().num_to_score(rows, counts, matched), counts)

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
        return self._changed(rows, super().fallback_budget(rows, most), most)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        assert step.rows is not None
        drafter, batch = self._fallback if self._is_hybrid else self._primary, len(step.token_ids)
        draft = drafter.draft.find(step.rows) or Draft([], [[0] * self.high for _ in range(batch)])
        draft.budgets, draft.active, draft.accept_prob = [self.high] * batch, [True] * batch, [1.0] * batch
        draft.shared, draft.per_row = 0.0, float(torch.rand(1, generator=self.random))
        drafter.draft.put(step.rows, draft)
        found = super().keep_drafting(step)
        if found is not None:
            self.ended += int((~found).sum())
        return found

    def _changed(self, rows: Rows, chosen: Sequence[int], most: Sequence[int]) -> list[int]:
        free = [one is None for one in self._fixed_lengths(rows)]
        return [self._any(bound) if on else n for n, bound, on in zip(chosen, most, free, strict=True)]

    def _any(self, most: int) -> int:
        return int(torch.randint(most + 1, (1,), generator=self.random))
