"""The target's hidden states of each row, as features that a draft reads.

Owns the row's features, computed late and together: work for rows without drafts is lost time. Which features a drafter has
cached is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import LanguageModel, ModelOutput, Move
from foresay.decoding.rows import Row, Rows

MAX_BYTES = 1 << 28
"""Size of the hidden states that are kept before their features are computed: work for rows without drafts is lost time."""


class RowFeatures:
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

    features: Sequence[RowFeatures | None]
    """[B], the batch."""
    missing: Sequence[int]
    """[B], number of new positions of each row."""
    positions: Sequence[slice | torch.Tensor] | None
    """The new positions in each row of the pass; None if each row has one."""
    hidden: Mapping[int, torch.Tensor]
    """Layer -> [B, T, H]."""


class ReadsStates(LanguageModel, Protocol):
    """A draft that reads features of the target's hidden states."""

    hidden_layers: tuple[int, ...]
    """Layers of the target whose hidden states it reads."""
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Size D of the features."""
        ...

    def joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return hidden states, given as layer -> [..., H], as one vector for each position, [..., L * H]."""
        ...

    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the features [n, D] of hidden states [n, L * H]."""
        ...


class TargetFeatures:
    """The features of all rows of a batch."""

    def __init__(self, reader: ReadsStates) -> None:
        self._reader = reader
        self.rows: list[RowFeatures | None] = []
        """[B]; None for rows with unknown hidden states, which get no drafts. A list per batch: changes make another one."""
        self._passes: list[_TargetPass] = []
        """The latest target passes, whose positions are counted in `RowFeatures.count`."""
        self._kept_bytes = 0
        """Size of the hidden states whose features are not computed, at most."""

    def admit(self, rows: Sequence[Row]) -> None:
        """Append rows with the target's hidden states of their prompts, except for the last position."""
        new = [self._of_prompt(row) for row in rows]
        self.rows = [*self.rows, *new]
        self._count_bytes(sum(one.states[0].nbytes for one in new if one is not None and one.states))

    def _of_prompt(self, row: Row) -> RowFeatures | None:
        reader, hidden, count = self._reader, row.prompt_hidden, row.size - 1
        out = RowFeatures(torch.empty(0, reader.width, device=reader.device, dtype=reader.dtype))
        if count == 0:
            return out
        if any(layer not in hidden or len(hidden[layer]) != count for layer in reader.hidden_layers):
            return None
        out.add(reader.joined(hidden))
        return out

    def _count_bytes(self, added: int) -> None:
        """Count kept hidden states; compute the features of all if they are too many."""
        self._kept_bytes += added
        if self._kept_bytes > MAX_BYTES:
            self.compute(self.rows)
            self._kept_bytes = 0

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves."""
        rows = list(self.rows)
        for source, target in moves:
            rows[target] = rows[source]
        self.rows = rows[:count]

    def add(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Add the hidden states of a target pass at committed positions."""
        missing = [0 if one is None else row.size - 1 - one.count for row, one in zip(rows, self.rows, strict=True)]
        if not any(missing):
            return
        if target is None or any(layer not in target.hidden for layer in self._reader.hidden_layers):
            self.rows = [None if n else one for n, one in zip(missing, self.rows, strict=True)]
        else:
            self._keep(missing, verification, target)

    def _keep(self, missing: Sequence[int], verification: Verification | None, target: ModelOutput) -> None:
        """Keep the hidden states of a target pass. missing: [B], numbers of new positions."""
        hidden = {layer: target.hidden[layer] for layer in self._reader.hidden_layers}
        # a target that rewinds to snapshots has fed some known positions again
        again = [0 if one is None else one.count - at for one, at in zip(self.rows, target.starts or (), strict=False)]
        again = again or [0] * len(missing)
        is_plain = all((n, a) == (1, 0) or one is None for n, a, one in zip(missing, again, self.rows, strict=True))
        positions = None if is_plain else _pass_positions(missing, again, verification, target)
        self._passes.append(_TargetPass(self.rows, missing, positions, hidden))
        for features, n in zip(self.rows, missing, strict=True):
            if features is not None:
                features.count += n
        self._count_bytes(sum(states.nbytes for states in hidden.values()))

    def _distribute(self) -> None:
        """Add the hidden states of the kept passes to their rows: those of successive plain passes at once."""
        for is_plain, group in itertools.groupby(self._passes, lambda one: one.positions is None and id(one.features)):
            passes = list(group)
            if is_plain:
                hidden = {n: torch.cat([one.hidden[n][:, :1] for one in passes], 1) for n in self._reader.hidden_layers}
                for features, states in zip(passes[0].features, self._reader.joined(hidden), strict=True):
                    if features is not None:
                        features.states.append(states)
            else:
                for one in passes:
                    self._gather(one)
        self._passes = []

    def _gather(self, one: _TargetPass) -> None:
        """Add the hidden states of a pass to its rows."""
        assert one.positions is not None
        for features, n, at, states in zip(
            one.features, one.missing, one.positions, self._reader.joined(one.hidden), strict=True
        ):
            if features is not None and n:
                features.states.append(states[at if isinstance(at, slice) else at.to(states.device)])

    def compute(self, features: Sequence[RowFeatures | None]) -> None:
        """Compute the features of all hidden states of these rows, in one product."""
        self._distribute()
        parts = [one for one in features if one is not None and one.states]
        if not parts:
            return
        states = [torch.cat(one.states) for one in parts]
        found = self._reader.features(torch.cat(states))
        for one, new in zip(parts, torch.split(found, list(map(len, states))), strict=True):
            one.pending, one.states = torch.cat([one.pending, new]), []


def _pass_positions(
    missing: Sequence[int], again: Sequence[int], verification: Verification | None, target: ModelOutput
) -> list[slice | torch.Tensor]:
    """Return each row's new positions in the target's pass: a slice, or indices [n] int64 if a tree's path is among them.

    missing: numbers of new positions. again: numbers of positions before them that were known and fed again.
    """
    num_before = target.num_before or (0,) * len(missing)
    out: list[slice | torch.Tensor] = []
    for i, n in enumerate(missing):
        committed = num_before[i] + 1 - again[i]
        if verification is not None and verification.path is not None and n > committed:
            path = verification.path[i, : n - committed] + num_before[i] + 1
            first = torch.arange(again[i], again[i] + committed, device=path.device)
            out.append(torch.cat([first, path]))
        else:
            out.append(slice(again[i], again[i] + n))
    return out
