"""A suffix automaton: every substring of a growing text, found in time proportional to the substring.

Blumer et al. 1985. Each token is added, and each token of a context followed, in amortised O(1); there are at most two
states per token of text. Knows nothing of rows and drafts.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """The substrings of a text of token ids, each with where it ended first and, mostly, where it ended last.

    A state stands for substrings that end at the same places; `length` is that of the longest of them, and `link` leads
    to the state of its longest suffix that also ends elsewhere. State 0 is the empty text.
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
        place = self.last
        while place >= 0 and token not in follow[place]:
            follow[place][token] = state
            place = link[place]
        if place < 0:
            link[state] = 0
        else:
            other = follow[place][token]
            if length[other] == length[place] + 1:
                link[state] = other
            else:
                link[state] = link[other] = self._split(other, place, token)
        self.last = state
        self._seen_again(link[state])

    def _new(self, following: dict[int, int], length: int, first_end: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.first_end.append(first_end)
        self._latest.append(first_end)
        self._before.append(first_end)
        return len(self.next) - 1

    def _split(self, other: int, place: int, token: int) -> int:
        """A state of its own for the suffixes of `other` that are now also found behind `place`."""
        follow, link = self.next, self.link
        clone = self._new(dict(follow[other]), self.length[place] + 1, self.first_end[other])
        link[clone] = link[other]
        self._latest[clone], self._before[clone] = self._latest[other], self._before[other]
        while place >= 0 and follow[place].get(token) == other:
            follow[place][token] = clone
            place = link[place]
        return clone

    def _seen_again(self, state: int) -> None:
        """Note that the substrings of a state have just ended once more."""
        if state > 0:
            self._before[state], self._latest[state] = self._latest[state], self.size

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow one token from a match: the longest suffix of (matched text + token) in the text, and its length."""
        follow = self.next
        while state and token not in follow[state]:
            state = self.link[state]
            length = self.length[state]
        reached = follow[state].get(token)
        return (0, 0) if reached is None else (reached, length + 1)

    def match(self, tokens: Iterable[int], state: int = 0, length: int = 0) -> tuple[int, int]:
        """Follow tokens from a match, the empty one unless given."""
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def followed(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of a match that ended somewhere before the text's end, so that something follows it."""
        while state and self.first_end[state] >= self.size:
            state = self.link[state]
            length = self.length[state]
        return state, length

    def recent_end(self, state: int) -> int:
        """The last place before the text's end where a state's substrings are known to have ended."""
        latest = self._latest[state]
        if latest < self.size:
            return latest
        before = self._before[state]
        return before if before < self.size else self.first_end[state]
