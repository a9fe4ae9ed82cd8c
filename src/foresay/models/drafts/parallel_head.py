"""A parallel head (P-EAGLE, arXiv 2602.01469): EAGLE-3's layers, which draft all tokens of a block in one pass.

After the last pair of features and token come mask tokens, whose features are those of one learned vector of hidden states. The
output at each of these positions is the distribution of the token after it, whatever the tokens before are. Keys and values of
mask tokens are overwritten by the next pairs. Knows no loss and no data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from foresay.decoding.devices import moved
from foresay.decoding.protocols import KVCache, Logits, ModelInput
from foresay.models.drafts.base import LAST, StoredDraft
from foresay.models.drafts.blocks import DraftsBlocks
from foresay.models.drafts.head import HeadModule, PairModel
from foresay.models.drafts.parallel_config import ParallelHeadConfig
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import MakeProduct, unquantized


class ParallelHeadModule(HeadModule):
    """The layers of a parallel head, and the hidden states of its mask tokens."""

    FLAT = ("mask_hidden",)

    def __init__(self, config: ParallelHeadConfig, num_states: int) -> None:
        """See HeadModule."""
        super().__init__(config, num_states)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, num_states * config.target_hidden_size))


class ParallelHeadModel(DraftsBlocks, PairModel):
    """A parallel head, bound to the target that it was trained for."""

    config: ParallelHeadConfig
    reads_pairs = True

    def __init__(
        self, head: StoredDraft, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized
    ) -> None:
        """See DraftModel."""
        super().__init__(head, target, name=name, make=make)
        module, config = head.module, head.config
        assert isinstance(module, ParallelHeadModule) and isinstance(config, ParallelHeadConfig)
        self.config = config
        self._of_mask = self.features(self._plain(module.mask_hidden)[0])

    @torch.inference_mode()
    def run_after(self, known: ModelInput, lengths: Sequence[int], cache: KVCache) -> torch.Tensor:
        """See DraftsBlocks."""
        assert known.features is not None
        counts, last = torch.tensor(known.num_tokens), max(lengths) - 1
        fed = [n + max(0, length - 1) if n else 0 for n, length in zip(known.num_tokens, lengths, strict=True)]
        # room for mask tokens after the pairs of the longest row
        is_known = moved(torch.arange(known.token_ids.shape[1] + last) < counts[:, None], self.device)
        tokens = F.pad(known.token_ids, (0, last)).where(is_known, self.config.mask_token_id)
        features = F.pad(known.features, (0, 0, 0, last)).where(is_known[..., None], self._of_mask)
        before = list(cache.lengths)
        hidden = self.forward(ModelInput(tokens, fed, logits=Logits.NONE, features=features), cache).hidden[LAST]
        cache.truncate([length + n for length, n in zip(before, known.num_tokens, strict=True)])
        at = (counts[:, None] - 1 + torch.arange(last + 1)).clamp(min=0)
        return hidden[torch.arange(len(fed))[:, None], moved(at, self.device)].to(self.dtype)
