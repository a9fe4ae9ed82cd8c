"""Drafting with a head on the target's hidden states (EAGLE-3, Li et al. 2025).

Owns which hidden states of the target a row has given, and which pairs of them and the tokens after them the head's cache holds.
What was drafted is cached with the head's own output in their place, and is taken back when the target's are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import Row, Rows
from foresay.drafters.draft_cache import MAX_CATCH_UP, DraftCache
from foresay.drafters.model import ModelDrafter
from foresay.drafters.model_tree import ModelTreeDrafter
from foresay.models.heads.config import NEXT

if TYPE_CHECKING:  # which would bring transformers
    from foresay.models.heads.model import HeadModel


class _Seen:
    """What a row's target passes have shown. Place i of a text and token i + 1 are pair i."""

    __slots__ = ("cached", "last", "waiting")

    def __init__(self, features: torch.Tensor) -> None:
        """features: [n, D], of the first n places."""
        self.cached = 0
        """Pairs in the cache whose features are the target's."""
        self.waiting = features
        """Of the places behind them."""
        self.last = features[:0]
        """[1, D], of the last cached pair; nothing before there is one."""

    @property
    def count(self) -> int:
        """Places whose features are known."""
        return self.cached + len(self.waiting)

    def taken(self, count: int) -> None:
        """So many of those that waited are cached now."""
        self.last = self.waiting[count - 1 : count]
        self.waiting = self.waiting[count:]
        self.cached += count


class HeadCache(DraftCache):
    """A head's cache over ragged rows, fed with what the target's passes show."""

    def __init__(self, head: HeadModel, vocab_size: int) -> None:
        self.head = head
        self._seen: list[_Seen | None] = []
        """None: places of the row were never shown, so that it cannot be drafted for."""
        self._after: torch.Tensor | None = None
        """[B, 1, D], what the next pass reads behind the rows' last tokens."""
        self._nodes: torch.Tensor | None = None
        """[B, K, D], the same behind the columns of the last pass."""
        super().__init__(head, vocab_size)

    def admit(self, rows: Rows, first: int) -> None:
        """New rows, of whose prompts the target has shown all but the last place."""
        super().admit(rows, first)
        self._seen += [self._of_prompt(row) for row in rows.rows[first:]]

    def _of_prompt(self, row: Row) -> _Seen | None:
        hidden, places = row.prompt_hidden, row.size - 1
        if places == 0:
            return _Seen(torch.empty(0, self.head.width, device=self.head.device, dtype=self.head.dtype))
        if any(layer not in hidden or len(hidden[layer]) != places for layer in self.head.hidden_layers):
            return None
        return _Seen(self.head.features(hidden))

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        super().rearrange(moves, count)
        for source, target in moves:
            self._seen[target] = self._seen[source]
        del self._seen[count:]

    def reset(self) -> None:
        """Forget every row."""
        super().reset()
        self._seen = []

    def see(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Take what a pass of the target showed of the places that were committed, and rewind what was drafted."""
        missing = [0 if one is None else row.size - 1 - one.count for row, one in zip(rows, self._seen, strict=True)]
        if any(missing):
            if target is None or any(layer not in target.hidden for layer in self.head.hidden_layers):
                self._seen = [None if n else one for n, one in zip(missing, self._seen, strict=True)]
            else:
                self._add(missing, _columns(missing, verification, target), target)
        self._rewind()

    def _add(self, missing: Sequence[int], columns: Sequence[torch.Tensor], target: ModelOutput) -> None:
        """missing: B counts of new places. columns: of each row, those of the target's pass where they are."""
        device = self.head.device
        places = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(missing)])
        at = torch.cat([one.to(device) for one in columns])
        hidden = {layer: target.hidden[layer].to(device)[places, at] for layer in self.head.hidden_layers}
        found = self.head.features(hidden)
        for one, new in zip(self._seen, torch.split(found, list(missing)), strict=True):
            if one is not None and len(new):
                one.waiting = torch.cat([one.waiting, new])

    def _rewind(self) -> None:
        self.cache.truncate([0 if one is None else one.cached for one in self._seen])

    def rewind(self, rows: Rows) -> None:
        """Rewind what was drafted."""
        self._rewind()

    def room(self, rows: Rows, budget: Sequence[int]) -> list[int]:
        """None for rows that the target has not shown."""
        room = super().room(rows, budget)
        return [n if one is not None and one.count else 0 for n, one in zip(room, self._seen, strict=True)]

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Fill long texts by passes of their own, up to a few pairs before their ends."""
        self._rewind()
        for place, (row, one) in enumerate(zip(rows, self._seen, strict=True)):
            while one is not None and wanted[place] and len(one.waiting) > MAX_CATCH_UP:
                count = min(self.head.capabilities.prefill_chunk, len(one.waiting) - 1)
                tokens = torch.from_numpy(row.tokens[one.cached + 1 : one.cached + 1 + count])[None]
                model_input = ModelInput(tokens.to(self.head.device), [count], place, logits=Logits.NONE)
                super().forward(dataclasses.replace(model_input, features=one.waiting[None, :count]))
                one.taken(count)

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Feed the pairs that wait, and what was guessed behind them; see DraftCache.catch_up."""
        output = self._shown(rows, fed)
        drafted = [row.tokens[row.committed.size :] if row.committed is not row else row.tokens[:0] for row in rows]
        for step in range(max(len(some) if on else 0 for some, on in zip(drafted, fed, strict=True))):
            on = [flag and len(some) > step for some, flag in zip(drafted, fed, strict=True)]
            tokens = [[int(some[step]) if flag else 0] for some, flag in zip(drafted, on, strict=True)]
            model_input = ModelInput(
                torch.tensor(tokens, device=self.head.device), [int(flag) for flag in on], logits=Logits.LAST
            )
            output = self._merged(output, self.forward(model_input), on)
        return output

    def _shown(self, rows: Rows, fed: Sequence[bool]) -> ModelOutput:
        """A pass over the pairs that wait, or over the last one once more where none does."""
        parts = [one if on else None for one, on in zip(self._seen, fed, strict=True)]
        for place, one in enumerate(parts):
            if one is not None and not len(one.waiting):
                one.waiting, one.cached = one.last, one.cached - 1
                self.cache.lengths[place] = one.cached
        counts = [0 if one is None else len(one.waiting) for one in parts]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        features = torch.zeros(*tokens.shape, self.head.width, dtype=self.head.dtype, device=self.head.device)
        for i, (row, one) in enumerate(zip(rows, parts, strict=True)):
            if one is not None:
                tokens[i, : counts[i]] = torch.from_numpy(row.tokens[one.cached + 1 : one.count + 1])
                features[i, : counts[i]] = one.waiting
                one.taken(counts[i])
        model_input = ModelInput(tokens.to(self.head.device), counts, logits=Logits.LAST, features=features)
        output = super().forward(model_input)
        batch, last = torch.arange(len(rows), device=self.head.device), model_input.last_columns()
        hidden = {n: states[batch, last][:, None] for n, states in output.hidden.items()}
        self._after = self._nodes = hidden[NEXT]
        return dataclasses.replace(output, hidden=hidden)

    def _merged(self, before: ModelOutput, new: ModelOutput, on: Sequence[bool]) -> ModelOutput:
        """The new output of the rows that went on, the one before of those that did not."""
        which = torch.tensor(on, device=self.head.device)[:, None, None]
        hidden = {n: torch.where(which, new.hidden[n], before.hidden[n]) for n in before.hidden}
        self._after = self._nodes = hidden[NEXT]
        assert new.logits is not None and before.logits is not None
        return dataclasses.replace(new, logits=torch.where(which, new.logits, before.logits), hidden=hidden)

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """One pass over guesses: behind the last pass, or over a whole tree behind the rows' last tokens."""
        assert self._after is not None and self._nodes is not None
        features = self._nodes[:, -1:]
        if model_input.parents is not None:
            batch = torch.arange(len(model_input.parents), device=model_input.parents.device)[:, None]
            above = self._nodes[batch, model_input.parents.clamp(min=0, max=self._nodes.shape[1] - 1)]
            features = torch.where(model_input.parents[..., None] < 0, self._after, above)
        output = super().forward(dataclasses.replace(model_input, features=features))
        self._nodes = output.hidden[NEXT]
        return output


def _columns(missing: Sequence[int], verification: Verification | None, target: ModelOutput) -> list[torch.Tensor]:
    """Of each row, the columns of the target's pass at the new places, [n] int64 each: first those of a chain, then the path."""
    before = target.num_before or (0,) * len(missing)
    out = []
    for i, n in enumerate(missing):
        columns = torch.arange(n)
        if verification is not None and verification.path is not None and n > before[i] + 1:
            path = verification.path[i, : n - before[i] - 1] + before[i] + 1
            columns = torch.cat([columns[: before[i] + 1].to(path.device), path])
        out.append(columns)
    return out


class _ReadsTarget(ModelDrafter):
    """What heads have in common, whatever they propose."""

    context: HeadCache

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Take the hidden states of what was committed."""
        self.context.see(rows, verification, target)


class HeadDrafter(_ReadsTarget):
    """Guesses with a head on the target's hidden states.

    target_vocab_size: width of the target's logits. A row of whose text the target has not shown every place (its drafter failed
    and came back) is not drafted for.
    """

    def __init__(self, head: HeadModel, target_vocab_size: int, *, sample: bool = True) -> None:
        """sample: see ModelDrafter."""
        super().__init__(head, target_vocab_size, context=HeadCache(head, target_vocab_size), sample=sample)
        self.hidden_layers = tuple(sorted(set(head.hidden_layers)))


class HeadTreeDrafter(_ReadsTarget, ModelTreeDrafter):
    """Drafts a tree with a head on the target's hidden states; a budget is one of nodes."""

    def __init__(self, head: HeadModel, target_vocab_size: int, *, branches: int = 2, width: int = 1) -> None:
        """branches: children of a node. width: nodes of a level that get children, one draft pass a level."""
        ModelTreeDrafter.__init__(
            self, head, target_vocab_size, branches=branches, width=width, context=HeadCache(head, target_vocab_size)
        )
        self.hidden_layers = tuple(sorted(set(head.hidden_layers)))
