"""A length policy of several processes that compute one model together: the first one's, which the others take over.

Policies measure time, and no two clocks are alike; rows of another length would be another pass, which the others wait for
in vain. Owns how the answers travel, and that processes which wrote different tokens are stopped. Knows no policy.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from foresay import distributed
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import DraftStep, LengthPolicy
from foresay.decoding.rows import Rows


class BroadcastLength(LengthPolicy):
    """What the first process's policy says, in every process."""

    def __init__(self, policy: LengthPolicy) -> None:
        self._policy = policy
        self.needs_hidden, self.remembers = policy.needs_hidden, policy.remembers

    def budget(self, rows: Rows) -> list[int]:
        """See LengthPolicy."""
        return distributed.broadcast_first(self._policy.budget(rows) if distributed.is_first() else [0] * len(rows))

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """See LengthPolicy."""
        batch = len(step.token_ids)
        said = self._policy.keep_drafting(step) if distributed.is_first() else None
        told = [1] * batch if said is None else said.int().tolist()
        all_of_them, *mine = distributed.broadcast_first([said is None, *told])
        return None if all_of_them else torch.tensor(mine, dtype=torch.bool, device=step.token_ids.device)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """See LengthPolicy."""
        return distributed.broadcast_first(
            self._policy.num_to_score(rows, counts, matched) if distributed.is_first() else counts
        )

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> Sequence[int]:
        """See LengthPolicy."""
        return distributed.broadcast_first(self._policy.fallback_budget(rows, most) if distributed.is_first() else most)

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """See LengthPolicy; the others have nothing to learn for.

        Raises RuntimeError in a process that wrote something else than the first, whose next pass it would wait for in vain.
        """
        mark = zlib.crc32(repr([(one.request_id, one.token_ids, one.finish_reason) for one in steps]).encode())
        if distributed.broadcast_first([mark]) != [mark]:
            raise RuntimeError(
                "the processes that decode together wrote different tokens: "
                "they must run the same program on the same kind of machine"
            )
        if distributed.is_first():
            self._policy.observe(rows, steps)
