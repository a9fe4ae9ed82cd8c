"""A constant draft length; 0 is plain decoding."""

from __future__ import annotations

from foresay.checks import check_int
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows

MAX_DRAFT_TOKENS = 64
"""Largest draft length of any policy."""


class ConstantLength(LengthPolicy):
    """Draft gamma = num_draft_tokens tokens for every row in every step (Leviathan et al. 2023)."""

    remembers = False
    """The length depends on nothing."""

    def __init__(self, num_draft_tokens: int) -> None:
        """Fix the length.

        Args:
            num_draft_tokens: gamma, 0 to 64; 0 is plain decoding.

        Raises:
            ConfigError: Another value.
        """
        self.num_draft_tokens = check_int("num_draft_tokens", num_draft_tokens, 0, MAX_DRAFT_TOKENS)

    def budget(self, rows: Rows) -> list[int]:
        """Return gamma for each row."""
        return [self.num_draft_tokens] * len(rows)
