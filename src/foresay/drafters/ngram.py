"""Base of n-gram drafters, which have no weights: a state for each row, lists of draft tokens, and proposals of point masses.

A subclass defines a row's state and how to draft from it. It indexes committed tokens only (`row.committed`), but matches the
whole context, including draft tokens, so that it also works inside a cascade.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, LengthPolicy, ModelOutput, Move
from foresay.decoding.rows import Row, Rows
from foresay.drafters.known_text import MATCH_LENGTH, known_tokens

State = TypeVar("State")


class NgramDrafter(Drafter, Generic[State]):
    """A drafter that needs no forward pass.

    A state may set `matched`, the match length of its last draft, by which a length policy selects the tokens to score.
    """

    samples = False
    """All draft tokens are point masses."""
    keeps_requests: bool = False
    """True if the drafter's data outlives a request."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start without rows.

        Args:
            device: Device of the proposals.
        """
        self._device = torch.device(device)
        self._states: list[State] = []

    @abstractmethod
    def start(self, row: Row) -> State:
        """Return the state of a new row.

        Args:
            row: The row, with its prompt.
        """

    @abstractmethod
    def draft_tokens(self, row: Row, state: State, count: int) -> list[int]:
        """Return draft tokens for a row.

        Args:
            row: The row, with its committed tokens.
            state: The row's state.
            count: Maximum number of draft tokens. Also 0, to keep the state up to date.
        """

    def finish(self, state: State) -> None:
        """Handle a row that has left the batch; the default does nothing.

        Args:
            state: The row's state.
        """

    def unused(self, index: int) -> None:
        """Handle a row's last draft that is not used; the default does nothing.

        Args:
            index: Index of the row.
        """

    def admit(self, rows: Rows, first: int) -> None:
        """Create a state for each new row."""
        assert len(self._states) == first
        self._states += [self.start(rows[i]) for i in range(first, len(rows))]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves to the states, and finish the states of rows that left."""
        old = list(self._states)
        for source, target in moves:
            self._states[target] = old[source]
        del self._states[count:]
        remaining = {id(state) for state in self._states}
        for state in old:
            if id(state) not in remaining:
                self.finish(state)

    def reset(self) -> None:
        """Forget every row."""
        self._states = []

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Do nothing: `draft_tokens` reads the committed tokens."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft for each row, known tokens first, and keep the tokens that the policy selects."""
        known = [
            known_tokens(row, n, partial(self._lookup, state))
            for row, state, n in zip(rows, self._states, budget, strict=True)
        ]
        wanted = [0 if given else max(0, n) for given, n in zip(known, budget, strict=True)]
        each = zip(rows, self._states, wanted, strict=True)
        found_by_row = [self.draft_tokens(row, state, n)[:n] for row, state, n in each]
        drafts = [given or own for given, own in zip(known, found_by_row, strict=True)]
        if not any(drafts):
            return Proposal.empty(len(rows), self._device)
        found = zip(known, self._states, strict=True)
        matched = [MATCH_LENGTH if given else int(getattr(state, "matched", 0)) for given, state in found]
        kept = policy.num_to_score(rows, [len(draft_tokens) for draft_tokens in drafts], matched)
        drafts = [draft_tokens[:n] for draft_tokens, n in zip(drafts, kept, strict=True)]
        return Proposal.of_lists(drafts, self._device, matched=matched)

    def _lookup(self, state: State, row: Row, count: int) -> list[int]:
        return self.draft_tokens(row, state, count)[:count]
