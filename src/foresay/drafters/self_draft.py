"""Self-speculation: the target's first layers, with its own final norm and head, as the draft.

Shares the target's weights, and its cache: the first layers' keys and values of what is committed are the target's. Takes
no memory but a trimmed head's, and no prefill. Of an encoder-decoder the layers are the decoder's, and what was encoded is
shared too.
"""

from __future__ import annotations

from foresay.decoding.protocols import KVCache
from foresay.drafters.draft_cache import FirstLayers, SharedDraftCache
from foresay.drafters.model import ModelDrafter


class SelfDrafter(ModelDrafter):
    """Drafts with the first layers of the target. model: those layers, as `early_exit.first_layers` makes them."""

    context: SharedDraftCache

    def __init__(self, model: FirstLayers, target_vocab_size: int) -> None:
        super().__init__(model, target_vocab_size, context=SharedDraftCache(model, target_vocab_size))

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Draft in the target's cache."""
        self.context.use_cache_of_target(cache)
