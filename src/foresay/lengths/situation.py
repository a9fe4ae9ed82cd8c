"""The worth and the costs of draft tokens in a step. Does not know the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foresay.decoding.rows import Rows


@dataclass(frozen=True, slots=True)
class Situation:
    """The worth and the costs of tokens in a step."""

    rows: Rows
    fixed: Sequence[int | None]
    """[B], a row's fixed draft length; None for a length to choose."""
    rate: float
    """Tokens that all rows together generate per plain pass."""
    plain_s: float
    start: float
    slope: float
    """A pass that scores n > 0 draft tokens takes 1 + start + slope n plain passes; n is that of the longest draft if padded."""
    base: int = 0
    """Draft tokens that the pass scores in any case, in its longest draft."""

    @property
    def start_cost(self) -> float:
        """Tokens that the batch loses by the first draft token of a pass, beyond those of any token."""
        return 0.0 if self.base or any(self.fixed) else self.rate * self.start

    @property
    def token_cost(self) -> float:
        """Tokens that the batch loses by one more draft token in a ragged pass, or by one more for all rows in a padded one."""
        return self.rate * self.slope

    @property
    def ragged(self) -> bool:
        """Rows of a pass may have different lengths at no cost."""
        return self.rows.capabilities.ragged
