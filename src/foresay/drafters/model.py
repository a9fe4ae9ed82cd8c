"""A draft model as a drafter: its own slot cache, batched over ragged rows.

Every pass feeds what the cache lacks, so "all accepted, and the draft has not seen its own last token" needs no code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.draws import draw
from foresay.decoding.laws import Laws, build_laws
from foresay.decoding.proposal import Proposal, Verdict
from foresay.decoding.protocols import Drafter, DraftStep, Feed, LanguageModel, LengthPolicy, Logits, ModelOutput, Move
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows
from foresay.drafters.draft_cache import DraftCache
from foresay.errors import UnsupportedModelError
from foresay.models.vocabulary import VocabularyAdapter


class ModelDrafter(Drafter):
    """Guesses with a smaller model that shares the target's token ids.

    target_vocab_size: width of the target's logits. A draft whose logits are wider is cut there, a narrower one never
    proposes the ids it lacks; both are laws it really draws from, so the output stays exact.
    """

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
        """Draw up to `budget` tokens for each row, each from the law recorded with it; an end token is the last of its row."""
        model = self.context.model
        # positions past the draft's own context cannot be scored by it
        seen = self.context.view(rows)
        room = [min(b, model.max_length - row.size) for b, row in zip(budget, seen, strict=True)]
        if max(room) <= 0:
            return Proposal.empty(len(rows), model.device)
        # a row past the draft's context is never fed again: it rides as pads
        fed = [b > 0 for b in room]
        self.context.prepare(seen, fed)
        layers = hidden_layers(model, policy)
        output = catch_up(self.context, seen, fed, layers)
        chain = _Chain(rows, room, model.device)
        while True:
            laws = build_laws(output.scores(), rows, chain.ids, num_before=chain.depth)
            hidden = output.hidden[layers[0]][:, -1] if layers else None
            if not chain.add(laws, policy, hidden):
                break
            output = self.context.forward(Feed(chain.ids[:, -1:], chain.fed, logits=Logits.LAST, hidden_layers=layers))
        counts = chain.counts.tolist()
        if rows.level:
            tokens = [ids[: max(0, n - 1)] for ids, n in zip(chain.ids.tolist(), counts, strict=True)]
            self.context.remember(seen, tokens)
        return chain.proposal(counts)


def hidden_layers(model: VocabularyAdapter, policy: LengthPolicy) -> tuple[int, ...]:
    """The draft's last layer, when the policy looks at it. Raises UnsupportedModelError when the model shows none."""
    if not policy.needs_hidden:
        return ()
    layers = model.capabilities.num_layers
    if layers is None:
        raise UnsupportedModelError(
            f"length {type(policy).__name__} reads the draft's hidden states, and {type(model.inner).__name__} shows none"
        )
    return (layers,)


def catch_up(context: DraftCache, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
    """Feed what the cache lacks; gives the logits after each row's last token, [B, 1, V], and its hidden states [B, 1, H]."""
    counts = [row.size - context.cache.lengths[i] if fed[i] else 0 for i, row in enumerate(rows)]
    tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : counts[i]] = torch.from_numpy(row.tokens[row.size - counts[i] :])
    feed = Feed(tokens.to(context.model.device), counts, logits=Logits.LAST, hidden_layers=layers)
    output = context.forward(feed)
    if not layers:
        return output
    batch, last = torch.arange(len(rows), device=tokens.device), feed.last_columns()
    return ModelOutput(output.logits, {n: states[batch, last][:, None] for n, states in output.hidden.items()})


class _Chain:
    """Tokens being drawn one after the other, in all rows at once."""

    def __init__(self, rows: Rows, room: Sequence[int], device: torch.device) -> None:
        self._rows, self._room, self._streams = rows, room, rows.streams(device)
        self.ids = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._going = torch.tensor(room, device=device)
        """How many tokens each row may have."""
        self._steps: list[Laws] = []
        self._ends = _end_tokens(rows, device)
        self._least = torch.tensor([row.params.min_new_tokens - row.num_new for row in rows], device=device)
        """[B]: draft tokens that must come before an end token may end the output."""
        self.fed: list[int] = []
        """[B] of the next pass: 1 where a row drafts on."""

    @property
    def depth(self) -> int:
        """Tokens drawn so far, pads included."""
        return len(self._steps)

    def add(self, laws: Laws, policy: LengthPolicy, hidden: torch.Tensor | None) -> bool:
        """Draw the next token of each row; whether anyone drafts on."""
        j = self.depth
        token = draw(laws, self._streams, Purpose.DRAFT, first=j)
        self.ids = torch.cat([self.ids, token], 1)
        self._steps.append(laws)
        self.counts += self._going > j
        go_on = policy.keep_drafting(DraftStep(torch.full_like(self.counts, j), token[:, 0], laws, hidden))
        stop = None if go_on is None else ~go_on
        if self._ends is not None:
            ended = (token == self._ends).any(-1) & (self._least < j + 1)
            stop = ended if stop is None else stop | ended
        if stop is not None:
            self._going = torch.where(stop, self.counts, self._going)
        self.fed = [int(n > j + 1) for n in (self._room if stop is None else self._going.tolist())]
        return any(self.fed)

    def proposal(self, counts: Sequence[int]) -> Proposal:
        """What was drawn, with the laws it was drawn from."""
        confidence = None
        if self._rows.needs.confidence:
            confidence = torch.cat([laws.confidence(self.ids[:, j : j + 1]) for j, laws in enumerate(self._steps)], 1)
        sampled = [laws.probs for laws in self._steps if laws.probs is not None]
        if not sampled:
            return Proposal(self.ids, counts, confidence=confidence)
        per_step = sampled[0].shape[0]
        columns = []
        for j, laws in enumerate(self._steps):
            assert laws.probs_row is not None
            columns.append(torch.where(laws.probs_row >= 0, laws.probs_row + j * per_step, -1))
        return Proposal(self.ids, counts, torch.cat(sampled), torch.cat(columns, 1), confidence)


def _end_tokens(rows: Rows, device: torch.device) -> torch.Tensor | None:
    """[B, E] int64: the tokens that end each row's output, padded with -1; None where there are none."""
    key = f"end tokens {device}"
    if key not in rows.memo:
        width = max(len(row.eos) for row in rows)
        padded = [[*sorted(row.eos), *[-1] * (width - len(row.eos))] for row in rows]
        rows.memo[key] = torch.tensor(padded, device=device) if width else None
    ends: torch.Tensor | None = rows.memo[key]
    return ends
