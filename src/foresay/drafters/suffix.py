"""Suffix drafting: copy the tokens after the context's longest match in its own text or in earlier requests.

SuffixDecoding (Oliaro et al. 2024): the longer the match, the longer the draft. A row's text is indexed by a suffix automaton,
which extends a match in amortised O(1) per token, earlier requests by a memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import ModelOutput
from foresay.decoding.rows import Row, Rows
from foresay.drafters.memory import Memory
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix_automaton import SuffixAutomaton


class SuffixState:
    """A row's own automaton, and its last draft."""

    __slots__ = ("automaton", "committed", "from_memory", "full_context", "matched")

    def __init__(self, row: Row) -> None:
        self.committed = row
        self.automaton = SuffixAutomaton()
        self.full_context = row.full_context
        self.matched = 0
        """Length of the match that the last draft was copied from."""
        self.from_memory = False
        """True if it was copied from an earlier request."""


class SuffixDrafter(NgramDrafter[SuffixState]):
    """Draft by the longest match in the row's own text or in earlier requests."""

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        prompts: bool = True,
        scale: float = 3.0,
        min_match: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """memory: earlier requests, which drafters may share; None searches only the row's own text.

        prompts: False to keep only outputs in the memory. scale: draft tokens per matched token. min_match: shortest match that
        gives a draft.
        """
        super().__init__(device)
        self.memory, self.prompts = memory, prompts
        self.keeps_requests = memory is not None
        self.scale = check_float("scale", scale, 0.1, 64.0)
        self.min_match = check_int("min_match", min_match, 1, 1024)

    def start(self, row: Row) -> SuffixState:
        """Index the prompt."""
        if self.memory is not None:
            self.memory.prepare(row.params.owner)
        state = SuffixState(row)
        state.automaton.extend(state.full_context.tolist())
        return state

    def finish(self, state: SuffixState) -> None:
        """Add a finished request to the memory."""
        if self.memory is not None:
            row = state.committed
            kept = row.full_context if self.prompts else row.tokens[row.prompt_length :]
            self.memory.add(row.params.owner, kept)

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
        remembered, tokens = next(self._remembered(row, count), (0, []))
        state.from_memory = remembered > length
        state.matched = max(length, remembered)
        if state.matched < self.min_match:
            return []
        return (tokens if state.from_memory else found)[: max(1, int(self.scale * state.matched))]

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
        for matched, found in self._remembered(row, count):
            if matched >= self.min_match:
                yield found[: max(1, int(self.scale * matched))]

    def _remembered(self, row: Row, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (length of a match in earlier requests of the row's owner, tokens after it)."""
        if self.memory is not None:
            yield from self.memory.continuations(row.params.owner, row.full_context, count)

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Count accepted draft tokens that were copied from earlier requests."""
        if self.memory is None or verification is None:
            return
        for state, accepted in zip(self._states, verification.num_accepted.tolist(), strict=True):
            if state.from_memory:
                self.memory.drafts += 1
                self.memory.accepted += int(accepted)
                state.from_memory = False

    def unused(self, index: int) -> None:
        """See NgramDrafter."""
        self._states[index].from_memory = False
