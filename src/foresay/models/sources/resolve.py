"""A name, a transformers model, a LanguageModel or a LoadedModel -> a LoadedModel.

Does not know where files are (location.py), nor whether two models share a vocabulary (text/tokenizer.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.wrapping import LoadedModel, wrap
from foresay.text.tokenizer import Tokenizer


def resolve(
    source: Any, options: LoadOptions, tokenizer: Tokenizer | None, eos_token_ids: int | Iterable[int] | None = None
) -> LoadedModel:
    """Return a LoadedModel of a name, a transformers model, a LanguageModel or a LoadedModel.

    eos_token_ids: replace those of the model or its tokenizer. Raises ConfigError for a source of another type, for options
    with a model that is already loaded, and for end tokens outside the vocabulary; ModelNotFoundError, ModelLoadError and
    UnsupportedModelError as `load_model` and `wrap` do.
    """
    found = _resolve(source, options, tokenizer)
    if eos_token_ids is None:
        return found
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    ends = frozenset(check_int("eos_token_ids", one, 0, found.model.vocab_size - 1) for one in ids)
    return dataclasses.replace(found, eos_token_ids=ends)


def _resolve(source: Any, options: LoadOptions, tokenizer: Tokenizer | None) -> LoadedModel:
    if isinstance(source, str | os.PathLike):
        source = load_model(source, options)
    elif options != LoadOptions():
        raise ConfigError(
            f"{_given(options)} apply to a model that is loaded by name, not to a {type(source).__name__}"
        )
    if isinstance(source, LoadedModel):
        return source if tokenizer is None else dataclasses.replace(source, tokenizer=tokenizer)
    if hasattr(source, "forward") and hasattr(source, "new_cache"):
        end = getattr(tokenizer, "eos_token_id", None)
        return LoadedModel(
            type(source).__name__, source, tokenizer, frozenset() if end is None else frozenset([int(end)])
        )
    if hasattr(source, "config") and hasattr(source, "get_input_embeddings"):
        return wrap(type(source).__name__, source, tokenizer, optimise=False)
    raise ConfigError(f"a model of type {type(source).__name__} is neither a name nor a transformers model")


def _given(options: LoadOptions) -> str:
    default = LoadOptions()
    return ", ".join(
        f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(default, f.name)
    )
