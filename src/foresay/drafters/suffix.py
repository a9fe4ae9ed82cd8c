"""Suffix drafting: copy the tokens after the context's longest match in its own text or in earlier requests.

SuffixDecoding (Oliaro et al. 2024): the longer the match, the longer the draft. A row's text and earlier requests are indexed by
suffix automata, which extend a match in amortised O(1) per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.rows import IntArray, Row
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix_automaton import SuffixAutomaton

_REMATCH = 64
"""Last tokens of the context that are matched again after the past requests have changed."""


class _Past:
    """One automaton over finished requests, and their text."""

    __slots__ = ("automaton", "text")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.text: list[int] = []

    def add(self, tokens: IntArray) -> None:
        """Append a request after a unique negative separator, so that no match crosses requests."""
        new = [-1 - self.automaton.size, *tokens.tolist()]
        self.automaton.extend(new)
        self.text += new

    def continuation(self, state: int, length: int, count: int) -> tuple[list[int], int]:
        """Return (the tokens after a match's longest suffix that did not always end its request, that suffix's length)."""
        automaton = self.automaton
        while state:
            if found := self.after(automaton.recent_end(state), count):
                return found, length
            for token, following in list(automaton.next[state].items()):
                if token >= 0:
                    return self.after(automaton.first_end[following] - 1, count), length
            state = automaton.link[state]
            length = automaton.length[state]
        return [], 0

    def after(self, end: int, count: int) -> list[int]:
        """Return up to `count` tokens from index `end` on, within their request."""
        out: list[int] = []
        for token in self.text[end : end + count]:
            if token < 0:
                break
            out.append(token)
        return out


class PastRequests:
    """Earlier requests, in bounded memory: when the newer half is full, the older half is dropped."""

    def __init__(self, max_tokens: int = 1 << 18) -> None:
        """max_tokens: most tokens to keep, about 400 bytes each; 0 keeps nothing."""
        self.max_tokens = check_int("max_tokens", max_tokens, 0, 1 << 26)
        self._lock = Lock()
        self.halves: tuple[_Past, ...] = (_Past(),)

    def __len__(self) -> int:
        """Return the number of stored tokens, including one separator per request."""
        return sum(half.automaton.size for half in self.halves)

    def add(self, tokens: IntArray) -> None:
        """Store a finished request, or its last tokens if it exceeds half of the memory."""
        half = self.max_tokens // 2
        if half < 2 or len(tokens) == 0:
            return
        tokens = tokens[-(half - 1) :]
        with self._lock:
            newest = self.halves[-1]
            if newest.automaton.size + len(tokens) + 1 > half:
                newest = _Past()
                self.halves = (self.halves[-1], newest)
            newest.add(tokens)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.halves = (_Past(),)


class _Match:
    """The match of a row's context in one half of the past requests."""

    __slots__ = ("length", "past", "read", "size", "state")

    def __init__(self, past: _Past) -> None:
        self.past, self.size = past, past.automaton.size
        self.state = self.length = self.read = 0


class SuffixState:
    """A row's own automaton, and its matches in past requests."""

    __slots__ = ("automaton", "committed", "full_context", "matched", "matches")

    def __init__(self, row: Row) -> None:
        self.committed = row
        self.automaton = SuffixAutomaton()
        self.full_context = row.full_context
        self.matches: dict[int, _Match] = {}
        self.matched = 0


class SuffixDrafter(NgramDrafter[SuffixState]):
    """Draft by the longest match in the row's own text or in earlier requests."""

    def __init__(
        self,
        past: PastRequests | None = None,
        *,
        scale: float = 3.0,
        min_match: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """past: earlier requests, which drafters may share; None searches only the row's own text.

        scale: draft tokens per matched token. min_match: shortest match that gives a draft.
        """
        super().__init__(device)
        self.past = past
        self.keeps_requests = past is not None
        self.scale = check_float("scale", scale, 0.1, 64.0)
        self.min_match = check_int("min_match", min_match, 1, 1024)

    def start(self, row: Row) -> SuffixState:
        """Index the prompt."""
        state = SuffixState(row)
        state.automaton.extend(state.full_context.tolist())
        return state

    def finish(self, state: SuffixState) -> None:
        """Add a finished request to the past requests."""
        if self.past is not None:
            self.past.add(state.committed.full_context)

    def reset(self) -> None:
        """Add every row to the past requests, and forget it."""
        for state in self._states:
            self.finish(state)
        super().reset()

    def draft_tokens(self, row: Row, state: SuffixState, count: int) -> list[int]:
        """Copy the tokens after the longest match, `scale` tokens for each matched token."""
        own = state.automaton
        state.full_context = row.committed.full_context
        own.extend(state.full_context[own.size :].tolist())
        if count <= 0:
            return []
        context = state.full_context if row is row.committed else row.full_context
        drafted = context[len(state.full_context) :].tolist()
        node, length = own.followed(*own.match(drafted, own.last, own.size))
        found = state.full_context[(end := own.recent_end(node)) : end + count].tolist() if length else []
        for past in self.past.halves if self.past is not None else ():
            other, other_length = self._in_past(state, past, drafted, count)
            if other_length > length and other:
                found, length = other, other_length
        state.matched = length
        if length < self.min_match:
            return []
        return found[: max(1, int(self.scale * length))]

    def others(self, row: Row, state: SuffixState, count: int) -> Iterator[list[int]]:
        """Yield continuations of other and of shorter matches, longest first. Call `draft_tokens` before."""
        own = state.automaton
        context = state.full_context if row is row.committed else row.full_context
        drafted = context[len(state.full_context) :].tolist()
        node, length = own.followed(*own.match(drafted, own.last, own.size))
        while node and length >= self.min_match:
            most = min(count, max(1, int(self.scale * length)))
            for end in (own.recent_end(node), own.first_end[node]):
                yield state.full_context[end : end + most].tolist()
            node = own.link[node]
            length = own.length[node]
        for past in self.past_halves():
            found, matched = self._in_past(state, past, drafted, count)
            if matched >= self.min_match:
                yield found[: max(1, int(self.scale * matched))]

    def _in_past(self, state: SuffixState, past: _Past, drafted: list[int], count: int) -> tuple[list[int], int]:
        """Return (the tokens after the longest match in one half of the past requests, that match's length)."""
        automaton = past.automaton
        known = state.matches.get(id(past))
        if known is None or known.past is not past or known.size != automaton.size:
            known = _Match(past)
            known.read = max(0, len(state.full_context) - _REMATCH)
            state.matches = {id(m.past): m for m in state.matches.values() if m.past in self.past_halves()}
            state.matches[id(past)] = known
        new = state.full_context[known.read :].tolist()
        known.state, known.length = automaton.match(new, known.state, known.length)
        known.read = len(state.full_context)
        node, length = automaton.followed(*automaton.match(drafted, known.state, known.length))
        return past.continuation(node, length, count)

    def past_halves(self) -> tuple[_Past, ...]:
        """Return the current halves of the past requests."""
        return () if self.past is None else self.past.halves
