"""Drawing a draft token by token, in all rows at once.

Owns which rows draft on, and what was drawn with the laws that it was drawn from. Knows no model: whoever has one gives the laws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import DraftStep, LengthPolicy
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows
from foresay.drafters.proposal_builder import Interruptible


class DraftChain(Interruptible):
    """Tokens being drawn one after the other, in all rows at once.

    Drawing happens under `keeping`: after an exception `proposal` returns the tokens drawn before it.
    """

    def __init__(self, rows: Rows, room: Sequence[int], device: torch.device) -> None:
        self._rows, self._room, self._streams = rows, room, rows.streams(device)
        self.ids = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._going = torch.tensor(room, device=device)
        """How many tokens each row may have."""
        self._steps: list[Distributions] = []
        self._ends = _end_tokens(rows, device)
        self._least = torch.tensor([row.params.min_new_tokens - row.num_new for row in rows], device=device)
        """[B]: draft tokens that must come before an end token may end the output."""
        self.fed: list[int] = []
        """[B] of the next pass: 1 where a row drafts on."""

    @property
    def depth(self) -> int:
        """Tokens drawn so far, pads included."""
        return len(self._steps)

    def add(self, distributions: Distributions, policy: LengthPolicy, hidden: torch.Tensor | None) -> bool:
        """Draw the next token of each row; whether anyone drafts on."""
        j = self.depth
        token = draw(distributions, self._streams, Purpose.DRAFT, first=j)
        self._steps.append(distributions)
        self.ids = torch.cat([self.ids, token], 1)
        self.counts += self._going > j
        index = torch.full_like(self.counts, j)
        go_on = policy.keep_drafting(DraftStep(index, token[:, 0], distributions, hidden, self._rows))
        stop = None if go_on is None else ~go_on
        if self._ends is not None:
            ended = (token == self._ends).any(-1) & (self._least < j + 1)
            stop = ended if stop is None else stop | ended
        if stop is not None:
            self._going = torch.where(stop, self.counts, self._going)
        self.fed = [int(n > j + 1) for n in (self._room if stop is None else self._going.tolist())]
        return any(self.fed)

    def proposal(self) -> Proposal:
        """The tokens drawn, with the distributions they were drawn from."""
        counts = self.counts.tolist()
        confidence = None
        steps = self._steps[: self.ids.shape[1]]
        if self._rows.needs.confidence and steps:
            confidence = torch.cat(
                [distributions.confidence(self.ids[:, j : j + 1]) for j, distributions in enumerate(steps)], 1
            )
        sampled = [distributions.probs for distributions in steps if distributions.probs is not None]
        if not sampled:
            return Proposal(self.ids, counts, confidence=confidence, failure=self.failure)
        per_step = sampled[0].shape[0]
        columns = []
        for j, distributions in enumerate(steps):
            assert distributions.probs_row is not None
            columns.append(torch.where(distributions.probs_row >= 0, distributions.probs_row + j * per_step, -1))
        return Proposal(self.ids, counts, torch.cat(sampled), torch.cat(columns, 1), confidence, failure=self.failure)


def _end_tokens(rows: Rows, device: torch.device) -> torch.Tensor | None:
    """[B, E] int64: the tokens that end each row's output, padded with -1; None where there are none."""
    key = f"end tokens {device}"
    if key not in rows.memo:
        width = max(len(row.eos) for row in rows)
        padded = [[*sorted(row.eos), *[-1] * (width - len(row.eos))] for row in rows]
        rows.memo[key] = torch.tensor(padded, device=device) if width else None
    ends: torch.Tensor | None = rows.memo[key]
    return ends
