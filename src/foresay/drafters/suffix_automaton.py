"""A suffix automaton of a growing text: finds any substring in time proportional to its length (Blumer et al. 1985).

Adding a token and extending a match by a token take amortised O(1); there are at most two states per token. Knows neither rows
nor drafts.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """All substrings of a text of token ids, with the end of each one's first and, usually, latest occurrence.

    A state represents the substrings that end at the same set of positions; `length` is that of the longest of them, and `link`
    is the state of its longest suffix with more occurrences. State 0 is the empty text.
    """

    __slots__ = ("_before", "_latest", "first_end", "last", "length", "link", "next", "size")

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.first_end = [-1], [0], [0]
        self._latest, self._before = [0], [0]
        self.last = self.size = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        follow, link, length = self.next, self.link, self.length
        self.size += 1
        state = self._new({}, self.size, self.size)
        suffix = self.last
        while suffix >= 0 and token not in follow[suffix]:
            follow[suffix][token] = state
            suffix = link[suffix]
        if suffix < 0:
            link[state] = 0
        else:
            other = follow[suffix][token]
            if length[other] == length[suffix] + 1:
                link[state] = other
            else:
                link[state] = link[other] = self._split(other, suffix, token)
        self.last = state
        self._record_end(link[state])

    def _new(self, following: dict[int, int], length: int, first_end: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.first_end.append(first_end)
        self._latest.append(first_end)
        self._before.append(first_end)
        return len(self.next) - 1

    def _split(self, other: int, suffix: int, token: int) -> int:
        """Return a new state for the suffixes of `other` that now also occur as `suffix` plus `token`."""
        follow, link = self.next, self.link
        clone = self._new(dict(follow[other]), self.length[suffix] + 1, self.first_end[other])
        link[clone] = link[other]
        self._latest[clone], self._before[clone] = self._latest[other], self._before[other]
        while suffix >= 0 and follow[suffix].get(token) == other:
            follow[suffix][token] = clone
            suffix = link[suffix]
        return clone

    def _record_end(self, state: int) -> None:
        """Record the end of the text as the latest end of a state's substrings."""
        if state > 0:
            self._before[state], self._latest[state] = self._latest[state], self.size

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extend a match by one token: return the state and length of the longest suffix of match + token in the text."""
        follow = self.next
        while state and token not in follow[state]:
            state = self.link[state]
            length = self.length[state]
        reached = follow[state].get(token)
        return (0, 0) if reached is None else (reached, length + 1)

    def match(self, tokens: Iterable[int], state: int = 0, length: int = 0) -> tuple[int, int]:
        """Extend a match, by default the empty one, by several tokens; return its state and length."""
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def followed(self, state: int, length: int) -> tuple[int, int]:
        """Return the state and length of a match's longest suffix that occurs before the text's end, so that a token follows."""
        while state and self.first_end[state] >= self.size:
            state = self.link[state]
            length = self.length[state]
        return state, length

    def recent_end(self, state: int) -> int:
        """Return the latest known end of a state's substrings before the text's end."""
        latest = self._latest[state]
        if latest < self.size:
            return latest
        before = self._before[state]
        return before if before < self.size else self.first_end[state]
