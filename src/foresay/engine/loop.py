"""The engine: requests join and leave between steps of one decoding loop.

    admit -> prefill -> step (propose, score, verify, commit, rewind) -> retire

Owns the rows, the target's cache and the schedule. Knows no text: stop strings are passed in as conditions.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from foresay.checks import check_int
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import Drafter, KVCache, LanguageModel, LengthPolicy, Observer, Rule
from foresay.decoding.rows import IntArray, Row, Rows, StopCondition
from foresay.decoding.sampling_params import MAX_SEED, SamplingParams
from foresay.decoding.step import step
from foresay.engine.admission import MemoryLimit, check_request, check_trees
from foresay.engine.chunked_prefill import WAIT_S, ChunkedPrefill, runs_ahead
from foresay.engine.guard import GuardedDrafter
from foresay.engine.prefixes import PrefixStore
from foresay.engine.request_keys import RequestKeys
from foresay.engine.row_moves import plan_moves
from foresay.errors import ConfigError
from foresay.threads import single_threaded

MAX_BATCH_SIZE = 4096
"""Upper bound of max_batch_size."""


class Engine:
    """Continuous batching around `step`.

    Requests may be submitted at any time. Each call of `step` admits waiting requests, prefills prompts, runs one target pass
    over all decoding rows, and returns their Steps.
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
        """Start without requests.

        Args:
            target: The model that decides the output.
            drafter: Proposes tokens; None for plain decoding.
            rule: Accepts or rejects them.
            policy: Decides how many tokens are drafted.
            max_batch_size: Maximum number of rows decoded at once.
            prefixes: Reuses the keys and values of common prefixes; None prefills every prompt completely.
            prefill_wait_s: Approximate time that decoding rows wait for prefill between two steps, in seconds.
            prefill_clock: Returns the time in seconds; None for pieces of prompts that do not depend on time.
            observers: Called in each step after verification.
            draw_seed: Returns the seed of a request without one, and the random numbers of `RequestKeys`.

        Raises:
            ConfigError: The drafter proposes trees that the rule does not support, or max_batch_size is out of its bounds.
            UnsupportedModelError: The drafter proposes trees that the target does not support.
        """
        self.observers, self._draw_seed = tuple(observers), draw_seed
        check_trees(target, drafter, rule)
        self._prefixes = prefixes
        self._prefiller = ChunkedPrefill(target, prefixes, prefill_wait_s, prefill_clock)
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
        self._memory = MemoryLimit(target)
        self._rows: Rows | None = None
        self._cancelled: set[int] = set()
        self._ended: list[Step] = []
        """Last steps of cancelled requests that no step has returned yet: the target may raise first."""
        self._next_id = 0
        self._keys = RequestKeys(drafter, rule, policy, draw_seed)

    def submit(
        self,
        prompt: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        eos: frozenset[int] = frozenset(),
        stop: StopCondition | None = None,
        source: Sequence[int] | IntArray | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt: Token ids.
            params: The request's parameters.
            eos: The model's end-of-sequence ids.
            stop: Called with the tokens of each step before they are committed.
            source: Input of an encoder-decoder's encoder; the prompt is then the start of its decoder.

        Returns:
            The request's id.

        Raises:
            ConfigError: Parameters or token ids that the target cannot honour.
            ContextLengthError: The prompt, or the prompt and the requested output, do not fit the context.
            OutOfMemoryError: The row would not fit in memory.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError("must be SamplingParams", param="params", value=params)
        ends = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        limit = check_request(self.target, prompt, params, ends, source)
        self._memory.check(limit, self.cached_bytes + self.prefix_bytes)
        seed = params.seed if params.seed is not None else self._draw_seed()
        row = Row(self._next_id, prompt, params, seed=seed, limit=limit, eos=eos, stop=stop, source=source)
        row.rng_key = self._keys.key_of(row)
        self._next_id += 1
        self._waiting.append(row)
        return row.request_id

    @property
    def cached_bytes(self) -> int:
        """Size of the target's cache in bytes; 0 if it does not report it."""
        return int(getattr(self._cache, "nbytes", 0))

    @property
    def pool(self) -> Any:
        """Memory that was allocated for caches of the target in advance, which engines may share; None if they grow."""
        return getattr(self._cache, "pool", None)

    @property
    def prefix_bytes(self) -> int:
        """Size of the prefixes of ended rows in bytes."""
        return 0 if self._prefixes is None else self._prefixes.nbytes

    def cancel(self, request_id: int) -> None:
        """End a request before its next step.

        Args:
            request_id: Unknown and finished ids are ignored.
        """
        self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._items or self._waiting or self._ended)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a free row."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Number of rows in the batch, including those being prefilled."""
        return len(self._items)

    @property
    def draft_failures(self) -> int:
        """Number of times the drafter failed."""
        return 0 if self.drafter is None else self.drafter.failures

    def seed_of(self, request_id: int) -> int | None:
        """Return the seed of an unfinished request (drawn if none was given).

        Args:
            request_id: The request's id.
        """
        return next((r.seed for r in (*self._items, *self._waiting) if r.request_id == request_id), None)

    def step(self) -> list[Step]:
        """Admit, prefill and decode once; return one Step per decoded row, none if only prompts were prefilled."""
        with single_threaded() if self.target.capabilities.own_threads else nullcontext():
            return self._step()

    def _step(self) -> list[Step]:
        self._cancel()
        self._admit()
        self._prefill()
        if self._decoding == 0:
            return self._take_ended()
        rows = self._active()
        try:
            steps = step(rows, self.target, self._cache, self.drafter, self.rule, self.policy, self.observers)
        except BaseException:
            # the pass may have filled the caches before it failed: restore their lengths for the next step
            self._cache.truncate([row.size - 1 for row in rows])
            if self.drafter is not None:
                self.drafter.observe(rows, None, None)
            raise
        error = None if self.drafter is None else self.drafter.step_error()
        for row, one in zip(rows, steps, strict=True):
            one.draft_error = error
            if row.num_new == len(one.token_ids):
                one.num_cached = row.num_cached
        self._step_s = steps[0].total_s
        self._retire([s.finish_reason is None for s in steps])
        return self._take_ended() + steps

    def _take_ended(self) -> list[Step]:
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> list[int]:
        """Drop every request, running or waiting, and replace the caches by empty ones; return the requests' ids."""
        dropped = [one.request_id for one in self._take_ended()]
        dropped += [row.request_id for row in (*self._items, *self._waiting)]
        self._waiting.clear()
        self._items, self._decoding, self._rows = [], 0, None
        self._cache = self.target.new_cache()
        if self._prefixes is not None:
            self._prefixes.clear()
        if self.drafter is not None:
            self.drafter.use_cache_of_target(self._cache)
            self.drafter.reset()
        return dropped

    @property
    def cache(self) -> KVCache:
        """The target's cache, with a row for each active request."""
        return self._cache

    @property
    def rows(self) -> tuple[Row, ...]:
        """Active rows in cache order; those that are being prefilled come last."""
        return tuple(self._items)

    def _active(self) -> Rows:
        if self._rows is None:
            items = self._items[: self._decoding]
            able = self.target.capabilities
            ahead = runs_ahead(self.target, self._cache)
            able = dataclasses.replace(able, trees=able.trees and self.rule.trees, runs_ahead=ahead)
            self._rows = Rows(items, needs=self.rule.needs, capabilities=able)
        return self._rows

    def _cancel(self) -> None:
        if not self._cancelled:
            return
        self._memory.row_left()
        ended = [r for r in (*self._items, *self._waiting) if r.request_id in self._cancelled]
        self._waiting = deque(r for r in self._waiting if r.request_id not in self._cancelled)
        self._retire([r.request_id not in self._cancelled for r in self._items])
        self._cancelled.clear()
        self._ended += [Step(r.request_id, (), (), 0, 0, finish_reason=FinishReason.CANCELLED) for r in ended]

    def _admit(self) -> None:
        """Move waiting requests into free rows, sorted by length so that prefill pads little."""
        free = min(self.max_batch_size - len(self._items), len(self._waiting))
        reusable = self.cached_bytes + self.prefix_bytes
        free = self._memory.num_fitting(self._items, self._waiting, free, reusable) if free > 0 else free
        if free <= 0:
            return
        if self._prefixes is not None and len(self._prefixes):
            joined = [*self._items, *itertools.islice(self._waiting, free)]
            self._prefixes.make_room(self._memory.missing(joined, self.cached_bytes))
        first = len(self._items)
        if first == 0 and self.drafter is not None:
            self.drafter.reset()
        new = sorted((self._waiting.popleft() for _ in range(free)), key=lambda row: row.size)
        try:
            self.target.admit(Rows([*self._items, *new]), first, self._cache)
        except BaseException:  # an encoder may run out of memory: the requests wait again, and the cache is restored
            self._cache.rearrange([], first)
            self._waiting.extendleft(reversed(new))
            raise
        self._items += new

    def _prefill(self) -> None:
        """Prefill some tokens; rows whose prompts are complete start to decode."""
        first = self._decoding
        if first == len(self._items):
            return
        hidden = () if self.drafter is None else self.drafter.hidden_layers
        self._decoding = self._prefiller.between_steps(self._cache, self._items, first, hidden, self._step_s)
        if self._decoding > first:
            self._rows = None
            if self.drafter is not None:
                self.drafter.admit(self._active(), first)
            if self._prefixes is None:  # no other row will reuse them
                for row in self._items[first : self._decoding]:
                    row.prompt_hidden = {}

    def _retire(self, alive: Sequence[bool]) -> None:
        """Remove ended rows; each remaining row moves at most once."""
        alive = [*alive, *[True] * (len(self._items) - len(alive))]
        if all(alive):
            return
        self._memory.row_left()
        if self._prefixes is not None:
            for i, (row, stays) in enumerate(zip(self._items, alive, strict=True)):
                if not stays:
                    self._prefixes.save(self._cache, row, i)
        front, back, decoding = plan_moves(alive, self._decoding)
        for source, destination in (*front, *back):
            self._items[destination] = self._items[source]
        count = sum(alive)
        del self._items[count:]
        self._cache.rearrange([*front, *back], count)
        if self.drafter is not None:
            self.drafter.rearrange(front, decoding)
        self._decoding, self._rows = decoding, None
