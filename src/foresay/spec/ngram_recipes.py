"""Recipes of the drafters without weights. Parameters are the settings of an expression, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from foresay.checks import check_flag
from foresay.drafters import (
    MaxGram,
    Memory,
    NgramStore,
    NgramStoreDrafter,
    PromptLookup,
    SuffixDrafter,
    SuffixTreeDrafter,
)
from foresay.drafters.memory.memory import MAX_TOKENS
from foresay.errors import ConfigError
from foresay.spec.recipe import DrafterBuilder, Recipe

_KEPT_TOKENS = 1 << 18
"""Default bound on texts that a process keeps without a folder: they are indexed between two steps."""


def check_path(name: str, value: Any) -> str:
    """Return `value` if it is a string. Raises ConfigError, which names the setting."""
    if not isinstance(value, str):
        raise ConfigError("must be a name or a path", param=name, value=value)
    return value


_Lookup = partial(Recipe, has_probabilities=False)


def none() -> Recipe:
    """Plain decoding."""
    return Recipe(lambda resources: lambda: None, 0)


def prompt_lookup(max_ngram: int = 4, min_ngram: int = 2) -> Recipe:
    """Prompt lookup of the last max_ngram to min_ngram tokens."""
    make = partial(PromptLookup, max_ngram=max_ngram, min_ngram=min_ngram)
    make()
    return _Lookup(lambda resources: lambda: make(device=resources.device), 8)


def max_gram(table: str | None = None) -> Recipe:
    """The longest match of any length, then an n-gram table."""
    path = None if table is None else check_path("table", table)

    def prepare(resources: Any) -> DrafterBuilder:
        continuation = None if path is None else resources.table(path)
        return lambda: MaxGram(continuation, device=resources.device)

    return _Lookup(prepare, 10, reads_target=path is not None)


def ngram_store(
    n: int = 6,
    levels: str = "all",
    filler_top_k: int = 1,
    stop_unknown: bool = True,
    keep: bool = False,
    max_contexts: int = 1 << 18,
) -> Recipe:
    """Counts of n-grams that are learned while decoding; keep shares them between requests."""
    store = NgramStore(n, levels=levels, max_contexts=max_contexts) if check_flag("keep", keep) else None
    make = partial(
        NgramStoreDrafter,
        n,
        levels=levels,
        filler_top_k=filler_top_k,
        stop_unknown=stop_unknown,
        max_contexts=max_contexts,
    )
    make()
    forget = (lambda: None) if store is None else store.clear
    return _Lookup(lambda resources: lambda: make(store=store, device=resources.device), 8, forget)


def suffix(
    scale: float = 3.0,
    min_match: int = 1,
    keep: bool = False,
    memory: str | None = None,
    prompts: bool = True,
    max_tokens: int | None = None,
) -> Recipe:
    """The longest suffix match in the text and in earlier requests: of this process with keep, of a folder with memory."""
    make = partial(SuffixDrafter, scale=scale, min_match=min_match, prompts=check_flag("prompts", prompts))
    return _with_memory(make, keep, memory, max_tokens)


def suffix_tree(
    branches: int = 3,
    scale: float = 3.0,
    min_match: int = 1,
    keep: bool = False,
    memory: str | None = None,
    prompts: bool = True,
    max_tokens: int | None = None,
) -> Recipe:
    """A tree of continuations of the longest suffix matches."""
    make = partial(
        SuffixTreeDrafter, branches=branches, scale=scale, min_match=min_match, prompts=check_flag("prompts", prompts)
    )
    return _with_memory(make, keep, memory, max_tokens)


def _with_memory(make: Callable[..., Any], keep: bool, memory: str | None, max_tokens: int | None) -> Recipe:
    bound = (MAX_TOKENS if memory is not None else _KEPT_TOKENS) if max_tokens is None else max_tokens
    kept = Memory(max_tokens=bound)
    make(kept)
    if memory is not None:
        if check_flag("keep", keep):
            text = "and {memory} are two ways to keep requests; give one of them"
            raise ConfigError(text, param="keep", value=True, memory=memory)
        folder = check_path("memory", memory)

        def prepare(resources: Any) -> DrafterBuilder:
            shared = resources.memory(folder, bound)
            return lambda: make(shared, device=resources.device)

        return _Lookup(prepare, 12, reads_target=True)
    chosen = kept if check_flag("keep", keep) else None
    return _Lookup(lambda resources: lambda: make(chosen, device=resources.device), 12, kept.clear)
