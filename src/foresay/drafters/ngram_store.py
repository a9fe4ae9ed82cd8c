"""An n-gram store: which tokens followed the last few, learned while decoding.

Counts for contexts of n - 1 tokens, or of every length up to n - 1 with the longest match first. Learns the prompt, what
is committed, and the target's likeliest tokens at every place it scored: those are what it would have written elsewhere.
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

LEVELS = ("one", "all")
_SEEN = 128
"""Weight of a committed token; what the target merely might have written weighs at most 64, and so decides only where
nothing was written."""
Context = tuple[int, ...]


class NgramStore:
    """Counts of the tokens that followed each context, in bounded memory."""

    def __init__(self, n: int = 6, *, levels: str = "all", max_contexts: int = 1 << 18) -> None:
        """n: tokens of an n-gram, its last one the guess. levels: "one" looks contexts of n - 1 tokens up, "all" shorter

        ones too. max_contexts: contexts kept, about 500 bytes each; the ones not seen for longest go first.
        """
        self.n = check_int("n", n, 2, 32)
        self.levels = check_choice("levels", levels, LEVELS)
        self.max_contexts = check_int("max_contexts", max_contexts, 16, 1 << 28)
        self._counts: dict[Context, dict[int, int]] = {}
        self._best: dict[Context, int] = {}
        self._lock = Lock()
        """Two requests may learn at once where the store outlives them."""

    def __len__(self) -> int:
        """Contexts known."""
        return len(self._counts)

    @property
    def sizes(self) -> range:
        """Context lengths, longest first."""
        return range(self.n - 1, self.n - 2 if self.levels == "one" else 0, -1)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()
            self._best.clear()

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Count the n-grams of `tokens` that end at place `start` or behind."""
        for end in range(max(1, start), len(tokens)):
            self.add(tokens[max(0, end - self.n + 1) : end], tokens[end])

    def add(self, context: Sequence[int], token: int, weight: int = _SEEN) -> None:
        """Count one token behind a context (its last n - 1 tokens matter)."""
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
        self._counts[key] = counts  # the last place of the dictionary: seen just now
        count = counts.get(token, 0) + weight
        if weight < _SEEN:  # however often it was merely likely, it was not written
            count = max(counts.get(token, 0), min(count, _SEEN - 1))
        counts[token] = count
        best = self._best.get(key)
        if best is None or count >= counts[best]:  # of equals the later
            self._best[key] = token

    def _forget(self) -> None:
        oldest = next(iter(self._counts))
        del self._counts[oldest], self._best[oldest]

    def next(self, context: Sequence[int]) -> tuple[int, int] | None:
        """(the most frequent token behind the longest known context, that context's length); None when none is known."""
        for size in self.sizes:
            if size <= len(context) and (token := self._best.get(tuple(context[-size:]))) is not None:
                return token, size
        return None


class _Known:
    """A row's store (its own, or the one all rows share), and how much of the row it has learned."""

    __slots__ = ("committed", "drafted", "learned", "matched", "store")

    def __init__(self, store: NgramStore, committed: int) -> None:
        """committed: tokens of the row's history before the step that is next observed."""
        self.store, self.learned, self.committed = store, 0, committed
        self.matched = 0
        self.drafted: list[int] = []

    def read(self, row: Row) -> None:
        """Learn what was committed since the last time."""
        history = row.committed.full_context
        begin = max(0, self.learned - self.store.n)
        self.store.learn(history[begin:].tolist(), self.learned - begin)
        self.learned = len(history)


class NgramStoreDrafter(NgramDrafter[_Known]):
    """Guesses by counts of what followed the last few tokens."""

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
        """store: counts that outlive requests and are shared by all rows; None gives each request its own.

        filler_top_k: above 1, the target's likeliest k tokens at every scored place are learned too. stop_unknown: a
        context nobody has seen ends the draft; else the token before is guessed again.
        """
        super().__init__(device)
        self._shared = store
        self.keeps_requests = store is not None
        self._settings: dict[str, Any] = {"n": n, "levels": levels, "max_contexts": max_contexts}
        NgramStore(**self._settings)  # they are checked here
        self.filler_top_k = check_int("filler_top_k", filler_top_k, 1, 64)
        self.stop_unknown = check_flag("stop_unknown", stop_unknown)

    def start(self, row: Row) -> _Known:
        """The store to learn in, which knows the prompt: what that takes is not taken for the time of a draft."""
        store = self._shared if self._shared is not None else NgramStore(**self._settings)
        state = _Known(store, len(row.full_context))
        state.read(row)
        return state

    def draft_tokens(self, row: Row, state: _Known, count: int) -> list[int]:
        """Follow the most frequent tokens."""
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
        """Point masses; what was guessed is noted, to learn what the target made of it."""
        proposal = super().propose(rows, budget, policy)
        if not rows.level and self.filler_top_k > 1:
            for state, tokens, n in zip(self._states, proposal.token_ids.tolist(), proposal.num_tokens, strict=True):
                state.drafted = tokens[:n]
        return proposal

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Learn the target's likeliest tokens behind each context it scored, and what was written."""
        if rows.level:
            return
        if self.filler_top_k > 1 and target is not None:
            scores = target.scores()
            likeliest = scores.topk(min(self.filler_top_k, scores.shape[-1])).indices.tolist()
            for row, state, places in zip(rows, self._states, likeliest, strict=True):
                self._learn(row, state, places)
        for row, state in zip(rows, self._states, strict=True):
            state.read(row)
            state.committed, state.drafted = state.learned, []

    @staticmethod
    def _learn(row: Row, state: _Known, places: Sequence[Sequence[int]]) -> None:
        """Count the likeliest tokens of each scored place behind what was committed before it and guessed up to it."""
        history = row.full_context
        before = history[max(0, state.committed - state.store.n + 1) : state.committed].tolist()
        drafts = state.drafted or history[state.committed :].tolist()[:-1]
        for place, tokens in enumerate(places[: len(drafts) + 1]):
            context = [*before, *drafts[:place]]
            for rank, token in enumerate(tokens):
                state.store.add(context, token, len(tokens) - rank)
