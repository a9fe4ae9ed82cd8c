"""The engine: requests join and leave between steps of one decode loop.

    admit -> prefill -> step (propose, score, judge, commit, rewind) -> retire

Owns the rows, the target's cache and the order of things. Knows no text: a stop string comes in as a condition.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter

import numpy as np

from foresay.checks import check_int
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.processors import check_processors, check_token_ids
from foresay.decoding.protocols import (
    Drafter,
    KVCache,
    LanguageModel,
    LengthPolicy,
    Observer,
    ProposesTrees,
    Remembers,
    Rule,
)
from foresay.decoding.randomness import derive
from foresay.decoding.rows import IntArray, Row, Rows, StopCondition
from foresay.decoding.sampling_params import MAX_SEED, SamplingParams
from foresay.decoding.step import step
from foresay.engine.chunked_prefill import WAIT_S, ChunkedPrefill
from foresay.engine.guard import GuardedDrafter
from foresay.engine.prefixes import PrefixStore
from foresay.engine.row_moves import plan_moves
from foresay.errors import ConfigError, ContextLengthError, OutOfMemoryError, PromptError, UnsupportedModelError
from foresay.threads import single_threaded

logger = logging.getLogger("foresay")

MAX_BATCH_SIZE = 4096
_NEVER = MAX_BATCH_SIZE + 1


class Engine:
    """Continuous batching around `step`.

    Requests are submitted at any time; each call of `step` admits what fits, fills prompts, runs one target pass over
    every row that decodes, and returns what was committed.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        rule: Rule,
        policy: LengthPolicy,
        *,
        max_batch_size: int = 32,
        prefixes: PrefixStore | None = None,
        prefill_wait_s: float = WAIT_S,
        prefill_clock: Callable[[], float] | None = perf_counter,
        observers: Sequence[Observer] = (),
        draw_seed: Callable[[], int] = lambda: secrets.randbelow(MAX_SEED),
    ) -> None:
        """prefixes: lets requests start from the slots of rows that hold the same beginning; None fills every prompt whole.
        prefill_wait_s: about how long rows that decode wait for prompts that are filled between two steps. prefill_clock: see
        `ChunkedPrefill`.

        draw_seed: the seed of a request that names none. observers: see each step as it is judged. Raises ConfigError or
        UnsupportedModelError when the drafter proposes trees that the rule or the target does not take.
        """
        self.observers, self._draw_seed = tuple(observers), draw_seed
        _check_trees(target, drafter, rule)
        self._prefixes = prefixes
        self._filling = ChunkedPrefill(target, prefixes, prefill_wait_s, prefill_clock)
        if prefixes is not None:
            prefixes.hidden_layers = () if drafter is None else drafter.hidden_layers
        most = target.capabilities.max_rows or MAX_BATCH_SIZE
        self.max_batch_size = check_int("max_batch_size", max_batch_size, 1, most)
        self.target, self.rule, self.policy = target, rule, policy
        trees = rule.trees and target.capabilities.trees
        self.drafter = (
            None if drafter is None else GuardedDrafter(drafter, target.vocab_size, target.device, trees=trees)
        )
        self._cache = target.new_cache()
        if self.drafter is not None:
            self.drafter.use_cache_of_target(self._cache)
        self._waiting: deque[Row] = deque()
        self._items: list[Row] = []
        self._decoding, self._step_s = 0, 0.0
        self._full_at = _NEVER
        """Rows from which on the memory does not hold the next request."""
        self._said_full = False
        self._rows: Rows | None = None
        self._cancelled: set[int] = set()
        self._next_id = 0
        self._nonce = drafter is not None and _repeats_seeds(drafter, rule, policy)

    def submit(
        self,
        prompt: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        eos: frozenset[int] = frozenset(),
        stop: StopCondition | None = None,
        source: Sequence[int] | IntArray | None = None,
    ) -> int:
        """Queue a request and return its id.

        prompt: token ids. eos: the model's end-of-sequence ids. stop: asked about every committed token. source: what an
        encoder-decoder's encoder reads, the prompt being what its decoder starts from. Raises
        PromptError for an empty prompt or foreign ids, ContextLengthError when the prompt fills the context,
        OutOfMemoryError when its keys and values would not fit the memory that is left, and
        ConfigError for parameters that name tokens the vocabulary lacks.
        """
        limit = self._check(
            prompt, params, (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        )
        self._check_source(source)
        self._check_memory(limit)
        seed = params.seed if params.seed is not None else self._draw_seed()
        row = Row(self._next_id, prompt, params, seed=seed, limit=limit, eos=eos, stop=stop, source=source)
        if self._nonce:
            row.rng_key = derive(seed, next(_SERIAL))
        self._next_id += 1
        self._waiting.append(row)
        return row.request_id

    def _check_source(self, source: Sequence[int] | IntArray | None) -> None:
        """An encoder-decoder needs a source its encoder can read; any other model has no use for one."""
        reads, longest = self.target.capabilities.reads_source, self.target.capabilities.max_source_length
        if source is None:
            if reads:
                raise PromptError("an encoder-decoder model needs a source; pass source=")
            return
        if not reads:
            raise PromptError("a source was given, but the model has no encoder to read it")
        if len(source) == 0:
            raise PromptError("the source is empty; give at least one token")
        vocab = self.target.vocab_size
        if min(source) < 0 or max(source) >= vocab:
            raise PromptError(f"a source token id is not in the vocabulary (0 to {vocab - 1})")
        if longest is not None and len(source) > longest:
            raise ContextLengthError(
                f"the source has {len(source)} tokens; the encoder reads {longest} at most. Shorten it"
            )

    def _check(self, prompt: Sequence[int] | IntArray, params: SamplingParams, eos: frozenset[int]) -> int:
        check_processors(params.processors)
        check_token_ids(params, self.target.vocab_size, eos)
        if len(prompt) == 0:
            raise PromptError("the prompt is empty; give at least one token")
        if np.asarray(prompt).dtype.kind not in "iu":
            raise PromptError("the prompt holds something other than integer token ids")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.target.vocab_size:
            bad = int(low if low < 0 else high)
            raise PromptError(f"prompt token id {bad} is not in the vocabulary (0 to {self.target.vocab_size - 1})")
        if len(prompt) >= self.target.max_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; the model's context is {self.target.max_length}, which must also "
                "hold at least one new token. Shorten the prompt"
            )
        if params.min_new_tokens > self.target.max_length - len(prompt):
            raise ContextLengthError(
                f"min_new_tokens={params.min_new_tokens} cannot fit: the prompt takes {len(prompt)} of the context's "
                f"{self.target.max_length} tokens"
            )
        return min(len(prompt) + params.max_new_tokens, self.target.max_length)

    def _check_memory(self, limit: int) -> None:
        """Refuse what would not fit if it were alone."""
        wanted = self.target.cache_bytes([limit])
        if wanted and wanted > self._memory():
            raise OutOfMemoryError(
                f"{limit} tokens of prompt and output would take {wanted / 1e9:.1f} GB of keys and values, and "
                f"{self._memory() / 1e9:.1f} GB are free; ask for fewer with max_new_tokens, or shorten the prompt"
            )

    @property
    def cached_bytes(self) -> int:
        """Bytes that the target's cache takes, as far as it says."""
        return int(getattr(self._cache, "nbytes", 0))

    def _memory(self) -> int:
        """Bytes that the target's cache may have, those it has included."""
        return self.target.free_bytes() + self.cached_bytes

    def _fitting(self, count: int) -> int:
        """How many of the first `count` waiting requests the memory holds beside the rows that are there.

        Each is counted with all the tokens it may come to. One alone is taken in any case: it was let in when it came.
        """
        if len(self._items) >= self._full_at:
            return 0  # nobody has gone since
        self._full_at = _NEVER
        memory, limits = None, [row.limit for row in self._items]
        for taken, row in enumerate(itertools.islice(self._waiting, count)):
            limits.append(row.limit)
            wanted = self.target.cache_bytes(limits)
            if not wanted:
                continue
            memory = self._memory() if memory is None else memory
            if wanted > memory and len(self._items) + taken > 0:
                if not self._said_full:
                    logger.warning(
                        "%d rows of up to %d tokens fill the memory that is left (%.1f GB); other requests wait for them",
                        len(self._items) + taken,
                        max(limits),
                        memory / 1e9,
                    )
                self._full_at, self._said_full = len(self._items) + taken, True
                return taken
        return count

    def cancel(self, request_id: int) -> None:
        """End a request before its next step; unknown and finished ids are ignored."""
        self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._items or self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that no row is free for yet."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Rows in the batch, those being prefilled included."""
        return len(self._items)

    @property
    def draft_failures(self) -> int:
        """How often the drafter raised."""
        return 0 if self.drafter is None else self.drafter.failures

    def seed_of(self, request_id: int) -> int | None:
        """The seed of an unfinished request (drawn when none was given)."""
        return next((r.seed for r in (*self._items, *self._waiting) if r.request_id == request_id), None)

    def step(self) -> list[Step]:
        """Admit, prefill, decode once. Returns one Step per decoded row; none while only prompts are filled."""
        with single_threaded() if self.target.capabilities.own_threads else nullcontext():
            return self._step()

    def _step(self) -> list[Step]:
        ended = self._cancel()
        self._admit()
        self._prefill()
        if self._decoding == 0:
            return ended
        rows = self._active()
        try:
            steps = step(rows, self.target, self._cache, self.drafter, self.rule, self.policy, self.observers)
        except BaseException:
            # the pass may have filled the caches before it failed: whoever goes on must find them as they were
            self._cache.truncate([row.size - 1 for row in rows])
            if self.drafter is not None:
                self.drafter.observe(rows, None, None)
            raise
        steps = [
            dataclasses.replace(one, num_cached=row.num_cached) if row.num_new == len(one.token_ids) else one
            for row, one in zip(rows, steps, strict=True)
        ]
        self._step_s = steps[0].total_s
        error = None if self.drafter is None else self.drafter.step_error()
        if error is not None:
            steps = [dataclasses.replace(one, draft_error=error) for one in steps]
        self._retire([s.finish_reason is None for s in steps])
        return ended + steps

    def abandon(self) -> list[int]:
        """Drop every request, running or waiting, and start anew with empty caches; returns their ids."""
        gone = [row.request_id for row in (*self._items, *self._waiting)]
        self._waiting.clear()
        self._items, self._decoding, self._rows = [], 0, None
        self._cache = self.target.new_cache()
        if self._prefixes is not None:
            self._prefixes.clear()
        if self.drafter is not None:
            self.drafter.use_cache_of_target(self._cache)
            self.drafter.reset()
        return gone

    @property
    def cache(self) -> KVCache:
        """The target's cache; a row for each active request."""
        return self._cache

    @property
    def rows(self) -> tuple[Row, ...]:
        """The active rows in cache order, those that are still being filled last."""
        return tuple(self._items)

    def _active(self) -> Rows:
        if self._rows is None:
            can, items = self.target.capabilities, self._items[: self._decoding]
            self._rows = Rows(items, needs=self.rule.needs, ragged=can.ragged, column_cost=can.column_cost)
        return self._rows

    def _cancel(self) -> list[Step]:
        if not self._cancelled:
            return []
        self._full_at = _NEVER
        gone = [r for r in (*self._items, *self._waiting) if r.request_id in self._cancelled]
        self._waiting = deque(r for r in self._waiting if r.request_id not in self._cancelled)
        self._retire([r.request_id not in self._cancelled for r in self._items])
        self._cancelled.clear()
        return [Step(r.request_id, (), (), 0, 0, finish_reason=FinishReason.CANCELLED) for r in gone]

    def _admit(self) -> None:
        """Move waiting requests into free places, the short prompts of one admission first so that they pad little."""
        free = min(self.max_batch_size - len(self._items), len(self._waiting))
        free = self._fitting(free) if free > 0 else free
        if free <= 0:
            return
        first = len(self._items)
        if first == 0 and self.drafter is not None:
            self.drafter.reset()
        new = sorted((self._waiting.popleft() for _ in range(free)), key=lambda row: row.size)
        try:
            self.target.admit(Rows([*self._items, *new]), first, self._cache)
        except BaseException:  # an encoder may run out of memory: the rows wait on, and nothing is left half admitted
            self._cache.rearrange([], first)
            self._waiting.extendleft(reversed(new))
            raise
        self._items += new

    def _prefill(self) -> None:
        """Fill prompts for a while, and let the rows that are filled begin to decode."""
        first = self._decoding
        if first == len(self._items):
            return
        hidden = () if self.drafter is None else self.drafter.hidden_layers
        self._decoding = self._filling.between_steps(self._cache, self._items, first, hidden, self._step_s)
        if self._decoding > first:
            self._rows = None
            if self.drafter is not None:
                self.drafter.admit(self._active(), first)
            if self._prefixes is None:  # nobody else will begin with them
                for row in self._items[first : self._decoding]:
                    row.prompt_hidden = {}

    def _retire(self, alive: Sequence[bool]) -> None:
        """Close the gaps of ended rows; each surviving row moves at most once."""
        alive = [*alive, *[True] * (len(self._items) - len(alive))]
        if all(alive):
            return
        if self._prefixes is not None:
            for place, (row, stays) in enumerate(zip(self._items, alive, strict=True)):
                if not stays:
                    self._prefixes.save(self._cache, row, place)
        front, back, decoding = plan_moves(alive, self._decoding)
        for source, place in (*front, *back):
            self._items[place] = self._items[source]
        count = sum(alive)
        del self._items[count:]
        self._cache.rearrange([*front, *back], count)
        if self.drafter is not None:
            self.drafter.rearrange(front, decoding)
        self._decoding, self._rows = decoding, None


_SERIAL = itertools.count(1)


def _repeats_seeds(drafter: Drafter, rule: Rule, policy: LengthPolicy) -> bool:
    """Whether a seed given twice would meet drafts, or lengths of drawn drafts, that were learned from its own numbers."""
    if rule.needs.ignores_drafts:
        return False
    return (drafter.samples and policy.remembers) or (isinstance(drafter, Remembers) and drafter.repeats_seeds())


def _check_trees(target: LanguageModel, drafter: Drafter | None, rule: Rule) -> None:
    if not isinstance(drafter, ProposesTrees) or drafter.branches <= 1:
        return
    name = type(drafter).__name__
    if not rule.trees:
        raise ConfigError(
            f"rule {rule.name!r} judges chains, and {name} proposes trees; use speculative, match or coupled"
        )
    if not target.capabilities.trees:
        raise UnsupportedModelError(
            f"{name} proposes trees, and {type(target).__name__} does not take them; use a drafter of chains"
        )
