"""A draft model as a drafter: its own slot cache, batched over ragged rows.

Every pass feeds what the cache lacks, so "all accepted, and the draft has not seen its own last token" needs no code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from foresay.core import LengthPolicy, Move, Proposal, Rows, Verdict
from foresay.models.base import LanguageModel, Logits, ModelOutput
from foresay.models.prefill import fill_chunk, pending
from foresay.randomness import Purpose
from foresay.sampling import Laws, build_laws, draw

_MAX_CATCH_UP = 4
"""Missed tokens that ride in the first drafting pass; more are filled in passes of their own."""


class ModelDrafter:
    """Guesses with a smaller model that shares the target's token ids.

    target_vocab_size: width of the target's logits. A draft whose logits are wider is cut there, a narrower one never
    proposes the ids it lacks; both are laws it really draws from, so the output stays exact.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: LanguageModel, target_vocab_size: int) -> None:
        self.model, self._vocab = model, target_vocab_size
        self._cache = model.new_cache()

    def admit(self, rows: Rows, first: int) -> None:
        """Give the new rows empty cache rows; their prompts are filled at their first proposal."""
        self.model.admit(rows, first, self._cache)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        self._cache.rearrange(moves, count)

    def reset(self) -> None:
        """Forget every row."""
        self._cache = self.model.new_cache()

    def observe(self, rows: Rows, verdict: Verdict | None, target: ModelOutput | None) -> None:
        """Rewind to what was committed."""
        self._cache.truncate([row.size - 1 for row in rows])

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draw up to `budget` tokens for each row, each from the law recorded with it."""
        # positions past the draft's own context cannot be scored by it
        room = [min(b, self.model.max_length - row.size) for b, row in zip(budget, rows, strict=True)]
        # a row past the draft's context is never fed again: it rides as pads
        longest = max(room)
        if longest <= 0:
            return Proposal.empty(len(rows), self.model.device)
        fed = [b > 0 for b in room]
        streams = rows.streams(self.model.device)
        scores = self._catch_up(rows, fed)
        going = torch.tensor(room, device=self.model.device)
        counts = torch.zeros_like(going)
        drafted = torch.empty(len(rows), 0, dtype=torch.int64, device=self.model.device)
        steps: list[Laws] = []
        for j in range(longest):
            laws = build_laws(self._aligned(scores), rows, drafted, first=j)
            drafted = torch.cat([drafted, draw(laws, streams, Purpose.DRAFT, first=j)], 1)
            steps.append(laws)
            counts += going > j
            go_on = policy.proceed(j, laws, None)
            if go_on is not None:
                going = torch.where(go_on, going, counts)
            alive = [n > j + 1 for n in (going.tolist() if go_on is not None else room)]
            if not any(alive):
                break
            feed = drafted[:, -1:].clamp(max=self.model.vocab_size - 1)
            scores = self.model.forward(feed, [int(a) for a in alive], self._cache, logits=Logits.LAST).scores()
        return _proposal(drafted, counts.tolist(), steps)

    def _catch_up(self, rows: Rows, fed: Sequence[bool]) -> torch.Tensor:
        """Feed what the cache lacks; returns the logits behind each row's last committed token, [B, 1, V]."""
        for place in range(len(rows)):
            while fed[place] and pending(rows, self._cache, place) >= _MAX_CATCH_UP:
                fill_chunk(self.model, self._cache, rows, place)
        lengths = self._cache.lengths
        counts = [row.size - lengths[i] if fed[i] else 0 for i, row in enumerate(rows)]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : counts[i]] = torch.from_numpy(row.tokens[row.size - counts[i] :])
        tokens = tokens.clamp_(max=self.model.vocab_size - 1).to(self.model.device)
        return self.model.forward(tokens, counts, self._cache, logits=Logits.LAST).scores()

    def _aligned(self, scores: torch.Tensor) -> torch.Tensor:
        """Cut or widen the logits to the target's vocabulary, a missing id having probability zero."""
        width = scores.shape[-1]
        if width > self._vocab:
            return scores[..., : self._vocab]
        return scores if width == self._vocab else F.pad(scores, (0, self._vocab - width), value=-torch.inf)


def _proposal(drafted: torch.Tensor, counts: Sequence[int], steps: Sequence[Laws]) -> Proposal:
    sampled = [laws.probs for laws in steps if laws.probs is not None]
    if not sampled:
        return Proposal(drafted, counts)
    per_step = sampled[0].shape[0]
    columns = []
    for j, laws in enumerate(steps):
        assert laws.index is not None
        columns.append(torch.where(laws.index >= 0, laws.index + j * per_step, -1))
    return Proposal(drafted, counts, torch.cat(sampled), torch.cat(columns, 1))
