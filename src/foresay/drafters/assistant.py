"""Draft with an assistant (Gemma 4), a head that reads the target's keys and values in place of keys and values of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import KVCache, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.drafters.hidden_states import HeadDrafter

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.drafts.assistant import Assistant


class AssistantDrafter(HeadDrafter):
    """A HeadDrafter whose head reads the cache of the engine's target."""

    def __init__(self, assistant: Assistant, target_vocab_size: int, *, sample: bool = True, nodes: int = 0) -> None:
        """See HiddenStateDrafter."""
        self._assistant = copy.copy(assistant)  # which reads the cache of one engine
        super().__init__(self._assistant, target_vocab_size, sample=sample, nodes=nodes)

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Read keys and values of this cache from now on. Raises UnsupportedModelError if it has none."""
        self._assistant.use_cache_of_target(cache)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft as a head does. The target's keys and values are read once for all tokens of the draft."""
        self._assistant.forget()
        try:
            return super().propose(rows, budget, policy)
        finally:
            self._assistant.forget()
