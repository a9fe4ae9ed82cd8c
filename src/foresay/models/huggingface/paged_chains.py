"""Models that draw chains and trees of tokens over their pages; see DrawsChains. Does not import Triton before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foresay.decoding.chains import Drawn, Grown, Sampling, TreeLimits
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import ModelInput

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.chains import DecoderChains
    from foresay.models.gpu.passes import PagedPasses
    from foresay.models.gpu.trees import DecoderTrees


class PagedChains:
    """Base of models whose passes may run over pages."""

    vocab_size: int
    subset: VocabularySubset | None
    _chains: DecoderChains | None = None
    _trees: DecoderTrees | None = None

    def _passes(self) -> PagedPasses | None:
        """Return the passes over pages; None without them."""
        raise NotImplementedError

    def _chain_states(self) -> tuple[int, int | None]:
        """Return the keys of the hidden states that scores are computed of, and that the next pass reads as features."""
        raise NotImplementedError

    @property
    def draws_chains(self) -> bool:
        """See DrawsChains."""
        passes = self._passes()
        return passes is not None and passes.decoder.num_scores <= self.vocab_size

    @torch.inference_mode()
    def draw_chains(
        self, known: ModelInput, cache: Any, room: Sequence[int], sampling: Sampling | None
    ) -> Drawn | None:
        """See DrawsChains."""
        from foresay.models.gpu.chains import DecoderChains

        passes = self._passes()
        assert passes is not None
        if self._chains is None or self._chains.passes is not passes:
            ids = None if self.subset is None else self.subset.token_ids
            outputs, nexts = self._chain_states()
            self._chains = DecoderChains(
                passes, outputs=outputs, nexts=nexts, token_ids=ids, vocab_size=self.vocab_size
            )
        return self._chains.draw(known, cache, room, sampling)

    @torch.inference_mode()
    def draw_trees(self, known: ModelInput, cache: Any, limits: TreeLimits) -> Grown | None:
        """See DrawsTrees."""
        from foresay.models.gpu.trees import DecoderTrees

        passes = self._passes()
        assert passes is not None
        if self._trees is None or self._trees.passes is not passes:
            ids = None if self.subset is None else self.subset.token_ids
            outputs, nexts = self._chain_states()
            self._trees = DecoderTrees(passes, outputs=outputs, nexts=nexts, token_ids=ids)
        return self._trees.grow(known, cache, limits)
