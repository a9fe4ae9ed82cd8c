"""A model's name -> weights and tokenizer: locate, read, wrap.

Each function resolves a name once (location.py), reads its files once (reading.py) and builds once (wrapping.py).
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foresay.errors import ConfigError
from foresay.models.cache.memory import trim
from foresay.models.gguf.vocabulary import read_vocabulary
from foresay.models.sources.llama_cpp import open_gguf
from foresay.models.sources.load_options import LLAMA_CPP, LoadOptions
from foresay.models.sources.location import Location, is_gguf, locate
from foresay.models.sources.reading import (
    check_configuration,
    decoding_dtype,
    dtype_of,
    has_config,
    read_blocks,
    read_tokenizer,
    read_weights,
)
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers
from foresay.models.sources.wrapping import LoadedModel, check_scores, wrap


def load_model(name: str | os.PathLike[str], options: LoadOptions | None = None) -> LoadedModel:
    """Load a model by alias, hub id, local folder or GGUF file.

    Raises ModelNotFoundError if there is no such model, ModelLoadError if its files cannot be read or lack weights, and
    UnsupportedModelError if it cannot be decoded exactly; never transformers' own errors. The generation config is checked where
    a model becomes a target.
    """
    options = options or LoadOptions()
    if options.backend == LLAMA_CPP and not is_gguf(name):
        given = os.fspath(name)
        raise ConfigError(
            f"backend='llama.cpp' reads GGUF files, and {given!r} is not one; drop it, or give such a file"
        )
    location = locate(name, options)
    if options.backend == LLAMA_CPP:
        return _load_llama_cpp(location, options)
    with _without_collections():
        return _load(location, options)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause garbage collection: loading creates a million objects, and hardly any garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load(location: Location, options: LoadOptions) -> LoadedModel:
    device = options.computes_on
    with quiet_transformers(), load_errors(location.name, location.is_conversion):
        found, weights_format = read_blocks(location, options, device), "GGUF"
        if found is None:
            check_configuration(location, options)
            found = read_weights(location, options, decoding_dtype(location, options, device), device)
            weights_format = "" if options.bits is None else options.weights
    with load_errors(location.name, location.is_conversion):
        formats = {"activations": options.activations, "kv_cache_dtype": options.kv_cache_dtype}
        loaded = wrap(location.name, *found, optimise=True, bits=options.bits, **formats)
        check_scores(location.name, loaded.model)
    trim()  # memory of the weights before they were packed
    return dataclasses.replace(loaded, weights=weights_format)


def _load_llama_cpp(location: Location, options: LoadOptions) -> LoadedModel:
    assert location.header is not None
    model = open_gguf(location.header, options)
    with quiet_transformers(), load_errors(location.name, False):
        tokenizer, vocabulary = read_tokenizer(location, options), read_vocabulary(location.header)
    assert vocabulary is not None  # else it has no tokenizer
    return LoadedModel(location.name, model, tokenizer, frozenset(vocabulary.ends), weights="llama.cpp")


def load_weights(name: str | os.PathLike[str], options: LoadOptions | None = None) -> tuple[Any, Any]:
    """Load transformers' own model and its tokenizer, without foresay's changes: to be pruned, trained or saved.

    Raises as `load_model` does; weights="int8" and "int4" are refused.
    """
    options = options or LoadOptions()
    if options.bits is not None:
        raise ConfigError(f"weights={options.weights!r} are for decoding only; leave it out")
    if options.activations != "auto":
        raise ConfigError(f"activations={options.activations!r} is for decoding only; leave it out")
    location, device = locate(name, options), options.computes_on
    with quiet_transformers(), load_errors(location.name, location.is_conversion):
        check_configuration(location, options)
        return read_weights(location, options, dtype_of(options, device), device)


def load_tokenizer(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Any:
    """Load a model's tokenizer without its weights, by the names of `load_model`; a folder may contain nothing else.

    Only the options revision, trust_remote_code and progress apply. Raises as `load_model` does.
    """
    options = options or LoadOptions()
    location = locate(name, options, weights=False)
    with _without_collections(), quiet_transformers(), load_errors(location.name, location.is_conversion):
        if has_config(location):
            check_configuration(location, options)
        return read_tokenizer(location, options)
