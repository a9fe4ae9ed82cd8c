"""Drafting for an engine with its own decode loop: it passes its texts after every step and receives drafts for the next one.

Owns the matching of the engine's texts to rows between steps, by their tokens, since engines move, preempt and resume requests;
and the timing of the engine's steps, of which only the time between two calls is visible. Knows no engine. The drafter must need
nothing but tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import Drafter, LengthPolicy
from foresay.decoding.rows import IntArray, Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine.guard import GuardedDrafter
from foresay.engine.row_moves import plan_moves


@dataclass(frozen=True, slots=True)
class EngineText:
    """A text of the engine after a step: all of its tokens, of which the last `new` were generated in that step."""

    tokens: IntArray
    new: int


_RAGGED = Capabilities(ragged=True)
"""vLLM's passes take the time of their real tokens."""


class Follower:
    """A drafter and its length policy that follow an engine's texts."""

    def __init__(
        self,
        drafter: Drafter,
        policy: LengthPolicy,
        vocab_size: int,
        *,
        max_draft_tokens: int,
        max_length: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """max_draft_tokens: the engine's limit per step. max_length: largest length of a text, prompt and output together."""
        self._drafter = GuardedDrafter(drafter, vocab_size, torch.device("cpu"), trees=False)
        self._policy, self._max_draft_tokens, self._max_length, self._clock = (
            policy,
            max_draft_tokens,
            max_length,
            clock,
        )
        self._rows = Rows((), capabilities=_RAGGED)
        self._slots: dict[int, int] = {}
        """Request id -> the engine's slot of a row at the last call."""
        self._drafted: list[int] = []
        """Number of draft tokens last proposed for each row. The engine may score fewer."""
        self._draft_s = 0.0
        self._last_call = self._clock()
        """Time of the last call."""
        self._next_id = 0

    @property
    def failures(self) -> int:
        """Number of errors raised by the drafter, which the engine never sees."""
        return self._drafter.failures

    def propose(self, texts: Sequence[EngineText | None]) -> list[list[int]]:
        """Return draft tokens for each of the engine's slots; none for a None, such as a slot whose prompt is in prefill.

        Must be called once after every step, with every text in the engine's batch.
        """
        now = self._clock()
        matched = self._match(texts)
        self._measure(texts, matched, now - self._last_call)
        self._last_call = now
        for slot, row in matched.items():
            text = self._text(texts, slot)
            row.extend(text.tokens[row.size :].tolist())
        self._drafter.observe(self._rows, None, None)
        order = self._rearrange(texts, matched)
        start = self._clock()
        drafts = self._draft_tokens()
        self._draft_s = self._clock() - start  # without observing new texts, which is not a cost of draft tokens
        self._slots = {row.request_id: slot for row, slot in zip(self._rows, order, strict=True)}
        self._drafted = [len(draft_tokens) for draft_tokens in drafts]
        drafts_by_slot: list[list[int]] = [[] for _ in texts]
        for slot, draft_tokens in zip(order, drafts, strict=True):
            drafts_by_slot[slot] = draft_tokens
        return drafts_by_slot

    @staticmethod
    def _text(texts: Sequence[EngineText | None], slot: int) -> EngineText:
        text = texts[slot]
        assert text is not None
        return text

    def _match(self, texts: Sequence[EngineText | None]) -> dict[int, Row]:
        """Return the row that each slot continues, if any: the row whose tokens the text had before this step."""
        matched: dict[int, Row] = {}
        previous = {slot: row for row in self._rows if (slot := self._slots.get(row.request_id)) is not None}
        unmatched = {row.request_id: row for row in self._rows}
        pending = []
        for slot, text in enumerate(texts):
            if text is None or not text.new:
                continue
            row = previous.get(slot)
            if row is not None and row.request_id in unmatched and _continues(text, row):
                matched[slot] = unmatched.pop(row.request_id)
            else:
                pending.append(slot)
        for slot in pending:  # the text was moved or is new
            text = self._text(texts, slot)
            row = next((row for row in unmatched.values() if _continues(text, row)), None)
            if row is not None:
                matched[slot] = unmatched.pop(row.request_id)
        return matched

    def _measure(self, texts: Sequence[EngineText | None], matched: dict[int, Row], seconds: float) -> None:
        """Report a step's time and tokens to the policy, if the step scored the drafts of exactly these rows."""
        slot_of = {row.request_id: slot for slot, row in matched.items()}
        prefilling = any(text is None or (text.new and slot not in matched) for slot, text in enumerate(texts))
        if prefilling or not len(self._rows) or len(slot_of) < len(self._rows):
            return
        steps = []
        for row, drafted in zip(self._rows, self._drafted, strict=True):
            text = self._text(texts, slot_of[row.request_id])
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

    def _rearrange(self, texts: Sequence[EngineText | None], matched: dict[int, Row]) -> list[int]:
        """Drop rows without a text, and add rows for new texts. Return the engine's slot of each row."""
        slot_of = {row.request_id: slot for slot, row in matched.items()}
        alive = [row.request_id in slot_of for row in self._rows]
        rows = list(self._rows)
        if not all(alive):
            moves, _, count = plan_moves(alive, len(alive))
            for source, target in moves:
                rows[target] = rows[source]
            del rows[count:]
            self._drafter.rearrange(moves, count)
        order, num_kept = [slot_of[row.request_id] for row in rows], len(rows)
        for slot, text in enumerate(texts):
            if text is not None and text.new and slot not in matched:
                rows.append(self._new_row(text))
                order.append(slot)
        if len(rows) > num_kept or not all(alive):
            self._rows = Rows(rows, capabilities=_RAGGED)
        if len(rows) > num_kept:
            self._drafter.admit(self._rows, num_kept)
        return order

    def _new_row(self, text: EngineText) -> Row:
        size = len(text.tokens)
        prompt = max(1, size - text.new)
        row = Row(self._next_id, text.tokens[:prompt].tolist(), SamplingParams(), limit=max(self._max_length, size))
        row.extend(text.tokens[prompt:].tolist())
        self._next_id += 1
        return row

    def _draft_tokens(self) -> list[list[int]]:
        rows = self._rows
        if not len(rows):
            return []
        budget = [
            max(0, min(n, self._max_draft_tokens, row.remaining - 1))
            for n, row in zip(self._policy.budget(rows), rows, strict=True)
        ]
        if not any(budget):
            return [[] for _ in rows]
        proposal = self._drafter.propose(rows, budget, self._policy)
        assert proposal.parents is None, "an engine takes chains only"
        return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]


def _continues(text: EngineText, row: Row) -> bool:
    """True if a text is the row's tokens followed by the new ones."""
    size = len(text.tokens) - text.new
    return row.size == size and bool(np.array_equal(row.tokens, text.tokens[:size]))
