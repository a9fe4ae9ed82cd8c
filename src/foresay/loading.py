"""`foresay.load`: names and options to a Generator.

Owns the choice of drafter and the check that target and draft share their tokens.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from foresay.acceptance import make_rule
from foresay.core import Drafter
from foresay.drafters import ModelDrafter, PromptLookup
from foresay.engine.loop import check_batch_size
from foresay.errors import ConfigError, UnknownNameError, VocabularyMismatchError
from foresay.generator import DrafterBuilder, Generator
from foresay.lengths import ConstantLength
from foresay.models.catalog import LoadedModel, load_model, wrap
from foresay.models.options import LoadOptions

if TYPE_CHECKING:
    pass

DRAFTERS = ("auto", "none", "model", "prompt_lookup")
DEFAULT_LENGTH = {"none": 0, "model": 5, "prompt_lookup": 8}
_SAMPLE = "def add(a, b):\n\treturn a + b  # 12 345.678\nIt's 9 o'clock — naïve café, 東京! <|im_start|> [INST] </s>"

ModelSource = "str | os.PathLike[str] | PreTrainedModel | LoadedModel"


def load(
    target: Any,
    draft: Any = None,
    *,
    drafter: str | Drafter | Callable[[], Drafter] = "auto",
    num_draft_tokens: int | None = None,
    rule: str = "speculative",
    max_batch_size: int = 32,
    max_ngram: int | None = None,
    min_ngram: int | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Generator:
    """Load a target, and what drafts for it.

    target, draft: an alias (`foresay models` lists them), a hub id, a folder, a GGUF file, or a transformers model
    (with `tokenizer`). drafter: "auto" (the draft model when one is given, else prompt lookup), "none", "model",
    "prompt_lookup", a Drafter, or a function that makes one. num_draft_tokens: tokens guessed per pass, 0 is plain
    decoding. rule: "speculative", "block", "match" or "coupled". options: fields of LoadOptions (dtype, device,
    device_map, max_memory, quantization_config, tp_plan, revision, trust_remote_code), for target and draft alike.
    """
    if isinstance(drafter, str) and drafter not in DRAFTERS:
        raise UnknownNameError("drafter", drafter, DRAFTERS)
    if draft is not None and drafter not in ("auto", "model"):
        raise ConfigError(
            f"drafter={drafter!r} does not use a draft model, but draft={str(draft)!r} was given; drop one"
        )
    if drafter == "model" and draft is None:
        raise ConfigError("drafter='model' needs a draft model; pass draft=")
    if drafter != "prompt_lookup" and drafter != "auto" and (max_ngram, min_ngram) != (None, None):
        raise ConfigError(f"max_ngram and min_ngram belong to drafter='prompt_lookup', not to drafter={drafter!r}")
    kind = ("model" if draft is not None else "prompt_lookup") if drafter == "auto" else drafter
    if kind == "model" and (max_ngram, min_ngram) != (None, None):
        raise ConfigError("max_ngram and min_ngram belong to drafter='prompt_lookup', and a draft model was given")
    if kind == "none" and num_draft_tokens:
        raise ConfigError(f"drafter='none' drafts nothing, but num_draft_tokens={num_draft_tokens} was given; drop one")
    chosen = make_rule(rule)
    length = num_draft_tokens if num_draft_tokens is not None else DEFAULT_LENGTH.get(str(kind), 5)
    policy = ConstantLength(length)
    given: dict[str, Any] = {"max_ngram": max_ngram, "min_ngram": min_ngram}
    ngrams = {key: value for key, value in given.items() if value is not None}
    if kind == "prompt_lookup":
        PromptLookup(**ngrams)  # a bad n-gram range must fail before the weights are read
    settings = LoadOptions(**_known(options))
    check_batch_size(max_batch_size)
    loaded = resolve(target, settings, tokenizer)
    # a revision names one repository's version: the target's
    assistant = resolve(draft, dataclasses.replace(settings, revision=None), None) if draft is not None else None
    if assistant is not None:
        check_vocabularies(loaded, assistant)
    return Generator(
        loaded,
        _builder(kind, loaded, assistant, ngrams),
        chosen,
        policy,
        max_batch_size=max_batch_size,
        description=f"target={loaded.name} drafter={kind if isinstance(kind, str) else type(kind).__name__} "
        f"gamma={length} rule={rule}",
    )


def _known(options: dict[str, Any]) -> dict[str, Any]:
    known = set(LoadOptions.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    return options


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


def _builder(kind: Any, target: LoadedModel, draft: LoadedModel | None, ngrams: dict[str, Any]) -> DrafterBuilder:
    if kind == "none":
        return lambda: None
    if kind == "prompt_lookup":
        return lambda: PromptLookup(**ngrams, device=target.model.device)
    if kind == "model":
        assert draft is not None
        return lambda: ModelDrafter(draft.model, target.model.vocab_size)
    if hasattr(kind, "propose"):
        return lambda: kind
    if callable(kind):
        return lambda: cast(Drafter, kind())
    raise ConfigError(f"drafter={kind!r} is neither a name, nor a Drafter, nor a function that makes one")


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
