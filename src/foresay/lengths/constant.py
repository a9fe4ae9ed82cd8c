"""The same draft length in every step; 0 is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.core import Guess, Rows, Step
from foresay.errors import ConfigError

MAX_DRAFT_TOKENS = 64


class ConstantLength:
    """gamma tokens for every row (Leviathan et al. 2023)."""

    def __init__(self, num_draft_tokens: int) -> None:
        if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int):
            raise ConfigError(f"num_draft_tokens={num_draft_tokens!r} must be an integer")
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens} must be in [0, {MAX_DRAFT_TOKENS}]")
        self.num_draft_tokens = num_draft_tokens

    def budget(self, rows: Rows) -> list[int]:
        """gamma for each row."""
        return [self.num_draft_tokens] * len(rows)

    def proceed(self, index: int, guess: Guess) -> torch.Tensor | None:
        """No row stops early."""
        return None

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Nothing to learn."""
