"""A Markov table as a language model: its law is known, so everything built on it can be checked by enumeration.

Public: use it to test a drafter, a rule or a processor of your own without weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.protocols import KVCache, Logits, ModelOutput, Move
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError


class TableCache:
    """The tokens a table has seen, by absolute place; garbage behind a row's length, as in a real cache."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.tokens: list[list[int]] = []

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind; the tokens behind stay and must never matter."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves, drop rows from `count` on."""
        for source, target in moves:
            self.lengths[target], self.tokens[target] = self.lengths[source], list(self.tokens[source])
        del self.lengths[count:], self.tokens[count:]


class TableModel:
    """p(next | last two tokens) read from a table.

    table: [V, V, V] float, table[a, b] the law after ... a b; a row of one token counts as preceded by token 0.
    """

    def __init__(self, table: torch.Tensor, *, max_length: int = 4096) -> None:
        if table.dim() != 3 or len(set(table.shape)) != 1:
            raise ConfigError(f"table has shape {tuple(table.shape)}; it must be [V, V, V]")
        if bool((table < 0).any()) or not bool(torch.isfinite(table).all()) or bool((table.sum(-1) <= 0).any()):
            raise ConfigError("table must hold finite, non-negative weights, with a positive one in each law")
        self.table = table.double() / table.double().sum(-1, keepdim=True)
        self._logits = self.table.log().float()
        self.vocab_size = int(table.shape[0])
        self.max_length = max_length
        self.device = table.device

    @classmethod
    def random(cls, vocab_size: int, *, seed: int, concentration: float = 1.0, max_length: int = 4096) -> TableModel:
        """Laws drawn from a symmetric Dirichlet; a small concentration makes them peaked."""
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(vocab_size, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        return cls((-uniform.log()) ** (1 / concentration) + 1e-9, max_length=max_length)

    def law(self, context: Sequence[int]) -> torch.Tensor:
        """The law after a context of at least one token, [V] float64."""
        before = context[-2] if len(context) > 1 else 0
        return self.table[before, context[-1]]

    def new_cache(self) -> TableCache:
        """A cache without rows."""
        return TableCache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Give rows from place `first` on empty cache rows."""
        assert isinstance(cache, TableCache) and len(cache.lengths) == first
        for _ in range(len(rows) - first):
            cache.lengths.append(0)
            cache.tokens.append([])

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
        """One pass; see LanguageModel.forward."""
        assert isinstance(cache, TableCache)
        batch, columns = token_ids.shape
        out = torch.empty(batch, columns, self.vocab_size, dtype=torch.float32)
        for i, row in enumerate(token_ids.tolist()):
            place = first_row + i
            start = cache.lengths[place]
            seen = cache.tokens[place][:start] + row
            before = [0, *seen] if start == 0 else seen[start - 1 :]
            out[i] = self._logits[before[:-1], before[1:]]
            cache.tokens[place] = seen
            cache.lengths[place] += num_tokens[i]
        if logits is Logits.NONE:
            return ModelOutput(None)
        if logits is Logits.LAST:
            last = torch.tensor(num_tokens).clamp(min=1) - 1
            out = out[torch.arange(batch), last][:, None]
        return ModelOutput(out)
