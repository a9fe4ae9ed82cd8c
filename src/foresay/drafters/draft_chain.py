"""Autoregressive drafting: one token after the other, in all rows at once.

Owns the drawn tokens, the distributions that they were drawn from, and which rows continue. Knows no model: the caller computes
the distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foresay.decoding.devices import to_device
from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw
from foresay.decoding.proposal import Proposal
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.decoding.stopping import DraftStep, Stopping
from foresay.drafters.proposal_builder import Interruptible


class DraftChain(Interruptible):
    """A chain of draft tokens for each row, drawn one position at a time.

    Call `add` under `keeping`: after an exception `proposal` returns the tokens drawn before it.
    """

    def __init__(self, rows: Rows, room: Sequence[int], device: torch.device) -> None:
        """room: [B], largest number of draft tokens of each row."""
        self._rows, self.room, self._streams = rows, room, rows.streams(device, max(room))
        self.ids = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._limits = torch.tensor(room, device=device)
        """[B], number of tokens at which each row's draft ends."""
        self._steps: list[Distributions] = []
        self.fed: list[int] = []
        """[B], tokens that the next pass feeds: 1 for rows that continue, else 0."""

    @property
    def depth(self) -> int:
        """Positions drawn so far, padding included."""
        return self.ids.shape[1]

    def add(
        self,
        distributions: Distributions,
        stopping: Stopping,
        hidden: torch.Tensor | None,
        continues: Callable[[torch.Tensor, int], torch.Tensor | None],
    ) -> bool:
        """Draw the next token of each row from distributions [B, 1]; return True if any row continues.

        hidden: [B, H], the hidden states that the distributions were computed from, if the rule reads them. continues: the
        rows that the drafter continues after tokens [B] at an index, [B] bool, or None for all.
        """
        j = self.depth
        token = draw(distributions, self._streams, Purpose.DRAFT, first=j)
        self._steps.append(distributions)
        self.ids = torch.cat([self.ids, token], 1)
        self.counts += self._limits > j
        index = torch.full_like(self.counts, j)
        able = [n > j + 1 and (not self.fed or on > 0) for n, on in zip(self.room, self.fed or self.room, strict=True)]
        mask = stopping.keep(DraftStep(index, token[:, 0], distributions, hidden, able))
        stop = None if mask is None else ~mask
        if (own := continues(token[:, 0], j)) is not None:
            stop = ~own if stop is None else stop | ~own
        if (ended := _ends(self._rows, token, first=j)) is not None:
            stop = ended[:, 0] if stop is None else stop | ended[:, 0]
        if stop is not None:
            self._limits = torch.where(stop, self.counts, self._limits)
        self.fed = [int(n > j + 1) for n in (self.room if stop is None else self._limits.tolist())]
        return any(self.fed)

    def proposal(self) -> Proposal:
        """Return the drawn tokens with the distributions they were drawn from."""
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
        indices = []
        for j, distributions in enumerate(steps):
            assert distributions.probs_row is not None
            indices.append(torch.where(distributions.probs_row >= 0, distributions.probs_row + j * per_step, -1))
        return Proposal(self.ids, counts, torch.cat(sampled), torch.cat(indices, 1), confidence, failure=self.failure)


_END_TOKENS = StateKey[dict[torch.device, torch.Tensor | None]](dict)


def up_to_end(rows: Rows, token_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of draft tokens up to each row's first end token, [B, K] int64 -> [B] int64; None if no row has any."""
    ends, width = _ends(rows, token_ids), token_ids.shape[1]
    if ends is None:
        return None
    return torch.where(ends, torch.arange(1, width + 1, device=ends.device), width).amin(1)


def _ends(rows: Rows, token_ids: torch.Tensor, first: int = 0) -> torch.Tensor | None:
    """Return where draft tokens end the output, [B, K] int64 -> [B, K] bool; None if no row has end tokens.

    first: index of the first of these tokens in the draft.
    """
    device = token_ids.device
    ids = _end_tokens(rows, device)
    if ids is None:
        return None
    needed = to_device([row.params.min_new_tokens - row.num_new - first for row in rows], device)
    after = torch.arange(1, token_ids.shape[1] + 1, device=device)
    return (token_ids[..., None] == ids[:, None]).any(-1) & (needed[:, None] < after)


def _end_tokens(rows: Rows, device: torch.device) -> torch.Tensor | None:
    """Return the token ids that end each row's output, [B, E] int64 padded with -1; None if no row has any."""
    by_device = _END_TOKENS.of(rows)
    if device not in by_device:
        width = max(len(row.eos) for row in rows)
        padded = [[*sorted(row.eos), *[-1] * (width - len(row.eos))] for row in rows]
        by_device[device] = to_device(padded, device) if width else None
    return by_device[device]
