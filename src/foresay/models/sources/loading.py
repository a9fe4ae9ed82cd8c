"""A model's name, or a model object -> a LoadedModel: locate, describe, read, wrap.

location.py finds the Source of a name: folder.py or gguf_file.py, which describe and read it. wrapping.py does the rest.
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
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.location import locate
from foresay.models.sources.lora import adapters
from foresay.models.sources.transformers_errors import load_errors
from foresay.models.sources.wrapping import LoadedModel, wrap
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
    adapters(options.lora)  # which may not exist
    source = locate(name, options)
    with _without_collections(), load_errors(source.name, source.is_conversion):
        return source.load(options)


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


def load_weights(name: str | os.PathLike[str], options: LoadOptions | None = None) -> tuple[Any, Any]:
    """Load transformers' own model and its tokenizer, without foresay's changes: to be pruned, trained or saved.

    Raises as `load_model` does; weights="int8" and "int4" are refused.
    """
    options = options or LoadOptions()
    if options.bits is not None:
        raise ConfigError("are for decoding only; leave it out", param="weights", value=options.weights)
    if options.activations != "auto":
        raise ConfigError("is for decoding only; leave it out", param="activations", value=options.activations)
    source = locate(name, options)
    with load_errors(source.name, source.is_conversion):
        return source.read(source.describe(options, for_decoding=False), options)


def load_tokenizer(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Any:
    """Load a model's tokenizer without its weights, by the names of `load_model`; a folder may contain nothing else.

    Only the options revision, trust_remote_code and progress apply. Raises as `load_model` does.
    """
    options = options or LoadOptions()
    source = locate(name, options, weights=False)
    with _without_collections(), load_errors(source.name, source.is_conversion):
        return source.tokenizer(options, required=True)
