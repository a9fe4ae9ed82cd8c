"""Rules of a grammar in GBNF that cannot be terminals, because the grammar library's lexer would lose texts.

The lexer takes the longest match: it never ends a terminal before a character that continues it, or another terminal that is
allowed there. Texts are lost where such a character may also follow the terminal. This module finds that, by intersections of
terminals, which the library computes; it may also find it where no text is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import bytes_alone, compiled, gbnf_rules, lark_of_gbnf

MAX_STEPS = 1200
"""Limit on the number of intersections, times that of terminals in each: about a second."""
_TIMES = re.compile(r"\{(\d+),\d*\}")


class _Grammar:
    """The characters that may follow each terminal where rules that are no terminals use it."""

    def __init__(self, rules: Mapping[str, Any], split: Collection[str]) -> None:
        """rules: of the library's reader, with C1, C2, ... for characters and sets. split: terminals that are rules here."""
        inner = {name: one for name, one in rules.items() if not one.rule_is_terminal or name in split}
        self._first: dict[str, set[str]] = {name: {name} if name[0] == "C" else set() for name in rules}
        self._empty: set[str] = set()
        self.followers: dict[str, set[str]] = {}
        size = -1
        while size != (size := len(self._empty) + sum(map(len, self._first.values()))):
            for name, one in rules.items():
                if name[0] != "C":
                    first, is_empty = self._begins(one.alternatives)
                    self._first[name] |= first
                    self._empty |= {name} if is_empty else set()
        size = -1
        while size != (size := len(self.followers) + sum(map(len, self.followers.values()))):
            for name, one in inner.items():
                self._visit(one.alternatives, self.followers.setdefault(name, set()))
        self.terminals = sorted(self.followers.keys() - inner.keys())

    def _begins(self, node: Any) -> tuple[set[str], bool]:
        """Return the characters with which a node begins, and True if it can be empty."""
        if hasattr(node, "target"):
            return self._first[node.target.name], node.target.name in self._empty
        if hasattr(node, "alternatives"):
            parts = [self._begins(one) for one in node.alternatives]
            return set().union(*(first for first, _ in parts)), any(is_empty for _, is_empty in parts)
        if hasattr(node, "min_times"):
            first, is_empty = self._begins(node.node)
            return first, is_empty or not node.min_times
        found: set[str] = set()
        for one in getattr(node, "nodes", ()):  # an empty literal has none
            first, is_empty = self._begins(one)
            found = found | first
            if not is_empty:
                return found, False
        return found, True

    def _visit(self, node: Any, follow: set[str]) -> None:
        if hasattr(node, "target"):
            self.followers.setdefault(node.target.name, set()).update(follow)
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


def losing_texts(source: str) -> set[str]:
    """Return the terminals that have to be read character by character, so that no text is lost.

    source: in GBNF, with a rule for each character and set. All are returned if there are too many to be examined.
    """
    rules, split, budget = gbnf_rules(source), set[str](), [MAX_STEPS]
    # repetitions have no upper limit here, so that the library's automata are small
    lark = _TIMES.sub(lambda found: "*" if found[1] == "0" else "+", lark_of_gbnf(source))
    lark = lark.replace("start: r0", "start: LOST", 1)
    while True:
        grammar = _Grammar(rules, split)
        follow = {one: " | ".join(sorted(grammar.followers[one])) for one in grammar.terminals}
        followed = " | ".join(f"({one} & /(.|\\n)+/) ({after})" for one, after in follow.items() if after)
        try:
            lost = f"{lark}\nLOST: ({followed}) /(.|\\n)*/ &"
            found = _overlapping(lost, grammar.terminals, budget, len(follow)) if followed else []
        except ConfigError:
            return {name for name, one in rules.items() if one.rule_is_terminal and name[0] != "C"}
        if not (new := {name for name in found if name[0] != "C"}):
            return split
        split |= new


def _overlapping(lost: str, names: Sequence[str], budget: list[int], cost: int) -> list[str]:
    """Return the terminals that have a text in common with `lost`, by halves. Raises ConfigError if they are too many."""
    budget[0] -= cost
    if budget[0] < 0:
        raise ConfigError("is too large to be examined", param="grammar")
    try:
        compiled(bytes_alone(), f"{lost} ({' | '.join(names)})\n", is_lark=True)
    except ConfigError as error:
        if "NoExtensionBias" in str(error):  # the library's name of the reason: no text
            return []
        raise
    half = len(names) // 2
    parts = (names[:half], names[half:]) if half else ()
    return [name for part in parts for name in _overlapping(lost, part, budget, cost)] if parts else list(names)
