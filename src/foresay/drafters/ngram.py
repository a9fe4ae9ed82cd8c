"""What drafters without weights share: a state for each row, lists of guessed ids, and a proposal of point masses.

A subclass says what it keeps for a row and what it guesses from it. It indexes committed tokens only (`row.committed`), and
looks up whatever context it is asked about, committed or guessed, so that it also works inside a cascade.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, LengthPolicy, ModelOutput, Move
from foresay.decoding.rows import Row, Rows

State = TypeVar("State")


class NgramDrafter(Drafter, Generic[State]):
    """A Drafter whose guesses cost no pass of a model.

    A state may say in `matched` how many tokens of context its last guess continues: a length policy then keeps the sure ones.
    """

    samples = False
    keeps_requests: bool = False
    """Whether what it knows outlives a request."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._states: list[State] = []

    @abstractmethod
    def start(self, row: Row) -> State:
        """What to keep for a new row."""

    @abstractmethod
    def draft_tokens(self, row: Row, state: State, count: int) -> list[int]:
        """At most `count` tokens to follow the row's; called with 0 too, to keep the state up to date."""

    def finish(self, state: State) -> None:
        """A row has left."""

    def admit(self, rows: Rows, first: int) -> None:
        """Start a state for each new row."""
        assert len(self._states) == first
        self._states += [self.start(rows[i]) for i in range(first, len(rows))]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        old = list(self._states)
        for source, target in moves:
            self._states[target] = old[source]
        del self._states[count:]
        staying = {id(state) for state in self._states}
        for state in old:
            if id(state) not in staying:
                self.finish(state)

    def reset(self) -> None:
        """Forget every row."""
        self._states = []

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Nothing to learn from the target's pass: committed tokens are read when a guess is asked for."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Point masses: nothing was sampled."""
        each = zip(rows, self._states, budget, strict=True)
        drafts = [self.draft_tokens(row, state, max(0, n))[: max(0, n)] for row, state, n in each]
        if any(drafts):
            matches = [int(getattr(state, "matched", 0)) for state in self._states]
            kept = policy.num_to_score(rows, [len(draft_tokens) for draft_tokens in drafts], matches)
            drafts = [draft_tokens[:n] for draft_tokens, n in zip(drafts, kept, strict=True)]
        return as_proposal(drafts, self._device)


def as_proposal(drafts: Sequence[Sequence[int]], device: torch.device) -> Proposal:
    """B lists of guessed ids as a proposal of point masses."""
    counts = [len(draft_tokens) for draft_tokens in drafts]
    width = max(counts)
    if width == 0:
        return Proposal.empty(len(drafts), device)
    padded = [[*draft_tokens, *[0] * (width - len(draft_tokens))] for draft_tokens in drafts]
    return Proposal(torch.tensor(padded, device=device), counts)
