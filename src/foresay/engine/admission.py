"""Admission: validate a request, and limit the batch to what fits in memory.

Owns the checks of prompts, sources and parameters, and the count of waiting requests that may join. Knows no scheduling.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import numpy as np

from foresay.decoding.processors import check_processors, check_token_ids
from foresay.decoding.protocols import Drafter, LanguageModel, ProposesTrees, Rule
from foresay.decoding.rows import IntArray, Row
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ContextLengthError, OutOfMemoryError, PromptError, UnsupportedModelError

logger = logging.getLogger("foresay")


def check_request(
    target: LanguageModel,
    prompt: Sequence[int] | IntArray,
    params: SamplingParams,
    eos: frozenset[int],
    source: Sequence[int] | IntArray | None,
) -> int:
    """Validate a request; return the maximum length of its row, prompt included.

    Raises PromptError for an empty prompt or ids outside the vocabulary, ContextLengthError if prompt and minimum output exceed
    the context, and ConfigError for parameters that name tokens outside the vocabulary.
    """
    check_processors(params.processors)
    check_token_ids(params, target.vocab_size, eos)
    if len(prompt) == 0:
        raise PromptError("the prompt is empty; give at least one token")
    if np.asarray(prompt).dtype.kind not in "iu":
        raise PromptError("the prompt contains something other than integer token ids")
    check_prompt_ids(prompt, target.vocab_size)
    if len(prompt) >= target.max_length:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; the model's context is {target.max_length}, which must also "
            "hold at least one new token. Shorten the prompt"
        )
    if params.min_new_tokens > target.max_length - len(prompt):
        text = f"cannot fit: the prompt takes {len(prompt)} of the context's {target.max_length} tokens"
        raise ContextLengthError(text, param="min_new_tokens", value=params.min_new_tokens)
    _check_source(target, source)
    return min(len(prompt) + params.max_new_tokens, target.max_length)


def check_prompt_ids(prompt: Sequence[int] | IntArray, vocab_size: int) -> None:
    """Raise PromptError for ids outside the vocabulary. prompt: at least one token id."""
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        bad = int(low if low < 0 else high)
        raise PromptError(f"prompt token id {bad} is not in the vocabulary (0 to {vocab_size - 1})", value=bad)


def _check_source(target: LanguageModel, source: Sequence[int] | IntArray | None) -> None:
    """Require a source for encoder-decoders, and refuse one for other models."""
    reads, longest = target.capabilities.reads_source, target.capabilities.max_source_length
    if source is None:
        if reads:
            raise PromptError("an encoder-decoder model needs a source; pass source=", param="source")
        return
    if not reads:
        raise PromptError("a source was given, but the model has no encoder to read it", param="source")
    if len(source) == 0:
        raise PromptError("the source is empty; give at least one token", param="source")
    if min(source) < 0 or max(source) >= target.vocab_size:
        raise PromptError(f"a source token id is not in the vocabulary (0 to {target.vocab_size - 1})", param="source")
    if longest is not None and len(source) > longest:
        text = f"the source has {len(source)} tokens; the encoder reads {longest} at most. Shorten it"
        raise ContextLengthError(text)


def check_trees(target: LanguageModel, drafter: Drafter | None, rule: Rule) -> None:
    """Raise ConfigError or UnsupportedModelError if the drafter proposes trees that the rule or the target cannot use."""
    if not isinstance(drafter, ProposesTrees) or drafter.branches <= 1:
        return
    name = type(drafter).__name__
    if not rule.trees:
        text = f"verifies chains, and {name} proposes trees; use speculative, match or coupled"
        raise ConfigError(text, param="rule", value=rule.name)
    if not target.capabilities.trees:
        raise UnsupportedModelError(
            f"{name} proposes trees, and {type(target).__name__} does not support them; use a drafter of chains"
        )


class MemoryLimit:
    """Number of requests whose keys and values fit in memory at their maximum lengths.

    cached_bytes in its methods is the present size of the target's cache, and of prefixes that may be dropped. It is an argument
    and not a callback: a reference to the engine would keep the cache until the garbage collector runs.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._full_at: int | None = None
        """Number of rows at which the next request did not fit; None after a row has left."""
        self._warned = False

    def _available(self, cached_bytes: int) -> int:
        """Bytes that the target's cache may use, including those it uses already."""
        return self._target.free_bytes() + cached_bytes

    def check(self, limit: int, cached_bytes: int) -> None:
        """Raise OutOfMemoryError if a row of `limit` tokens would not fit even alone."""
        needed = self._target.cache_bytes([limit])
        available = self._available(cached_bytes) if needed else 0
        if needed > available:
            raise OutOfMemoryError(
                f"{limit} tokens of prompt and output would take {needed / 1e9:.1f} GB of keys and values, and "
                f"{available / 1e9:.1f} GB are free; request fewer with max_new_tokens, or shorten the prompt"
            )

    def missing(self, rows: Sequence[Row], cached_bytes: int) -> int:
        """Return the bytes by which rows at their maximum lengths exceed the available memory; 0 if they fit."""
        needed = self._target.cache_bytes([row.limit for row in rows])
        return max(0, needed - self._available(cached_bytes)) if needed else 0

    def row_left(self) -> None:
        """Note that a row has left, so that waiting requests are counted again."""
        self._full_at = None

    def num_fitting(self, active: Sequence[Row], waiting: Iterable[Row], count: int, cached_bytes: int) -> int:
        """Return how many of the first `count` waiting requests fit in memory together with the active rows.

        Each counts with its maximum length. A request alone is always admitted: `check` has accepted it.
        """
        if self._full_at is not None and len(active) >= self._full_at:
            return 0
        self._full_at = None
        available, limits = None, [row.limit for row in active]
        for taken, row in enumerate(itertools.islice(waiting, count)):
            limits.append(row.limit)
            needed = self._target.cache_bytes(limits)
            if not needed:
                continue
            available = self._available(cached_bytes) if available is None else available
            if needed > available and len(active) + taken > 0:
                self._warn(len(active) + taken, max(limits), available)
                self._full_at = len(active) + taken
                return taken
        return count

    def _warn(self, num_rows: int, longest: int, available: int) -> None:
        if not self._warned:
            logger.warning(
                "%d rows of up to %d tokens fill the available memory (%.1f GB); other requests wait",
                num_rows, longest, available / 1e9,
            )  # fmt: skip
        self._warned = True
