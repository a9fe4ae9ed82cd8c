"""A second-order Markov table as a LanguageModel, whose exact distribution is known.

Public: use it to test a drafter, a rule or a processor of your own without weights, against enumerated probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError


class TableCache:
    """Tokens of each row by absolute position. Entries after a row's length are stale, as in a real cache."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.tokens: list[list[int]] = []

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind the first rows; tokens after the new lengths stay and must never be used."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep some columns of the last forward pass; see KVCache.keep."""
        for i, (start, path) in enumerate(zip(starts, paths, strict=True)):
            kept = [self.tokens[i][start + column] for column in path]
            self.tokens[i][start : start + len(path)] = kept
            self.lengths[i] = start + len(path)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`, whose length becomes `length`."""
        self.lengths[target], self.tokens[target] = length, self.tokens[source][:length]

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]
        self.tokens[one], self.tokens[other] = self.tokens[other], self.tokens[one]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the moves, then drop the rows from index `count` on."""
        for source, target in moves:
            self.lengths[target], self.tokens[target] = self.lengths[source], list(self.tokens[source])
        del self.lengths[count:], self.tokens[count:]


class TableModel(LanguageModel):
    """p(next | last two tokens), read from a table. A context of one token counts as preceded by token 0."""

    capabilities = Capabilities(trees=True)
    """The table scores trees."""

    def __init__(self, table: torch.Tensor, *, max_length: int = 4096) -> None:
        """Normalize the table.

        Args:
            table: [V, V, V] float; table[a, b] is the distribution after ... a b, up to normalization.
            max_length: Maximum length of a row.

        Raises:
            ConfigError: Another shape, weights that are negative or not finite, or a distribution whose weights are all zero.
        """
        if table.dim() != 3 or len(set(table.shape)) != 1:
            raise ConfigError(f"has shape {tuple(table.shape)}; it must be [V, V, V]", param="table")
        if bool((table < 0).any()) or not bool(torch.isfinite(table).all()) or bool((table.sum(-1) <= 0).any()):
            text = "must contain finite, non-negative weights; each distribution table[a, b] needs a positive one"
            raise ConfigError(text, param="table")
        self.table = table.double() / table.double().sum(-1, keepdim=True)
        self._logits = self.table.log().float()
        self.vocab_size = int(table.shape[0])
        self.max_length = max_length
        self.device = table.device

    @classmethod
    def random(cls, vocab_size: int, *, seed: int, concentration: float = 1.0, max_length: int = 4096) -> TableModel:
        """Draw each distribution from a symmetric Dirichlet.

        Args:
            vocab_size: V.
            seed: Seed of the table.
            concentration: A small one makes the distributions peaked.
            max_length: Maximum length of a row.
        """
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(vocab_size, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        return cls((-uniform.log()) ** (1 / concentration) + 1e-9, max_length=max_length)

    def distribution(self, context: Sequence[int]) -> torch.Tensor:
        """Return the distribution after a context, [V] float64.

        Args:
            context: At least one token id.
        """
        previous = context[-2] if len(context) > 1 else 0
        return self.table[previous, context[-1]]

    def new_cache(self) -> TableCache:
        """Return a cache without rows."""
        return TableCache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert isinstance(cache, TableCache) and len(cache.lengths) == first
        for _ in range(len(rows) - first):
            cache.lengths.append(0)
            cache.tokens.append([])

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one forward pass, logits [B, T, V]; see LanguageModel.forward."""
        assert isinstance(cache, TableCache)
        batch, columns = model_input.token_ids.shape
        out = torch.empty(batch, columns, self.vocab_size, dtype=torch.float32)
        parents = None if model_input.parents is None else model_input.parents.tolist()
        for i, fed in enumerate(model_input.token_ids.tolist()):
            row = model_input.first_row + i
            seen = cache.tokens[row][: cache.lengths[row]]
            last = seen[-1] if seen else 0
            above = range(-1, columns - 1) if parents is None else parents[i]
            out[i] = self._logits[[fed[column] if column >= 0 else last for column in above], fed]
            cache.tokens[row] = seen + fed
            cache.lengths[row] += model_input.num_tokens[i]
        if model_input.logits is Logits.NONE:
            return ModelOutput(None)
        return ModelOutput(model_input.scored(out))
