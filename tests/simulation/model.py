"""A target whose scores depend on everything that its cache holds, a drafter for it, and the faults that both may have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import KVCache, LengthPolicy, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.drafters import SuffixDrafter
from foresay.models.table import TableCache, TableModel

TABLE = 64
"""Distributions of the target."""
SLOT_BYTES = 8
_MODULUS = (1 << 31) - 1


class Saved(list[int]):
    """Slots of an ended row."""

    @property
    def nbytes(self) -> int:
        return SLOT_BYTES * len(self)


class HashCache(TableCache):
    """A digest of the tokens up to each position. A wrong slot makes every later distribution another one."""

    @property
    def nbytes(self) -> int:
        return SLOT_BYTES * sum(map(len, self.tokens))

    def save_prefix(self, row: int, length: int) -> Saved:
        return Saved(self.tokens[row][:length])

    def load_prefix(self, row: int, saved: Saved, length: int) -> None:
        self.lengths[row], self.tokens[row] = length, list(saved[:length])


class Faults:
    """The faults that are due. Each is drawn before a run, and happens at its n-th opportunity."""

    def __init__(self) -> None:
        self.due: dict[str, set[int]] = {}
        self._met: dict[str, int] = {}
        self.happened: list[str] = []

    def plan(self, dice: random.Random, name: str, times: int, within: int) -> None:
        """Let a fault happen so many times within the first opportunities."""
        self.due[name] = {dice.randrange(within) for _ in range(times)}

    def meets(self, name: str) -> bool:
        """Return True if the fault happens at this opportunity."""
        count = self._met.get(name, 0)
        self._met[name] = count + 1
        if count not in self.due.get(name, ()):
            return False
        self.happened.append(name)
        return True


class HashModel(TableModel):
    """p(next | the digest of the tokens so far)."""

    capabilities = Capabilities()

    def __init__(self, vocab_size: int, *, max_length: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = 3 * torch.randn(TABLE, vocab_size, generator=generator)
        self.vocab_size, self.max_length, self.device = vocab_size, max_length, torch.device("cpu")
        self.faults = Faults()
        self.room = 1 << 62
        """Bytes that all caches may take."""
        self.taken: Any = lambda: 0
        """Returns the bytes that are taken."""

    def new_cache(self) -> HashCache:
        return HashCache()

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        return SLOT_BYTES * sum(lengths)

    def free_bytes(self) -> int:
        return int(self.room - self.taken())

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        if self.faults.meets("allocation"):
            raise MemoryError("no memory for a row")
        super().admit(rows, first, cache)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        assert isinstance(cache, HashCache)
        if self.faults.meets("target"):
            raise RuntimeError("the pass failed")
        if self.faults.meets("target memory"):
            raise torch.OutOfMemoryError("no memory for a pass")
        batch, columns = model_input.token_ids.shape
        digests = [[0] * columns for _ in range(batch)]
        for i, fed in enumerate(model_input.token_ids.tolist()):
            row = model_input.first_row + i
            seen = cache.tokens[row][: cache.lengths[row]]
            digest = seen[-1] if seen else 1
            for at, token in enumerate(fed):
                digest = (digest * 48_271 + token + 7) % _MODULUS
                digests[i][at] = digest
            cache.tokens[row] = seen + digests[i]
            cache.lengths[row] += model_input.num_tokens[i]
        if model_input.logits is Logits.NONE:
            return ModelOutput(None)
        return ModelOutput(model_input.scored(self.logits[torch.tensor(digests) % TABLE]))


class FaultyDrafter(SuffixDrafter):
    """A suffix drafter with random tokens where nothing matches, which raises or proposes nonsense when a fault is due."""

    def __init__(self, faults: Faults, dice: random.Random, vocab_size: int) -> None:
        super().__init__()
        self._faults, self._dice, self._vocab_size = faults, dice, vocab_size

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        if self._faults.meets("drafter raises"):
            raise ValueError("the drafter failed")
        if self._faults.meets("drafter exits"):
            raise SystemExit(3)
        if self._faults.meets("drafter nonsense"):
            return self._nonsense(len(rows))
        found = super().propose(rows, budget, policy)
        if any(found.num_tokens) or not any(budget):
            return found
        counts = [min(n, self._dice.randrange(3)) for n in budget]
        ids = torch.tensor([[self._dice.randrange(self._vocab_size) for _ in range(max(1, max(counts)))] for _ in rows])
        return Proposal(ids, counts)

    def _nonsense(self, rows: int) -> Proposal:
        ids = torch.full((rows, 2), self._vocab_size + 5)
        kinds = (
            Proposal(ids, [2] * rows),
            Proposal(ids[:, :1], [1] * rows),
            Proposal(ids - self._vocab_size - 9, [2] * rows),
        )
        return self._dice.choice(kinds)
