"""Max-Gram: match the longest suffix of the context, of any length, in the prompt, else in the generated text.

Chen et al. 2023, Cascade Speculative Drafting. Proposes the tokens that followed the match; if they are too few, an n-gram table
built from a corpus continues them. Needs no forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from foresay.decoding.protocols import learned_by
from foresay.decoding.rows import IntArray, Row
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix_automaton import SuffixAutomaton


class Continuation(Protocol):
    """A table of the likeliest next tokens; `NgramTable` is one."""

    def continuation(self, context: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens, each the likeliest after those before it; fewer after an unknown context."""
        ...


class _RowIndex:
    """Suffix automata of a row's prompt and of its output, and the match of the output's end in the prompt."""

    __slots__ = ("generated", "in_prompt", "matched", "prompt", "prompt_tokens")

    def __init__(self, prompt_tokens: IntArray) -> None:
        self.prompt_tokens = prompt_tokens
        self.prompt, self.generated = SuffixAutomaton(), SuffixAutomaton()
        self.prompt.extend(prompt_tokens.tolist())
        self.in_prompt = (self.prompt.last, self.prompt.size)
        self.matched = 0

    def read(self, output: IntArray) -> None:
        """Add committed tokens."""
        new = output[self.generated.size :].tolist()
        self.generated.extend(new)
        self.in_prompt = self.prompt.match(new, *self.in_prompt)

    def find(self, output: IntArray, drafted: Sequence[int], count: int) -> list[int]:
        """Return the tokens after an earlier occurrence of the longest suffix of the output and draft tokens."""
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


class MaxGram(NgramDrafter[_RowIndex]):
    """Draft by the longest match in the prompt, else in the output; continue with a table if there is one."""

    def __init__(self, table: Continuation | None = None, *, device: torch.device | str = "cpu") -> None:
        """table: likeliest next tokens over the same token ids; None to propose only matched text."""
        super().__init__(device)
        self.table = table

    @property
    def learned(self) -> bytes:
        """Digest of the table."""
        return learned_by(self.table)

    def start(self, row: Row) -> _RowIndex:
        """Index the prompt, or an encoder's source."""
        return _RowIndex(row.source if row.source is not None else row.tokens[: row.prompt_length].copy())

    def draft_tokens(self, row: Row, state: _RowIndex, count: int) -> list[int]:
        """Copy the tokens after the longest match, then continue with the table."""
        root = row.committed
        output = root.tokens[root.prompt_length :]
        state.read(output)
        if count <= 0:
            return []
        drafted = row.tokens[row.size - _num_drafted(row) :].tolist()
        found = state.find(output, drafted, count)
        if self.table is not None and len(found) < count:
            context = np.concatenate([row.tokens[-8:], np.asarray(found[-8:], dtype=np.int64)]).tolist()
            found += self.table.continuation(context, count - len(found))
        return found


def _ids(tokens: IntArray) -> list[int]:
    ids: list[int] = tokens.tolist()
    return ids


def _num_drafted(row: Row) -> int:
    """Return the number of a row's tokens that are not committed."""
    return len(row.full_context) - len(row.committed.full_context) if row is not row.committed else 0
