"""An n-gram store: counts of which tokens followed which contexts, learned while decoding.

Contexts have n - 1 tokens, or every length up to n - 1, the longest match first. Learns the prompt, the committed tokens, and
optionally the target's likeliest tokens at every position it scored, rejected ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch

from foresay.checks import check_choice, check_flag, check_int
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import LengthPolicy, ModelOutput
from foresay.decoding.rows import Row, Rows
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.owners import keep

LEVELS = ("one", "all")
_SEEN = 128
"""Weight of a committed token. A token that was only likely adds at most 64, so it wins only where none was committed."""
Context = tuple[int, ...]


class NgramStore:
    """Counts of the tokens that followed each context, in bounded memory."""

    def __init__(self, n: int = 6, *, levels: str = "all", max_contexts: int = 1 << 18) -> None:
        """n: tokens of an n-gram, whose last token is the draft token.

        levels: "one" uses contexts of n - 1 tokens, "all" shorter ones as well. max_contexts: most contexts to keep, about 500
        bytes each; the least recently updated are dropped.
        """
        self.n = check_int("n", n, 2, 32)
        self.levels = check_choice("levels", levels, LEVELS)
        self.max_contexts = check_int("max_contexts", max_contexts, 16, 1 << 28)
        self._counts: dict[Context, dict[int, int]] = {}
        self._best: dict[Context, int] = {}
        self._lock = Lock()
        """Engines in several threads may share a store."""
        self._others: dict[str, NgramStore] = {}

    def __len__(self) -> int:
        """Return the number of known contexts."""
        return len(self._counts)

    def of_owner(self, owner: str) -> NgramStore:
        """Return the store of a request's owner, which learns nothing of the others; this one if the owner is empty."""
        if not owner:
            return self
        with self._lock:
            found = self._others.get(owner)
            if found is None:
                found = NgramStore(self.n, levels=self.levels, max_contexts=self.max_contexts)
            return keep(self._others, owner, found)

    @property
    def sizes(self) -> range:
        """Context lengths, longest first."""
        return range(self.n - 1, self.n - 2 if self.levels == "one" else 0, -1)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()
            self._best.clear()
            self._others.clear()

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Count the n-grams of `tokens` that end at index `start` or later."""
        for end in range(max(1, start), len(tokens)):
            self.add(tokens[max(0, end - self.n + 1) : end], tokens[end])

    def add(self, context: Sequence[int], token: int, weight: int = _SEEN) -> None:
        """Add `weight` to a token's count after a context, of which the last n - 1 tokens matter."""
        with self._lock:
            for size in self.sizes:
                if size <= len(context):
                    self._count(tuple(context[-size:]), token, weight)

    def _count(self, key: Context, token: int, weight: int) -> None:
        counts = self._counts.pop(key, None)
        if counts is None:
            if len(self._counts) >= self.max_contexts:
                self._forget()
            counts = {}
        self._counts[key] = counts  # last in the dictionary: most recently updated
        count = counts.get(token, 0) + weight
        if weight < _SEEN:  # never outweighs a committed token
            count = max(counts.get(token, 0), min(count, _SEEN - 1))
        counts[token] = count
        best = self._best.get(key)
        if best is None or count >= counts[best]:  # the latest of equal counts
            self._best[key] = token

    def _forget(self) -> None:
        oldest = next(iter(self._counts))
        del self._counts[oldest], self._best[oldest]

    def next(self, context: Sequence[int]) -> tuple[int, int] | None:
        """Return (the most frequent token after the longest known context, that context's length); None if none is known."""
        for size in self.sizes:
            if size <= len(context) and (token := self._best.get(tuple(context[-size:]))) is not None:
                return token, size
        return None


class _RowState:
    """A row's store, which may be shared by all rows, and how many of the row's tokens it has learned."""

    __slots__ = ("committed", "drafted", "learned", "matched", "store")

    def __init__(self, store: NgramStore, committed: int) -> None:
        """committed: number of the row's committed tokens before the current step."""
        self.store, self.learned, self.committed = store, 0, committed
        self.matched = 0
        self.drafted: list[int] = []

    def read(self, row: Row) -> None:
        """Learn the tokens committed since the last call."""
        history = row.committed.full_context
        begin = max(0, self.learned - self.store.n)
        self.store.learn(history[begin:].tolist(), self.learned - begin)
        self.learned = len(history)


class NgramStoreDrafter(NgramDrafter[_RowState]):
    """Draft the tokens that most often followed the last few tokens."""

    def __init__(
        self,
        n: int = 6,
        *,
        levels: str = "all",
        filler_top_k: int = 1,
        stop_unknown: bool = True,
        store: NgramStore | None = None,
        max_contexts: int = 1 << 18,
        device: torch.device | str = "cpu",
    ) -> None:
        """n, levels, max_contexts: see NgramStore. store: a store that outlives requests and is shared by the rows of an owner;
        None creates one for each request.

        filler_top_k: above 1, the target's k likeliest tokens at every scored position are learned too. stop_unknown: True ends
        the draft at an unknown context; False repeats the last token there.
        """
        super().__init__(device)
        self._shared = store
        self.keeps_requests = store is not None
        self._settings: dict[str, Any] = {"n": n, "levels": levels, "max_contexts": max_contexts}
        NgramStore(**self._settings)  # checks the settings
        self.filler_top_k = check_int("filler_top_k", filler_top_k, 1, 64)
        self.stop_unknown = check_flag("stop_unknown", stop_unknown)

    def start(self, row: Row) -> _RowState:
        """Return a state whose store has learned the prompt, so that the time for it does not count as drafting."""
        store = NgramStore(**self._settings) if self._shared is None else self._shared.of_owner(row.params.owner)
        state = _RowState(store, len(row.full_context))
        state.read(row)
        return state

    def draft_tokens(self, row: Row, state: _RowState, count: int) -> list[int]:
        """Draft the most frequent next token, one after the other."""
        state.read(row)
        store = state.store
        context = row.full_context[-(store.n - 1) :].tolist()
        out: list[int] = []
        while len(out) < count:
            found = store.next(context)
            if found is None and self.stop_unknown:
                break
            token, size = found or (context[-1], 0)
            if not out:
                state.matched = size
            out.append(token)
            context = [*context[-(store.n - 2) :], token] if store.n > 2 else [token]
        return out

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft for each row, and record the draft tokens if the target's likeliest tokens after them are to be learned."""
        proposal = super().propose(rows, budget, policy)
        if not rows.level and self.filler_top_k > 1:
            for state, tokens, n in zip(self._states, proposal.token_ids.tolist(), proposal.num_tokens, strict=True):
                state.drafted = tokens[:n]
        return proposal

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Learn the committed tokens and, with filler_top_k above 1, the target's likeliest tokens at each scored position."""
        if rows.level:
            return
        if self.filler_top_k > 1 and target is not None:
            scores = target.scores()
            likeliest = scores.topk(min(self.filler_top_k, scores.shape[-1])).indices.tolist()
            for row, state, positions in zip(rows, self._states, likeliest, strict=True):
                self._learn(row, state, positions)
        for row, state in zip(rows, self._states, strict=True):
            state.read(row)
            state.committed, state.drafted = state.learned, []

    @staticmethod
    def _learn(row: Row, state: _RowState, positions: Sequence[Sequence[int]]) -> None:
        """Count the likeliest tokens of each scored position, after the committed tokens and the draft tokens before it."""
        history = row.full_context
        before = history[max(0, state.committed - state.store.n + 1) : state.committed].tolist()
        drafts = state.drafted or history[state.committed :].tolist()[:-1]
        for position, tokens in enumerate(positions[: len(drafts) + 1]):
            context = [*before, *drafts[:position]]
            for rank, token in enumerate(tokens):
                state.store.add(context, token, len(tokens) - rank)
