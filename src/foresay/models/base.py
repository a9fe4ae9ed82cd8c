"""What scores tokens: the protocol every model of this package fulfils, target, draft, table or recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch

from foresay.core import KVCache, Rows


class Logits(StrEnum):
    """Which logits a pass is asked for."""

    ALL = "all"
    """Every column: [B, T, V]."""
    LAST = "last"
    """The last real column of each row: [B, 1, V]."""
    NONE = "none"
    """None: the pass only fills the cache."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a pass computed: logits as asked for, and the hidden states [B, T, H] of the layers asked for.

    points: [B, T] int64 in place of logits, from a model that knows its tokens and not their scores (a recording).
    """

    logits: torch.Tensor | None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    points: torch.Tensor | None = None

    def scores(self) -> torch.Tensor:
        """The logits of a pass that was asked for some."""
        assert self.logits is not None
        return self.logits


class LanguageModel(Protocol):
    """A model that scores tokens of ragged rows over a cache of absolute lengths."""

    vocab_size: int
    """Ids it takes, 0 to vocab_size - 1."""
    max_length: int
    """Most tokens of a row, prompt and output together."""
    device: torch.device

    def new_cache(self) -> KVCache:
        """A cache without rows."""
        ...

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Rows from place `first` on are new: give them empty cache rows (an encoder-decoder encodes here)."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        num_tokens: Sequence[int],
        cache: KVCache,
        *,
        first_row: int = 0,
        logits: Logits = Logits.ALL,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """One pass. token_ids: [B, T], right-padded; row i of it is cache row `first_row + i`, of which num_tokens[i] count.

        The real tokens are appended to the cache; pads are overwritten by whatever comes next.
        """
        ...
