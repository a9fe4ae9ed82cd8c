"""Base of drafters without per-row state."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import Drafter, ModelOutput, Move
from foresay.decoding.rows import Rows


class Stateless(Drafter):
    """A drafter without per-row state; a subclass implements `propose`."""

    def admit(self, rows: Rows, first: int) -> None:
        """Do nothing."""

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Do nothing."""
