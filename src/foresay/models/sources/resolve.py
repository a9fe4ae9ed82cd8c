"""What a caller may pass as a model, and whether two models share their tokens."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from foresay.errors import ConfigError, VocabularyMismatchError
from foresay.models.sources.catalog import LoadedModel, load_model, wrap
from foresay.models.sources.load_options import LoadOptions

_SAMPLE = "def add(a, b):\n\treturn a + b  # 12 345.678\nIt's 9 o'clock — naïve café, 東京! <|im_start|> [INST] </s>"


def resolve(source: Any, options: LoadOptions, tokenizer: Any) -> LoadedModel:
    """A LoadedModel from a name, a transformers model, a LanguageModel or a LoadedModel."""
    if isinstance(source, str | os.PathLike):
        source = load_model(source, options)
    elif options != LoadOptions():
        raise ConfigError(
            f"{_given(options)} apply to a model that is loaded by name, not to a {type(source).__name__}"
        )
    if isinstance(source, LoadedModel):
        return source if tokenizer is None else dataclasses.replace(source, tokenizer=tokenizer)
    if hasattr(source, "forward") and hasattr(source, "new_cache"):
        return LoadedModel(type(source).__name__, source, tokenizer, frozenset())
    if hasattr(source, "config") and hasattr(source, "get_input_embeddings"):
        return wrap(type(source).__name__, source, tokenizer, optimise=False)
    raise ConfigError(f"a model of type {type(source).__name__} is neither a name nor a transformers model")


def _given(options: LoadOptions) -> str:
    default = LoadOptions()
    return ", ".join(
        f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(default, f.name)
    )


def check_vocabularies(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise VocabularyMismatchError when the same id or text means different tokens to target and draft.

    Embeddings may be padded to different sizes; the ids that both tokenizers name must agree.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return
    ours = {i: token for token, i in target.tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in draft.tokenizer.get_vocab().items()}
    advice = "a draft must share the target's tokenizer"
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            raise VocabularyMismatchError(
                f"token {i} is {ours[i]!r} to the target {target.name!r} and {theirs[i]!r} to the draft {draft.name!r}; {advice}"
            )
    common = len(ours.keys() & theirs.keys())
    if common < 0.9 * max(len(ours), len(theirs)):
        raise VocabularyMismatchError(
            f"the target {target.name!r} names {len(ours)} tokens, the draft {draft.name!r} {len(theirs)}; {advice}"
        )
    a, b = target.tokenizer(_SAMPLE).input_ids, draft.tokenizer(_SAMPLE).input_ids
    if a != b:
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        raise VocabularyMismatchError(
            f"the tokenizers of {target.name!r} and {draft.name!r} split the same text differently from token {place} on "
            f"({a[place : place + 3]} against {b[place : place + 3]}); {advice}"
        )
