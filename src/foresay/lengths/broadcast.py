"""The length policy of several processes that run one model with tensor parallelism: all use the first process's decisions.

Policies measure time, and clocks differ between processes. With different draft lengths the processes would run different
forward passes and deadlock. Owns the broadcast of decisions and the check that all processes generated the same tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from foresay import distributed
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import DraftStep, Stopping


class BroadcastLength(LengthPolicy):
    """The decisions of the first process's policy, in every process."""

    def __init__(self, policy: LengthPolicy) -> None:
        self._policy = policy
        self.remembers = policy.remembers

    def budget(self, rows: Rows) -> list[int]:
        """Return the first process's budgets."""
        return distributed.broadcast_first(self._policy.budget(rows) if distributed.is_first() else [0] * len(rows))

    def stopping(self, rows: Rows) -> Stopping:
        """Return an evaluation whose masks are the first process's."""
        return _BroadcastStopping(self._policy.stopping(rows), rows)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """Return the first process's counts."""
        return distributed.broadcast_first(
            self._policy.num_to_score(rows, counts, matched) if distributed.is_first() else counts
        )

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> Sequence[int]:
        """Return the first process's budgets for the fallback drafter."""
        return distributed.broadcast_first(self._policy.fallback_budget(rows, most) if distributed.is_first() else most)

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Let the first process's policy observe the steps; the other processes need no statistics.

        Raises RuntimeError in a process whose tokens differ from the first one's: its next pass would deadlock.
        """
        checksum = zlib.crc32(repr([(one.request_id, one.token_ids, one.finish_reason) for one in steps]).encode())
        if distributed.broadcast_first([checksum]) != [checksum]:
            raise RuntimeError(
                "the processes of this model generated different tokens: "
                "they must run the same program on the same kind of machine"
            )
        if distributed.is_first():
            self._policy.observe(rows, steps)


class _BroadcastStopping(Stopping):
    """The masks of the first process's evaluation, in every process."""

    def __init__(self, inner: Stopping, rows: Rows) -> None:
        super().__init__(inner.rule, rows)
        self._inner = inner

    def keep(self, step: DraftStep) -> torch.Tensor | None:
        """Return the first process's mask."""
        mask = self._inner.keep(step) if distributed.is_first() else None
        values = [1] * len(step.token_ids) if mask is None else mask.int().tolist()
        is_none, *received = distributed.broadcast_first([mask is None, *values])
        return None if is_none else torch.tensor(received, dtype=torch.bool, device=step.token_ids.device)
