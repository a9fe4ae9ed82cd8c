"""The same draft length in every step; 0 is plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foresay.core import Rows
from foresay.errors import ConfigError

if TYPE_CHECKING:
    from foresay.sampling import Laws

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

    def proceed(self, index: int, laws: Laws, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """No row stops early."""
        return None
