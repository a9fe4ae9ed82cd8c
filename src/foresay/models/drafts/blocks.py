"""The base of drafts that score all tokens of a block in one pass, as drafters/hidden_states.py reads them.

Owns the draws on a device. Knows neither their layers nor what they read of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from foresay.decoding.chains import Drawn, Sampling
from foresay.decoding.protocols import KVCache, ModelInput
from foresay.models.drafts.base import DraftModel

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.chains import BlockChains


class BlockShape(Protocol):
    """The configuration of a draft that scores blocks."""

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a block drafts: those of its last positions."""
        ...

    @property
    def has_confidence(self) -> bool:
        """True if the draft predicts the acceptance of each token."""
        ...


class DraftsBlocks(DraftModel):
    """Base of drafts that score all tokens of a block in one pass. B rows, T draft tokens of a block, width D, K tokens."""

    config: BlockShape
    reads_pairs = False
    """True if a block follows pairs, as a head's (`run_after`); False if it follows features of the context (`add_context`)."""
    state_size = 0
    """Size R of the state of a path of tokens."""
    _chains: BlockChains | None = None

    def add_context(self, features: Sequence[torch.Tensor | None], cache: KVCache) -> None:
        """Cache the keys and values of each row's next positions. features: [B], [n, D] each, or None for no position."""
        raise NotImplementedError

    def run_block(self, tokens: Sequence[int], lengths: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Return the outputs of a block after each row's context, [B, T, D] in the model's dtype.

        tokens: [B], each row's last committed token. lengths: [B], positions of each row's block, at most `block_size`; 0 for a
        row without a block, whose outputs are meaningless.
        """
        raise NotImplementedError

    def run_after(self, known: ModelInput, lengths: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Feed pairs, and return the outputs of a block that begins with each row's last one, as `run_block` does."""
        raise NotImplementedError

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., K] of outputs [..., D], which know nothing of the other tokens of the block."""
        return self.multiplied(self._head, hidden)

    def after(
        self,
        scores: torch.Tensor,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        index: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [..., K] of outputs after the previous tokens of their block, and the state; see path.Step."""
        return scores, state

    def acceptance(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the predicted acceptance [...] of tokens from outputs [..., D] after previous tokens; None without such a
        head."""
        return None

    @property
    def draws_chains(self) -> bool:
        """True if `draw_tokens` is possible."""
        return self.paged is not None and self.paged.decoder.num_scores <= self.vocab_size

    def draw_tokens(
        self,
        last: torch.Tensor,
        outputs: torch.Tensor,
        scores: torch.Tensor,
        room: Sequence[int],
        sampling: Sampling | None,
    ) -> Drawn | None:
        """Draw the first tokens of blocks on the device; see DrawsChains.draw_chains.

        last: [B] int64, each row's last committed token. outputs, scores: [B, T, D] and [B, T, K], of the blocks.
        """
        from foresay.models.gpu.chains import BlockChains

        assert self.paged is not None
        if self._chains is None:
            self._chains = BlockChains(
                self.paged,
                self.after,
                length=self.config.num_draft_tokens,
                state_size=self.state_size,
                token_ids=None if self.subset is None else self.subset.token_ids,
                vocab_size=self.vocab_size,
            )
        return self._chains.draw(last, outputs, scores, room, sampling)
