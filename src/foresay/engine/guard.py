"""A drafter cannot hurt: whatever it raises, the requests go on with plain decoding.

Wraps a drafter. A failure is counted, logged once, and ends drafting for the rows now in the batch; when rows join, it is
tried again for all of them, and after three failures drafting stays off. The law of the output never depends on any of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foresay.decoding.proposal import Proposal, Verdict
from foresay.decoding.protocols import Drafter, KVCache, LengthPolicy, ModelOutput, Move, UsesTargetCache
from foresay.decoding.rows import Rows
from foresay.threads import together

logger = logging.getLogger("foresay")
MAX_FAILURES = 3
_OURS = "foresay."
_SUM = 1e-3
"""How far from 1 a law may sum: float32 over any vocabulary stays well within."""


class GuardedDrafter:
    """A Drafter that never raises."""

    def __init__(self, inner: Drafter, vocab_size: int, device: torch.device) -> None:
        self.inner, self._vocab, self._device = inner, vocab_size, device
        self.hidden_layers = inner.hidden_layers
        self.failures = 0
        self._ours = _is_ours(inner)
        self.last_error: Exception | None = None
        self._active = True
        self.reset()

    @property
    def active(self) -> bool:
        """Whether the present rows are drafted for."""
        return self._active

    def _threads(self) -> AbstractContextManager[None]:
        """What the drafter runs under. One that was written elsewhere may bring a model of its own, and is left every core."""
        return nullcontext() if self._ours else together()

    def _try(self, action: Callable[[], Proposal | None]) -> Proposal | None:
        if not self._active:
            return None
        try:
            with self._threads():
                return action()
        except Exception as error:  # whatever a drafter raises, out of memory included, must not end a request
            self.failures += 1
            self.last_error = error
            self._active = False
            if self.failures == 1:
                logger.warning("the drafter failed (%s: %s); decoding goes on without it", type(error).__name__, error)
            logger.debug("drafter failure %d", self.failures, exc_info=error)
            with contextlib.suppress(Exception):
                self.inner.reset()  # what it holds, caches above all, is of no more use
            return None

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Lend the target's cache to a drafter that drafts in it."""
        if isinstance(self.inner, UsesTargetCache):
            self.inner.use_cache_of_target(cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Pass on; a drafter that failed is tried again with all rows, now that new ones have come."""
        if not self._active:
            self.reset()
            first = 0
        self._try(lambda: self.inner.admit(rows, first))

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """The inner proposal once checked, or none."""
        proposal = self._try(lambda: self._checked(self.inner.propose(rows, budget, policy), rows, budget))
        return proposal if proposal is not None else Proposal.empty(len(rows), self._device)

    def _checked(self, proposal: Proposal, rows: Rows, budget: Sequence[int]) -> Proposal:
        """The proposal cut to its longest guess and on the target's device; ValueError when it is malformed."""
        counts = list(proposal.num_tokens)
        ids = proposal.token_ids
        if ids.ndim != 2 or ids.dtype != torch.int64 or ids.shape[0] != len(rows) or len(counts) != len(rows):
            raise ValueError(
                f"ids of shape {tuple(ids.shape)} and dtype {ids.dtype} for {len(rows)} rows, not [B, K] int64"
            )
        if any(not 0 <= n <= min(b, proposal.width) for n, b in zip(counts, budget, strict=True)):
            raise ValueError(
                f"proposed {counts} tokens with a budget of {list(budget)} and a width of {proposal.width}"
            )
        width = max(counts)
        changes: dict[str, Any] = {"num_tokens": counts, "token_ids": ids[:, :width].to(self._device)}
        for name in ("law_index", "confidence", "parents"):
            column: torch.Tensor | None = getattr(proposal, name)
            if column is not None:
                if column.shape != ids.shape:
                    raise ValueError(f"{name} of shape {tuple(column.shape)} for ids of shape {tuple(ids.shape)}")
                changes[name] = column[:, :width].to(self._device)
        if proposal.laws is not None:
            changes["laws"] = proposal.laws.to(self._device)
        out = dataclasses.replace(proposal, **changes)
        if width == 0:
            return Proposal.empty(len(rows), self._device)
        if not bool(((out.token_ids >= 0) & (out.token_ids < self._vocab)).all()):
            raise ValueError(f"a proposed token id is not in [0, {self._vocab})")
        _check_laws(out, self._vocab)
        _check_tree(out)
        return out

    def observe(self, rows: Rows, verdict: Verdict | None, target: ModelOutput | None) -> None:
        """Pass on, unless drafting is off."""
        self._try(lambda: self.inner.observe(rows, verdict, target))

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Pass on, unless drafting is off."""
        self._try(lambda: self.inner.rearrange(moves, count))

    def reset(self) -> None:
        """Forget every row, and try again unless it failed too often."""
        self._active = self.failures < MAX_FAILURES
        self._try(self.inner.reset)


def _is_ours(drafter: object) -> bool:
    """Whether a drafter, and those that it is made of, are foresay's own."""
    if not type(drafter).__module__.startswith(_OURS):
        return False
    parts = [
        part
        for value in getattr(drafter, "__dict__", {}).values()
        for part in (value if isinstance(value, list | tuple) else [value])
    ]
    return all(_is_ours(part) for part in parts if hasattr(part, "propose") and hasattr(part, "observe"))


def _check_laws(proposal: Proposal, vocab: int) -> None:
    """ValueError unless each sampled token names a law over the vocabulary. A NaN would pass every test of acceptance."""
    laws, index = proposal.laws, proposal.law_index
    if laws is None and index is None:
        return
    if laws is None or index is None:
        raise ValueError("laws without law_index, or law_index without laws")
    if laws.ndim != 2 or laws.shape[1] != vocab:
        raise ValueError(f"laws of shape {tuple(laws.shape)}, not [N, {vocab}]")
    if not bool(((index >= -1) & (index < len(laws))).all()):
        raise ValueError("law_index is not into laws")
    # the least and the sum of a row that holds a NaN or an infinity are not finite either
    good = (laws.amin(-1) >= 0) & ((laws.sum(-1, dtype=torch.float32) - 1).abs() <= _SUM)
    if not bool(good.all()):
        raise ValueError(f"{int((~good).sum())} of {len(laws)} laws are not finite, negative, or do not sum to 1")


def _check_tree(proposal: Proposal) -> None:
    """ValueError unless every parent comes before its child, siblings differ, and sampled ones come first."""
    if proposal.parents is None:
        return
    index = None if proposal.law_index is None else proposal.law_index.tolist()
    for i, (above, ids, n) in enumerate(
        zip(proposal.parents.tolist(), proposal.token_ids.tolist(), proposal.num_tokens, strict=True)
    ):
        named: set[int] = set()
        seen: set[tuple[int, int]] = set()
        for column in range(n):
            parent = above[column]
            if not -1 <= parent < column:
                raise ValueError(f"column {column} of a tree follows column {parent}")
            if (parent, ids[column]) in seen:
                raise ValueError(f"token {ids[column]} follows column {parent} of a tree twice")
            seen.add((parent, ids[column]))
            if index is None or index[i][column] < 0:
                named.add(parent)
            elif parent in named:
                raise ValueError(f"column {column} of a tree was sampled, and a sibling before it was not")
