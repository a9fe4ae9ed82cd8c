"""Rules of a grammar in GBNF that cannot be terminals, because the grammar library's lexer would lose texts.

The lexer takes the longest match: it never ends a terminal before a character that continues it, or another terminal that is
allowed there. Texts are lost where such a character may also follow the terminal. This module finds that, or gives up after a
bounded number of steps; it may also find it where no text is lost. It knows the library's reader only by the nodes of its rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

Ranges = Sequence[tuple[int, int]]
"""Characters as ranges of code points, both ends included."""
MAX_POSITIONS, MAX_STEPS = 2000, 100_000


class _GaveUpError(Exception):
    """The grammar is too large to be examined."""


@dataclass(slots=True)
class _Part:
    """A part of a terminal: can it be empty, and the positions of its first and last characters, as bits."""

    is_empty: bool
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class _Terminal:
    """Automaton of a terminal: a position for each of its characters. Sets of characters and of positions are bits."""

    chars: list[int] = field(default_factory=list)
    """Characters of each position."""
    after: list[int] = field(default_factory=list)
    """Positions after each position."""
    whole: _Part = field(default_factory=lambda: _Part(True))
    empty: set[str] = field(default_factory=set)
    """Rules that have no characters, which are therefore read once."""

    def letters_of(self, positions: int) -> int:
        """Return the characters of positions."""
        return _union(self.chars[one] for one in _bits(positions))

    def add(self, node: Any, letters: Mapping[str, int]) -> _Part:
        """Add a node of the reader with its positions. A repetition has no upper limit here."""
        if hasattr(node, "target"):
            name = node.target.name.lower()
            if name in self.empty:
                return _Part(True)
            if name not in letters:
                before = len(self.chars)
                part = self.add(node.target.alternatives, letters)
                if len(self.chars) == before:
                    self.empty.add(name)
                return part
            if len(self.chars) == MAX_POSITIONS:
                raise _GaveUpError
            self.chars.append(letters[name])
            self.after.append(0)
            bit = 1 << (len(self.chars) - 1)
            return _Part(False, bit, bit)
        if hasattr(node, "alternatives"):
            parts = [self.add(one, letters) for one in node.alternatives]
            first, last = _union(one.first for one in parts), _union(one.last for one in parts)
            return _Part(any(one.is_empty for one in parts), first, last)
        if hasattr(node, "min_times"):
            part = self.add(node.node, letters)
            if node.max_times != 1:
                self._join(part.last, part.first)
            return _Part(part.is_empty or not node.min_times, part.first, part.last)
        whole = _Part(True)
        for one in getattr(node, "nodes", ()):  # an empty literal has none
            part = self.add(one, letters)
            self._join(whole.last, part.first)
            first = whole.first | part.first if whole.is_empty else whole.first
            last = whole.last | part.last if part.is_empty else part.last
            whole = _Part(whole.is_empty and part.is_empty, first, last)
        return whole

    def _join(self, last: int, first: int) -> None:
        for one in _bits(last):
            self.after[one] |= first


class _Grammar:
    """The rules that are no terminals, and the terminals that may follow each of them and each terminal."""

    def __init__(
        self, rules: Mapping[str, Any], letters: Mapping[str, int], split: Collection[str], budget: list[int]
    ) -> None:
        """split: terminals that are rules here. budget: the steps that are left. Raises _GaveUpError."""
        self._rules = {name: one for name, one in rules.items() if not one.rule_is_terminal or name in split}
        self.terminals: dict[str, _Terminal] = {}
        for name, one in rules.items():
            if name not in self._rules:
                self.terminals[name] = found = _Terminal()
                reference = letters.get(name.lower())
                if reference is None:
                    found.whole = found.add(one.alternatives, letters)
                else:
                    found.chars, found.after, found.whole = [reference], [0], _Part(False, 1, 1)
        self.followers: dict[str, set[str]] = {name: set() for name in rules}
        self.used: set[str] = set()
        """Terminals and rules that occur in rules that are no terminals."""
        self._first: dict[str, set[str]] = {name: set() for name in self._rules}
        self._empty: set[str] = set()
        self._budget = budget
        while self._grows():
            pass
        while sum(map(len, self.followers.values())) != self._followed():
            pass

    def _grows(self) -> bool:
        """Add what is known of the beginnings of rules; return True if something was new."""
        before = len(self._empty) + sum(map(len, self._first.values()))
        for name, one in self._rules.items():
            first, is_empty = self._begins(one.alternatives)
            self._first[name] |= first
            if is_empty:
                self._empty.add(name)
        return len(self._empty) + sum(map(len, self._first.values())) != before

    def _begins(self, node: Any) -> tuple[set[str], bool]:
        """Return the terminals with which a node begins, and True if it can be empty."""
        self._step()
        if hasattr(node, "target"):
            name = node.target.name
            if name in self.terminals:
                return {name}, self.terminals[name].whole.is_empty
            return self._first[name], name in self._empty
        if hasattr(node, "alternatives"):
            parts = [self._begins(one) for one in node.alternatives]
            return set().union(*(first for first, _ in parts)), any(is_empty for _, is_empty in parts)
        if hasattr(node, "min_times"):
            first, is_empty = self._begins(node.node)
            return first, is_empty or not node.min_times
        found: set[str] = set()
        for one in getattr(node, "nodes", ()):
            first, is_empty = self._begins(one)
            found = found | first
            if not is_empty:
                return found, False
        return found, True

    def _followed(self) -> int:
        """Add what is known of followers; return their number."""
        for name, one in self._rules.items():
            self._visit(one.alternatives, self.followers[name])
        return sum(map(len, self.followers.values()))

    def _visit(self, node: Any, follow: set[str]) -> None:
        self._step()
        if hasattr(node, "target"):
            self.followers[node.target.name] |= follow
            self.used.add(node.target.name)
        elif hasattr(node, "alternatives"):
            for one in node.alternatives:
                self._visit(one, follow)
        elif hasattr(node, "min_times"):
            self._visit(node.node, follow if node.max_times == 1 else follow | self._begins(node.node)[0])
        else:
            for one in reversed(getattr(node, "nodes", ())):
                self._visit(one, follow)
                first, is_empty = self._begins(one)
                follow = first | follow if is_empty else first

    def _step(self) -> None:
        self._budget[0] -= 1
        if self._budget[0] < 0:
            raise _GaveUpError


def losing_texts(rules: Mapping[str, Any], sets: Mapping[str, Ranges]) -> set[str]:
    """Return the terminals that have to be read character by character, so that no text is lost.

    rules: of the library's reader, in which every character is the name of a rule. sets: the characters of these names. All are
    returned if the grammar is too large to be examined.
    """
    letters, split, budget = _letters(sets), set[str](), [MAX_STEPS]
    try:
        while found := _continuing(_Grammar(rules, letters, split, budget), budget):
            split |= found
    except (_GaveUpError, RecursionError):
        return {name for name, one in rules.items() if one.rule_is_terminal and name.lower() not in letters}
    return split


def _continuing(grammar: _Grammar, budget: list[int]) -> set[str]:
    """Return the terminals that continue a text of a terminal with a character that may also follow it."""
    used = sorted(grammar.used & grammar.terminals.keys())
    found = [grammar.terminals[name] for name in used]
    first = {name: one.letters_of(one.whole.first) for name, one in zip(used, found, strict=True)}
    follow = [_union(first[one] for one in grammar.followers[name]) for name in used]
    begins, goes_on = list(first.values()), [one.letters_of(_union(one.after)) for one in found]
    return {
        used[j]
        for i, j in product(range(len(used)), repeat=2)
        if follow[i] & goes_on[j] and begins[i] & begins[j] and _overlap(found[i], found[j], follow[i], budget)
    }


def _overlap(one: _Terminal, other: _Terminal, follow: int, budget: list[int]) -> bool:
    """Return True if a text of one terminal begins one of the other that goes on with a character of `follow`."""
    pending = [
        (a, b) for a in _bits(one.whole.first) for b in _bits(other.whole.first) if one.chars[a] & other.chars[b]
    ]
    seen = set(pending)
    while pending:
        a, b = pending.pop()
        if one.whole.last >> a & 1 and other.letters_of(other.after[b]) & follow:
            return True
        for pair in product(_bits(one.after[a]), _bits(other.after[b])):
            budget[0] -= 1
            if budget[0] < 0:
                raise _GaveUpError
            if pair not in seen and one.chars[pair[0]] & other.chars[pair[1]]:
                seen.add(pair)
                pending.append(pair)
    return False


def _letters(sets: Mapping[str, Ranges]) -> dict[str, int]:
    """Return each set of characters as bits, one for each interval in which all sets are constant."""
    ends = sorted({end for ranges in sets.values() for low, high in ranges for end in (low, high + 1)})
    return {
        name: _union(
            1 << i for i, (low, high) in enumerate(pairwise(ends)) if any(a <= low and high - 1 <= b for a, b in ranges)
        )
        for name, ranges in sets.items()
    }


def _union(parts: Iterable[int]) -> int:
    out = 0
    for one in parts:
        out |= one
    return out


def _bits(value: int) -> Iterator[int]:
    while value:
        yield (value & -value).bit_length() - 1
        value &= value - 1
