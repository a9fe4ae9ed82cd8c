"""Drafting for an engine that decodes by itself: it shows its texts after every pass, and is given guesses for the next one.

Owns which of the engine's texts is which of ours from one pass to the next, by what they hold, since engines move, preempt and
resume requests; and the measuring of the engine's passes, of which only the time between two calls is seen. Knows no engine,
and which drafter it is only as a `Drafter`; it must look guesses up, since the engine shows nothing but tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from foresay.decoding.outcome import Step
from foresay.decoding.protocols import Drafter, LengthPolicy
from foresay.decoding.rows import IntArray, Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine.guard import GuardedDrafter
from foresay.engine.row_moves import plan_moves


@dataclass(frozen=True, slots=True)
class Shown:
    """What an engine shows of one text after a pass: all of its tokens, of which the last `new` were just written."""

    tokens: IntArray
    new: int


class Follower:
    """A drafter and its length policy behind an engine's texts."""

    def __init__(
        self,
        drafter: Drafter,
        policy: LengthPolicy,
        vocab_size: int,
        *,
        most: int,
        limit: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """most: tokens of a draft that the engine takes. limit: most tokens of a text, prompt and output together."""
        self._drafter = GuardedDrafter(drafter, vocab_size, torch.device("cpu"), trees=False)
        self._policy, self._most, self._limit, self._clock = policy, most, limit, clock
        self._rows = Rows((), ragged=True)
        self._places: dict[int, int] = {}
        """Where the engine held a row last: request id -> place."""
        self._drafted: list[int] = []
        """Of each row, what was last handed out; an engine may score less of it."""
        self._draft_s = 0.0
        self._asked = self._clock()
        """When the last call came."""
        self._next_id = 0

    @property
    def failures(self) -> int:
        """How often the drafter raised; the engine never sees it."""
        return self._drafter.failures

    def propose(self, shown: Sequence[Shown | None]) -> list[list[int]]:
        """Guesses for each of the engine's places; none where it shows nothing, as for a prompt that is still being read.

        Call once after every pass, with every text that the engine is at work on.
        """
        now = self._clock()
        found = self._match(shown)
        self._measure(shown, found, now - self._asked)
        self._asked = now
        for place, row in found.items():
            text = self._text(shown, place)
            row.extend(text.tokens[row.size :].tolist())
        self._drafter.observe(self._rows, None, None)
        order = self._rearrange(shown, found)
        began = self._clock()
        drafts = self._draft_tokens()
        self._draft_s = self._clock() - began  # what reading new texts takes is no price of a guess
        self._places = {row.request_id: place for row, place in zip(self._rows, order, strict=True)}
        self._drafted = [len(draft_tokens) for draft_tokens in drafts]
        out: list[list[int]] = [[] for _ in shown]
        for place, draft_tokens in zip(order, drafts, strict=True):
            out[place] = draft_tokens
        return out

    @staticmethod
    def _text(shown: Sequence[Shown | None], place: int) -> Shown:
        text = shown[place]
        assert text is not None
        return text

    def _match(self, shown: Sequence[Shown | None]) -> dict[int, Row]:
        """The row that each place goes on with, where there is one: the text that it held before this pass."""
        out: dict[int, Row] = {}
        before = {place: row for row in self._rows if (place := self._places.get(row.request_id)) is not None}
        left = {row.request_id: row for row in self._rows}
        late = []
        for place, text in enumerate(shown):
            if text is None or not text.new:
                continue
            row = before.get(place)
            if row is not None and row.request_id in left and _continues(text, row):
                out[place] = left.pop(row.request_id)
            else:
                late.append(place)
        for place in late:  # it was moved, or is new
            text = self._text(shown, place)
            row = next((row for row in left.values() if _continues(text, row)), None)
            if row is not None:
                out[place] = left.pop(row.request_id)
        return out

    def _measure(self, shown: Sequence[Shown | None], found: dict[int, Row], seconds: float) -> None:
        """Tell the policy what a pass took and brought, where it scored these rows' drafts and nothing else."""
        at = {row.request_id: place for place, row in found.items()}
        reading = any(text is None or (text.new and place not in found) for place, text in enumerate(shown))
        if reading or not len(self._rows) or len(at) < len(self._rows):
            return
        steps = []
        for row, drafted in zip(self._rows, self._drafted, strict=True):
            text = self._text(shown, at[row.request_id])
            new = tuple(text.tokens[len(text.tokens) - text.new :].tolist())
            steps.append(
                Step(
                    request_id=row.request_id,
                    token_ids=new,
                    origins=(),
                    num_drafted=drafted,
                    num_accepted=min(len(new) - 1, drafted),
                    batch_size=len(self._rows),
                    draft_s=self._draft_s,
                    total_s=seconds,
                )
            )
        self._policy.observe(self._rows, steps)

    def _rearrange(self, shown: Sequence[Shown | None], found: dict[int, Row]) -> list[int]:
        """Let rows go that are not shown, begin with new ones; gives the engine's place of each row."""
        at = {row.request_id: place for place, row in found.items()}
        alive = [row.request_id in at for row in self._rows]
        rows = list(self._rows)
        if not all(alive):
            moves, _, count = plan_moves(alive, len(alive))
            for source, target in moves:
                rows[target] = rows[source]
            del rows[count:]
            self._drafter.rearrange(moves, count)
        order, first = [at[row.request_id] for row in rows], len(rows)
        for place, text in enumerate(shown):
            if text is not None and text.new and place not in found:
                rows.append(self._begin(text))
                order.append(place)
        if len(rows) > first or not all(alive):
            self._rows = Rows(rows, ragged=True)
        if len(rows) > first:
            self._drafter.admit(self._rows, first)
        return order

    def _begin(self, text: Shown) -> Row:
        size = len(text.tokens)
        prompt = max(1, size - text.new)
        row = Row(self._next_id, text.tokens[:prompt].tolist(), SamplingParams(), limit=max(self._limit, size))
        row.extend(text.tokens[prompt:].tolist())
        self._next_id += 1
        return row

    def _draft_tokens(self) -> list[list[int]]:
        rows = self._rows
        if not len(rows):
            return []
        budget = [
            max(0, min(n, self._most, row.remaining - 1))
            for n, row in zip(self._policy.budget(rows), rows, strict=True)
        ]
        if not any(budget):
            return [[] for _ in rows]
        proposal = self._drafter.propose(rows, budget, self._policy)
        assert proposal.parents is None, "an engine is given chains"
        return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]


def _continues(text: Shown, row: Row) -> bool:
    """Whether a text is the row's with the new tokens behind it."""
    size = len(text.tokens) - text.new
    return row.size == size and bool(np.array_equal(row.tokens, text.tokens[:size]))
