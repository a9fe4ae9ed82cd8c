"""A draft model as a drafter: its own slot cache, batched over ragged rows.

Every pass feeds what the cache lacks, so "all accepted, and the draft has not seen its own last token" needs no code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.draws import draw
from foresay.decoding.laws import Laws, build_laws
from foresay.decoding.proposal import Proposal, Verdict
from foresay.decoding.protocols import DraftStep, LanguageModel, LengthPolicy, Logits, ModelOutput, Move
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows
from foresay.drafters.draft_cache import DraftCache


class ModelDrafter:
    """Guesses with a smaller model that shares the target's token ids.

    target_vocab_size: width of the target's logits. A draft whose logits are wider is cut there, a narrower one never
    proposes the ids it lacks; both are laws it really draws from, so the output stays exact.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: LanguageModel, target_vocab_size: int, *, context: DraftCache | None = None) -> None:
        """context: the cache to draft with, where it is shared with others; None makes one."""
        self.context = context or DraftCache(model, target_vocab_size)

    def admit(self, rows: Rows, first: int) -> None:
        """Give the new rows empty cache rows; their prompts are filled at their first proposal."""
        self.context.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        self.context.rearrange(moves, count)

    def reset(self) -> None:
        """Forget every row."""
        self.context.reset()

    def observe(self, rows: Rows, verdict: Verdict | None, target: ModelOutput | None) -> None:
        """Rewind to what was committed."""
        self.context.rewind(rows)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draw up to `budget` tokens for each row, each from the law recorded with it."""
        model, device = self.context.model, self.context.model.device
        # positions past the draft's own context cannot be scored by it
        seen = self.context.view(rows)
        room = [min(b, model.max_length - row.size) for b, row in zip(budget, seen, strict=True)]
        # a row past the draft's context is never fed again: it rides as pads
        longest = max(room)
        if longest <= 0:
            return Proposal.empty(len(rows), device)
        fed = [b > 0 for b in room]
        streams = rows.streams(device)
        self.context.prepare(seen, fed)
        scores = self._catch_up(seen, fed)
        going = torch.tensor(room, device=device)
        counts = torch.zeros_like(going)
        drafted = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
        steps: list[Laws] = []
        for j in range(longest):
            laws = build_laws(scores, rows, drafted, first=j)
            drafted = torch.cat([drafted, draw(laws, streams, Purpose.DRAFT, first=j)], 1)
            steps.append(laws)
            counts += going > j
            go_on = policy.keep_drafting(j, DraftStep(drafted[:, -1], laws))
            if go_on is not None:
                going = torch.where(go_on, going, counts)
            alive = [n > j + 1 for n in (going.tolist() if go_on is not None else room)]
            if not any(alive):
                break
            scores = model.forward(
                drafted[:, -1:], [int(a) for a in alive], self.context.cache, logits=Logits.LAST
            ).scores()
        told = counts.tolist()
        if rows.level:
            fed_tokens = [tokens[: max(0, n - 1)] for tokens, n in zip(drafted.tolist(), told, strict=True)]
            self.context.remember(seen, fed_tokens)
        return _proposal(drafted, told, steps, rows.confident)

    def _catch_up(self, rows: Rows, fed: Sequence[bool]) -> torch.Tensor:
        """Feed what the cache lacks; returns the logits behind each row's last token, [B, 1, V]."""
        model, cache = self.context.model, self.context.cache
        counts = [row.size - cache.lengths[i] if fed[i] else 0 for i, row in enumerate(rows)]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : counts[i]] = torch.from_numpy(row.tokens[row.size - counts[i] :])
        return model.forward(tokens.to(model.device), counts, cache, logits=Logits.LAST).scores()


def _proposal(drafted: torch.Tensor, counts: Sequence[int], steps: Sequence[Laws], confident: bool) -> Proposal:
    confidence = None
    if confident:
        confidence = torch.cat([laws.confidence(drafted[:, j : j + 1]) for j, laws in enumerate(steps)], 1)
    sampled = [laws.probs for laws in steps if laws.probs is not None]
    if not sampled:
        return Proposal(drafted, counts, confidence=confidence)
    per_step = sampled[0].shape[0]
    columns = []
    for j, laws in enumerate(steps):
        assert laws.probs_row is not None
        columns.append(torch.where(laws.probs_row >= 0, laws.probs_row + j * per_step, -1))
    return Proposal(drafted, counts, torch.cat(sampled), torch.cat(columns, 1), confidence)
