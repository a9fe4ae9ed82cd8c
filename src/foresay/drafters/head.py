"""Drafting with a head on the target's hidden states (EAGLE-3, Li et al. 2025).

Owns each row's hidden states of the target, and which pairs of hidden states and following tokens are in the head's cache. Draft
tokens are cached with the head's own output instead, and are rewound once the target's hidden states are known.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import Row, Rows
from foresay.drafters.draft_cache import MAX_CATCH_UP, DraftCache
from foresay.drafters.model import ModelDrafter
from foresay.drafters.model_tree import ModelTreeDrafter
from foresay.models.heads.config import NEXT

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.heads.model import HeadModel


_MAX_BYTES = 1 << 28
"""Size of the hidden states that are kept before their features are computed: work for rows without drafts is lost time."""


class _RowFeatures:
    """Features of one row, computed from the target's hidden states. Pair i is position i's features and token i + 1."""

    __slots__ = ("cached", "count", "last", "pending", "states")

    def __init__(self, none: torch.Tensor) -> None:
        """none: [0, D]."""
        self.count = 0
        """Number of positions with known hidden states."""
        self.cached = 0
        """Number of cached pairs with the target's features."""
        self.pending = none
        """[n, D], features of the following positions, which are not cached yet."""
        self.states: list[torch.Tensor] = []
        """[n, L * H] each, the target's hidden states after those, whose features are not computed yet."""
        self.last = none
        """[1, D], features of the last cached pair; [0, D] if there is none."""

    def add(self, states: torch.Tensor) -> None:
        """Add the target's hidden states of the next positions, [n, L * H]."""
        self.states.append(states)
        self.count += len(states)

    def mark_cached(self, count: int) -> None:
        """Record that the first `count` pending pairs are cached."""
        self.last = self.pending[count - 1 : count]
        self.pending = self.pending[count:]
        self.cached += count


@dataclass(frozen=True, slots=True)
class _TargetPass:
    """The hidden states of a target pass, not yet distributed to its rows."""

    features: Sequence[_RowFeatures | None]
    """[B], the batch."""
    missing: Sequence[int]
    """[B], number of new positions of each row."""
    positions: Sequence[torch.Tensor] | None
    """Indices of the new positions in each row of the pass; None if each row has one."""
    hidden: Mapping[int, torch.Tensor]
    """Layer -> [B, T, H]."""


class HeadCache(DraftCache):
    """A head's cache over ragged rows, fed with the target's hidden states."""

    def __init__(self, head: HeadModel, vocab_size: int) -> None:
        self.head = head
        self._features: list[_RowFeatures | None] = []
        """[B]; None for rows with unknown hidden states, which get no drafts. A list per batch: changes make another one."""
        self._passes: list[_TargetPass] = []
        """The latest target passes, whose positions are counted in `_RowFeatures.count`."""
        self._kept_bytes = 0
        """Size of the hidden states whose features are not computed, at most."""
        self._last_output: torch.Tensor | None = None
        """[B, 1, D], the head's output for each row's last token, which the next pass reads."""
        self._outputs: torch.Tensor | None = None
        """[B, K, D], the head's outputs of the last pass."""
        super().__init__(head, vocab_size)

    def admit(self, rows: Rows, first: int) -> None:
        """Admit new rows with the target's hidden states of their prompts, except for the last position."""
        super().admit(rows, first)
        self._features = [*self._features, *(self._prompt_features(row) for row in rows.rows[first:])]
        self._count_bytes(sum(one.states[0].nbytes for one in self._features[first:] if one is not None and one.states))

    def _prompt_features(self, row: Row) -> _RowFeatures | None:
        hidden, count = row.prompt_hidden, row.size - 1
        out = _RowFeatures(torch.empty(0, self.head.width, device=self.head.device, dtype=self.head.dtype))
        if count == 0:
            return out
        if any(layer not in hidden or len(hidden[layer]) != count for layer in self.head.hidden_layers):
            return None
        out.add(self.head.joined(hidden))
        return out

    def _count_bytes(self, added: int) -> None:
        """Count kept hidden states; compute the features of all if they are too many."""
        self._kept_bytes += added
        if self._kept_bytes > _MAX_BYTES:
            self._compute(self._features)
            self._kept_bytes = 0

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves to the cache rows and their features."""
        super().rearrange(moves, count)
        features = list(self._features)
        for source, target in moves:
            features[target] = features[source]
        self._features = features[:count]

    def reset(self) -> None:
        """Forget every row."""
        super().reset()
        self._features, self._passes, self._kept_bytes = [], [], 0

    def add_target(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Add the hidden states of a target pass at committed positions, and rewind draft tokens."""
        missing = [
            0 if one is None else row.size - 1 - one.count for row, one in zip(rows, self._features, strict=True)
        ]
        if any(missing):
            if target is None or any(layer not in target.hidden for layer in self.head.hidden_layers):
                self._features = [None if n else one for n, one in zip(missing, self._features, strict=True)]
            else:
                self._keep(missing, verification, target)
        self._rewind()

    def _keep(self, missing: Sequence[int], verification: Verification | None, target: ModelOutput) -> None:
        """Keep the hidden states of a target pass. missing: [B], numbers of new positions."""
        hidden = {layer: target.hidden[layer] for layer in self.head.hidden_layers}
        # a target that rewinds to snapshots has fed some known positions again
        again = [
            0 if one is None else one.count - at for one, at in zip(self._features, target.starts or (), strict=False)
        ]
        again = again or [0] * len(missing)
        is_plain = all(
            (n, a) == (1, 0) or one is None for n, a, one in zip(missing, again, self._features, strict=True)
        )
        positions = None if is_plain else _pass_positions(missing, again, verification, target)
        self._passes.append(_TargetPass(self._features, missing, positions, hidden))
        for features, n in zip(self._features, missing, strict=True):
            if features is not None:
                features.count += n
        self._count_bytes(sum(states.nbytes for states in hidden.values()))

    def _distribute(self) -> None:
        """Add the hidden states of the kept passes to their rows: those of successive plain passes at once."""
        for is_plain, group in itertools.groupby(self._passes, lambda one: one.positions is None and id(one.features)):
            passes = list(group)
            if is_plain:
                hidden = {n: torch.cat([one.hidden[n][:, :1] for one in passes], 1) for n in self.head.hidden_layers}
                for features, states in zip(passes[0].features, self.head.joined(hidden), strict=True):
                    if features is not None:
                        features.states.append(states)
            else:
                for one in passes:
                    self._gather(one)
        self._passes = []

    def _gather(self, one: _TargetPass) -> None:
        """Add the hidden states of a pass to its rows."""
        assert one.positions is not None
        rows = torch.cat([torch.full((n,), i, device=self.head.device) for i, n in enumerate(one.missing)])
        at = torch.cat([index.to(self.head.device) for index in one.positions])
        hidden = {n: states.to(self.head.device)[rows, at] for n, states in one.hidden.items()}
        for features, states in zip(
            one.features, torch.split(self.head.joined(hidden), list(one.missing)), strict=True
        ):
            if features is not None and len(states):
                features.states.append(states)

    def _compute(self, features: Sequence[_RowFeatures | None]) -> None:
        """Compute the features of all hidden states of these rows, in one product."""
        self._distribute()
        parts = [one for one in features if one is not None and one.states]
        if not parts:
            return
        states = [torch.cat(one.states) for one in parts]
        found = self.head.features(torch.cat(states))
        for one, new in zip(parts, torch.split(found, list(map(len, states))), strict=True):
            one.pending, one.states = torch.cat([one.pending, new]), []

    def _rewind(self) -> None:
        self.cache.truncate([0 if one is None else one.cached for one in self._features])

    def rewind(self, rows: Rows) -> None:
        """Rewind draft tokens."""
        self._rewind()

    def room(self, rows: Rows, budget: Sequence[int]) -> list[int]:
        """Return how many tokens each row may draft; 0 for rows with unknown hidden states."""
        room = super().room(rows, budget)
        return [n if one is not None and one.count else 0 for n, one in zip(room, self._features, strict=True)]

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Prefill long contexts in separate passes, until at most MAX_CATCH_UP pairs are pending."""
        self._rewind()
        self._compute([one if on else None for one, on in zip(self._features, wanted, strict=True)])
        for index, (row, one) in enumerate(zip(rows, self._features, strict=True)):
            while one is not None and wanted[index] and len(one.pending) > MAX_CATCH_UP:
                count = min(self.head.capabilities.prefill_chunk, len(one.pending) - 1)
                tokens = torch.from_numpy(row.tokens[one.cached + 1 : one.cached + 1 + count])[None]
                model_input = ModelInput(tokens.to(self.head.device), [count], index, logits=Logits.NONE)
                super().forward(dataclasses.replace(model_input, features=one.pending[None, :count]))
                one.mark_cached(count)

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Feed the pending pairs, then the rows' draft tokens one by one; see `DraftCache.catch_up`."""
        output = self._feed_pending(rows, fed)
        drafted = [row.tokens[row.committed.size :] if row.committed is not row else row.tokens[:0] for row in rows]
        for step in range(max(len(draft) if on else 0 for draft, on in zip(drafted, fed, strict=True))):
            on = [flag and len(draft) > step for draft, flag in zip(drafted, fed, strict=True)]
            tokens = [[int(draft[step]) if flag else 0] for draft, flag in zip(drafted, on, strict=True)]
            model_input = ModelInput(
                torch.tensor(tokens, device=self.head.device), [int(flag) for flag in on], logits=Logits.LAST
            )
            output = self._merged(output, self.forward(model_input), on)
        return output

    def _feed_pending(self, rows: Rows, fed: Sequence[bool]) -> ModelOutput:
        """Run a pass over the pending pairs; a row without any feeds its last pair again."""
        parts = [one if on else None for one, on in zip(self._features, fed, strict=True)]
        self._compute(parts)
        for index, one in enumerate(parts):
            if one is not None and not len(one.pending):
                one.pending, one.cached = one.last, one.cached - 1
                self.cache.lengths[index] = one.cached
        counts = [0 if one is None else len(one.pending) for one in parts]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        features = torch.zeros(*tokens.shape, self.head.width, dtype=self.head.dtype, device=self.head.device)
        for i, (row, one) in enumerate(zip(rows, parts, strict=True)):
            if one is not None:
                tokens[i, : counts[i]] = torch.from_numpy(row.tokens[one.cached + 1 : one.count + 1])
                features[i, : counts[i]] = one.pending
                one.mark_cached(counts[i])
        model_input = ModelInput(tokens.to(self.head.device), counts, logits=Logits.LAST, features=features)
        output = super().forward(model_input)
        batch, last = torch.arange(len(rows), device=self.head.device), model_input.last_columns()
        hidden = {n: states[batch, last][:, None] for n, states in output.hidden.items()}
        self._last_output = self._outputs = hidden[NEXT]
        return dataclasses.replace(output, hidden=hidden)

    def _merged(self, old: ModelOutput, new: ModelOutput, on: Sequence[bool]) -> ModelOutput:
        """Return the new output for rows that were fed, the old one for the others."""
        which = torch.tensor(on, device=self.head.device)[:, None, None]
        hidden = {n: torch.where(which, new.hidden[n], old.hidden[n]) for n in old.hidden}
        self._last_output = self._outputs = hidden[NEXT]
        assert new.logits is not None and old.logits is not None
        return dataclasses.replace(new, logits=torch.where(which, new.logits, old.logits), hidden=hidden)

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run one pass over draft tokens: the next token of each chain, or a whole tree after the rows' last tokens."""
        assert self._last_output is not None and self._outputs is not None
        features = self._outputs[:, -1:]
        if model_input.parents is not None:
            batch = torch.arange(len(model_input.parents), device=model_input.parents.device)[:, None]
            of_parents = self._outputs[batch, model_input.parents.clamp(min=0, max=self._outputs.shape[1] - 1)]
            features = torch.where(model_input.parents[..., None] < 0, self._last_output, of_parents)
        output = super().forward(dataclasses.replace(model_input, features=features))
        self._outputs = output.hidden[NEXT]
        return output


def _pass_positions(
    missing: Sequence[int], again: Sequence[int], verification: Verification | None, target: ModelOutput
) -> list[torch.Tensor]:
    """Return the indices of each row's new positions in the target's pass, [n] int64: a chain's first, then a tree's path.

    missing: numbers of new positions. again: numbers of positions before them that were known and fed again.
    """
    num_before = target.num_before or (0,) * len(missing)
    out = []
    for i, n in enumerate(missing):
        positions = torch.arange(again[i], again[i] + n)
        committed = num_before[i] + 1 - again[i]
        if verification is not None and verification.path is not None and n > committed:
            path = verification.path[i, : n - committed] + num_before[i] + 1
            positions = torch.cat([positions[:committed].to(path.device), path])
        out.append(positions)
    return out


class _ReadsTarget(ModelDrafter):
    """Base of head drafters, for chains and trees."""

    context: HeadCache

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Add the target's hidden states of committed tokens."""
        self.context.add_target(rows, verification, target)


class HeadDrafter(_ReadsTarget):
    """Draft chains with a head on the target's hidden states.

    A row gets no drafts if the target's hidden states are unknown for a part of its text, for example because the drafter failed
    for some steps.
    """

    def __init__(self, head: HeadModel, target_vocab_size: int, *, sample: bool = True) -> None:
        """target_vocab_size: width of the target's logits. sample: see ModelDrafter."""
        super().__init__(head, target_vocab_size, context=HeadCache(head, target_vocab_size), sample=sample)
        self.hidden_layers = tuple(sorted(set(head.hidden_layers)))


class HeadTreeDrafter(_ReadsTarget, ModelTreeDrafter):
    """Draft trees with a head on the target's hidden states; budgets count nodes."""

    def __init__(self, head: HeadModel, target_vocab_size: int, *, branches: int = 2, width: int = 1) -> None:
        """branches: children per node. width: nodes per level that get children; each level takes one draft pass."""
        ModelTreeDrafter.__init__(
            self, head, target_vocab_size, branches=branches, width=width, context=HeadCache(head, target_vocab_size)
        )
        self.hidden_layers = tuple(sorted(set(head.hidden_layers)))
