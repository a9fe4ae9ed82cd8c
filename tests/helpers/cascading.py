"""A model and a drafter that see everything, for the tests of cascades."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.drafters import Cascade
from foresay.lengths import ConstantLength
from foresay.models.table import TableCache, TableModel
from helpers.making import make_row
from helpers.support import Fake

POLICY = ConstantLength(64)
SIZE = 6
ZEROS = [[0, 0, 0], [0, 0, 0]]


class Whole(TableModel):
    """A table whose distributions depend on the whole context, so that no wrong cache goes unseen; counts what it is fed."""

    passes = fed = 0

    def distribution(self, context: Sequence[int]) -> torch.Tensor:
        mark = sum((i + 1) * token for i, token in enumerate(context)) % self.vocab_size
        return super().distribution(context).roll(mark)

    def forward(self, model_input: ModelInput, cache: Any) -> ModelOutput:
        assert isinstance(cache, TableCache)
        token_ids, num_tokens = model_input.token_ids, model_input.num_tokens
        self.passes += 1
        self.fed += sum(num_tokens)
        first, kind = model_input.first_row, model_input.logits
        starts = list(cache.lengths)
        super().forward(model_input, cache)
        out = torch.zeros(*token_ids.shape, self.vocab_size)
        for i in range(len(token_ids)):
            seen = cache.tokens[first + i]
            for t in range(token_ids.shape[1]):
                out[i, t] = self.distribution(seen[: starts[first + i] + t + 1]).log().float()
        if kind is Logits.LAST:
            last = torch.tensor(num_tokens).clamp(min=1) - 1
            out = out[torch.arange(len(out)), last][:, None]
        return ModelOutput(out)


def whole(seed: int = 1) -> Whole:
    return Whole(TableModel.random(SIZE, seed=seed, concentration=0.5).table)


class Counted(Fake):
    """Proposes the same tokens over and over, and notes each call: {row: (context length, how many)}."""

    def __init__(self, tokens: Sequence[int] = (0,), most: int = 64) -> None:
        self.tokens, self.most = tokens, most
        self.requested: list[dict[int, tuple[int, int]]] = []

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        self.requested.append({i: (rows[i].size, n) for i, n in enumerate(budget) if n})
        return super().propose(rows, budget, policy)

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        count = min(budget, self.most)
        return [self.tokens[i % len(self.tokens)] for i in range(count)]


def begun(cascade: Cascade, *prompts: Sequence[int], **params: Any) -> Rows:
    rows = Rows([make_row(p, seed=i, **params) for i, p in enumerate(prompts or ([1],))])
    cascade.admit(rows, 0)
    return rows


def lists(proposal: Proposal) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]
