"""A model's name, or a model object -> a LoadedModel: locate, describe, read, wrap.

Each phase is a module: location.py, describing.py, reading.py and wrapping.py.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.files import fingerprint
from foresay.models.cache.memory import trim
from foresay.models.gguf.vocabulary import read_vocabulary
from foresay.models.huggingface import linears
from foresay.models.sources.describing import describe
from foresay.models.sources.llama_cpp import open_gguf
from foresay.models.sources.load_options import LLAMA_CPP, LoadOptions
from foresay.models.sources.location import Location, is_gguf, locate
from foresay.models.sources.lora import adapters, digest
from foresay.models.sources.reading import read, read_tokenizer, settings_of
from foresay.models.sources.transformers_errors import load_errors
from foresay.models.sources.wrapping import LoadedModel, check_scores, wrap
from foresay.text.tokenizer import Tokenizer


def resolve(
    source: Any,
    options: LoadOptions,
    tokenizer: Tokenizer | None,
    eos_token_ids: int | Iterable[int] | None = None,
    *,
    sampling: str | None = None,
) -> LoadedModel:
    """Return a LoadedModel of a name, a transformers model, a LanguageModel or a LoadedModel.

    eos_token_ids: replace those of the model or its tokenizer. sampling: origin of sampling defaults. Raises ConfigError for a
    source of another type, for options with a model that is already loaded, and for end tokens outside the vocabulary;
    ModelNotFoundError, ModelLoadError and UnsupportedModelError as `load_model` and `wrap` do.
    """
    is_name = isinstance(source, str | os.PathLike)
    if not is_name and (given := options.changed()):
        raise ConfigError(f"is for a model that is loaded by name, not for a {type(source).__name__}", param=given)
    loaded = load_model(source, options) if is_name else _loaded(source, tokenizer)
    changes: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
    if eos_token_ids is not None:
        ids = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
        last = loaded.model.vocab_size - 1
        changes["eos_token_ids"] = frozenset(check_int("eos_token_ids", one, 0, last) for one in ids)
    if sampling is not None:
        changes["generation"] = loaded.generation.with_sampling(sampling)
    return dataclasses.replace(loaded, **changes)


def _loaded(source: Any, tokenizer: Tokenizer | None) -> LoadedModel:
    """Return the LoadedModel of a model object."""
    if isinstance(source, LoadedModel):
        return source
    if hasattr(source, "forward") and hasattr(source, "new_cache"):
        end = getattr(tokenizer, "eos_token_id", None)
        ends = frozenset() if end is None else frozenset([int(end)])
        return LoadedModel(type(source).__name__, source, tokenizer, ends)
    if hasattr(source, "config") and hasattr(source, "get_input_embeddings"):
        return wrap(type(source).__name__, source, tokenizer, optimise=False)
    raise ConfigError("is neither a name nor a transformers model", param="source", value=type(source).__name__)


def load_model(name: str | os.PathLike[str], options: LoadOptions | None = None) -> LoadedModel:
    """Load a model by alias, hub id, local folder or GGUF file.

    Raises ModelNotFoundError if there is no such model, ModelLoadError if its files cannot be read or lack weights, and
    UnsupportedModelError if it cannot be decoded exactly; never transformers' own errors. The generation config is checked where
    a model becomes a target.
    """
    options = options or LoadOptions()
    if options.backend == LLAMA_CPP and not is_gguf(name):
        text = "reads GGUF files, and {model} is not one; drop it, or give such a file"
        raise ConfigError(text, param="backend", value=LLAMA_CPP, model=os.fspath(name))
    found = adapters(options.lora)
    location = locate(name, options)
    if options.backend == LLAMA_CPP:
        return _load_llama_cpp(location, options)
    with _without_collections():
        loaded = _load(location, options)
    model: Any = loaded.model
    model.learned += digest(found)
    return loaded


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
    with load_errors(location.name, location.is_conversion):
        described = describe(location, options)
        weights, tokenizer = read(described, options)
        has_format = described.is_ours or options.bits is not None or linears.has_products(weights)
        loaded = wrap(location.name, weights, tokenizer, optimise=True, options=options)
        check_scores(location.name, loaded.model)
    model: Any = loaded.model
    model.learned = _learned(location, model)
    trim()  # memory of the weights before they were packed
    return dataclasses.replace(loaded, weights=described.weights if has_format else "")


def _learned(location: Location, model: Any) -> bytes:
    """Return the digest of a model's weights: of its files, or the hub's name of their version."""
    if location.header is not None:
        return fingerprint(location.header.path)
    if location.is_local:
        return fingerprint(location.folder)
    config = getattr(getattr(model, "model", None), "config", None)
    return str(getattr(config, "_commit_hash", "")).encode()


def _load_llama_cpp(location: Location, options: LoadOptions) -> LoadedModel:
    assert location.header is not None
    model: Any = open_gguf(location.header, options)
    model.learned = fingerprint(location.header.path)
    with load_errors(location.name, False):
        tokenizer, vocabulary = read_tokenizer(location, options), read_vocabulary(location.header)
    assert vocabulary is not None  # else it has no tokenizer
    ends, settings = frozenset(vocabulary.ends), settings_of(location.header)
    return LoadedModel(location.name, model, tokenizer, ends, weights="llama.cpp", generation=settings)


def load_weights(name: str | os.PathLike[str], options: LoadOptions | None = None) -> tuple[Any, Any]:
    """Load transformers' own model and its tokenizer, without foresay's changes: to be pruned, trained or saved.

    Raises as `load_model` does; weights="int8" and "int4" are refused.
    """
    options = options or LoadOptions()
    if options.bits is not None:
        raise ConfigError("are for decoding only; leave it out", param="weights", value=options.weights)
    if options.activations != "auto":
        raise ConfigError("is for decoding only; leave it out", param="activations", value=options.activations)
    location = locate(name, options)
    with load_errors(location.name, location.is_conversion):
        return read(describe(location, options, for_decoding=False), options)


def load_tokenizer(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Any:
    """Load a model's tokenizer without its weights, by the names of `load_model`; a folder may contain nothing else.

    Only the options revision, trust_remote_code and progress apply. Raises as `load_model` does.
    """
    options = options or LoadOptions()
    location = locate(name, options, weights=False)
    with _without_collections(), load_errors(location.name, location.is_conversion):
        return read_tokenizer(location, options)
