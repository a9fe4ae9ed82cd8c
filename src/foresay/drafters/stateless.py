"""What a drafter without memory has in common: it follows no rows. A subclass guesses."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import Drafter, ModelOutput, Move
from foresay.decoding.rows import Rows


class Stateless(Drafter):
    """A drafter that remembers nothing; `propose` is the subclass's."""

    def admit(self, rows: Rows, first: int) -> None:
        """Nothing to remember."""

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Nothing to move."""

    def reset(self) -> None:
        """Nothing to forget."""

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Nothing to learn."""
