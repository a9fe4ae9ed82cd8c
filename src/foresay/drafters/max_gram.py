"""Max-Gram: the longest suffix of the context, of any length, that occurs in the prompt, else in what was generated.

Chen et al. 2023, Cascade Speculative Drafting. The tokens that followed it there are proposed; where they end, a table of
likeliest successors made from a corpus goes on. Costs nothing but look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from foresay.decoding.rows import IntArray, Row
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix_automaton import SuffixAutomaton


class Continuation(Protocol):
    """A corpus's likeliest successors; `NgramTable` is one."""

    def continuation(self, context: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens, each the likeliest after those before it; fewer where nothing is known."""
        ...


class _Gram:
    """A row's prompt and output as automata, and how much of the output's end is found in each."""

    __slots__ = ("generated", "in_prompt", "matched", "prompt", "prompt_tokens")

    def __init__(self, prompt_tokens: IntArray) -> None:
        self.prompt_tokens = prompt_tokens
        self.prompt, self.generated = SuffixAutomaton(), SuffixAutomaton()
        self.prompt.extend(prompt_tokens.tolist())
        self.in_prompt = (self.prompt.last, self.prompt.size)
        self.matched = 0

    def read(self, output: IntArray) -> None:
        """Take in committed tokens."""
        new = output[self.generated.size :].tolist()
        self.generated.extend(new)
        self.in_prompt = self.prompt.match(new, *self.in_prompt)

    def find(self, output: IntArray, drafted: Sequence[int], count: int) -> list[int]:
        """What followed the longest suffix of prompt, output and guesses."""
        state, length = self.prompt.followed(*self.prompt.match(drafted, *self.in_prompt))
        self.matched = length
        if length:
            end = self.prompt.first_end[state]
            return _ids(self.prompt_tokens[end : end + count])
        own = self.generated
        state, length = own.followed(*own.match(drafted, own.last, own.size))
        self.matched = length
        if not length:
            return []
        end = own.recent_end(state)
        return _ids(output[end : end + count])


class MaxGram(NgramDrafter[_Gram]):
    """Guesses by the longest match in prompt or output, continued by a table where there is one."""

    def __init__(self, table: Continuation | None = None, *, device: torch.device | str = "cpu") -> None:
        """table: a corpus's successors over the same token ids; None continues nothing."""
        super().__init__(device)
        self.table = table

    def start(self, row: Row) -> _Gram:
        """Index the prompt, or what the encoder read."""
        return _Gram(row.source if row.source is not None else row.tokens[: row.prompt_length].copy())

    def draft_tokens(self, row: Row, state: _Gram, count: int) -> list[int]:
        """Copy what followed the longest suffix, then go on by the table."""
        root = row.committed
        output = root.tokens[root.prompt_length :]
        state.read(output)
        if count <= 0:
            return []
        drafted = row.tokens[row.size - _drafted(row) :].tolist()
        found = state.find(output, drafted, count)
        if self.table is not None and len(found) < count:
            context = np.concatenate([row.tokens[-8:], np.asarray(found[-8:], dtype=np.int64)]).tolist()
            found += self.table.continuation(context, count - len(found))
        return found


def _ids(tokens: IntArray) -> list[int]:
    ids: list[int] = tokens.tolist()
    return ids


def _drafted(row: Row) -> int:
    """Tokens of a row that lie beyond what is committed."""
    return len(row.full_context) - len(row.committed.full_context) if row is not row.committed else 0
