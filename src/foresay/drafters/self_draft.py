"""Self-speculation: the target's first layers with its final norm and LM head as the draft model.

Shares the target's weights and cache: for committed tokens, the keys and values of the first layers are the target's. Needs no
prefill, and no memory except for a trimmed LM head. With an encoder-decoder these are decoder layers, and the encoder's output is
shared as well.
"""

from __future__ import annotations

from foresay.decoding.protocols import KVCache
from foresay.drafters.draft_cache import FirstLayers
from foresay.drafters.model import ModelDrafter


class SelfDrafter(ModelDrafter):
    """Draft with the first layers of the target."""

    def __init__(self, model: FirstLayers, target_vocab_size: int) -> None:
        """model: a result of `early_exit.first_layers`. target_vocab_size: width of the target's logits."""
        super().__init__(model, target_vocab_size)

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Draft in the target's cache from now on."""
        self.context.use_cache_of_target(cache)
