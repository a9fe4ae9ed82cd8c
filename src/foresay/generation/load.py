"""`foresay.load`: names and options -> a Generator.

Owns the choice of drafter, rule and length, and their change on a loaded model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Unpack, cast

from foresay.checks import check_flag, check_int
from foresay.decoding.protocols import Drafter, LengthPolicy, Rule
from foresay.engine.loop import MAX_BATCH_SIZE
from foresay.errors import ConfigError, UnknownNameError
from foresay.generation.generator import Generator
from foresay.lengths import ConstantLength
from foresay.models.sources.load_options import LoadKeywords, LoadOptions
from foresay.models.sources.packaged import default_drafter
from foresay.models.sources.resolve import resolve
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.expressions import Call
from foresay.spec.recipe import Recipe, Resources, own_drafter_recipe
from foresay.spec.recipes import DRAFTERS, draft_model, read_drafter, read_length, read_rule
from foresay.spec.remembering import remembering
from foresay.spec.settings_file import is_settings, read_settings
from foresay.text.tokenizer import Tokenizer

DEFAULT_BATCH = 32
WITH_MTP = "hybrid(suffix, mtp)"
"""Default drafter of a target whose checkpoint has multi-token-prediction layers."""


def load(
    target: Any,
    draft: Any = None,
    *,
    drafter: str | Drafter | Callable[[], Drafter] = "auto",
    num_draft_tokens: int | None = None,
    length: str | int | LengthPolicy | None = None,
    rule: str | Rule | None = None,
    max_batch_size: int | None = None,
    max_ngram: int | None = None,
    min_ngram: int | None = None,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    share_prefixes: bool = True,
    memory: str | os.PathLike[str] | None = None,
    memory_prompts: bool = True,
    sampling: str | None = None,
    **options: Unpack[LoadKeywords],
) -> Generator:
    """Load a target model with its drafter.

    target, draft: an alias (`foresay info` lists them), a hub id, a folder, a GGUF file, or a transformers model (with
    `tokenizer`). A target may also be a settings file (foresay.toml of `foresay tune`); arguments given here replace its values.
    drafter: "auto" (the draft model if one is given, else "suffix", before the target's packaged head or MTP layer if any),
    an expression like "max_gram" or "cascade(model=A, max_gram; k=[[5, 10], [0, 10]])", a Drafter, or a function that makes one.
    num_draft_tokens: draft tokens per pass; 0 is plain decoding. length: instead, a policy such as "heuristic". By default
    lengths adapt to throughput unless that changes the text of a seed, as for rows sampled with a draft model or lossy rules.
    rule: "speculative" (default), "block", "match", "coupled", or a lossy one, "lenience(2)" or "typical".
    max_batch_size: maximum number of rows decoded at once, by default 32. eos_token_ids: by default the model's.
    share_prefixes: copy keys and values of common prefixes instead of prefilling them (the same bits).
    memory: a folder, created if missing, that keeps outputs, and prompts if memory_prompts; the drafter also copies from them.
    sampling: defaults of parameters that a request leaves out: "foresay" (greedy, the default) or "model", those of the model's
    generation config. That config's constraints, such as a repetition penalty, always apply, as in transformers' `generate`.
    options: fields of LoadOptions, for target and draft alike.

    Raises ConfigError for wrong or contradicting arguments, ModelNotFoundError, ModelLoadError and UnsupportedModelError for the
    models, and VocabularyMismatchError for a draft model with other tokens.
    """
    ngrams = {k: v for k, v in (("max_ngram", max_ngram), ("min_ngram", min_ngram)) if v is not None}
    given: dict[str, Any] = {**options}
    if is_settings(target):
        stored = read_settings(target)
        if drafter == "auto" and draft is None and not ngrams:
            drafter = stored.drafter or drafter
            length = stored.length if length is None and num_draft_tokens is None else length
        target, rule = stored.target_from(target), rule if rule is not None else stored.rule
        max_batch_size = stored.max_batch_size if max_batch_size is None else max_batch_size
        given = stored.filled(given)
    settings = LoadOptions(**_known(given))
    is_auto = drafter == "auto" and draft is None and not ngrams
    drafter = default_drafter(target, settings) if is_auto else drafter
    drafter = drafter if memory is None else _remembering(draft, drafter, os.fspath(memory), memory_prompts)
    recipe, name = _recipe(draft, drafter, ngrams)
    chosen = read_rule("speculative" if rule is None else rule)
    policy = _policy(name, num_draft_tokens, length)
    _check_draft_weights(settings, draft, recipe, name)
    size = check_int("max_batch_size", DEFAULT_BATCH if max_batch_size is None else max_batch_size, 1, MAX_BATCH_SIZE)
    resources = Resources(_with_sampling(resolve(target, settings, tokenizer, eos_token_ids), sampling), settings)
    if is_auto and drafter == "suffix" and resources.has_mtp():
        recipe, name = _recipe(None, WITH_MTP, {})
        policy = _policy(name, num_draft_tokens, length)
    recipe, name = _draft_recipe(draft, name) if recipe is None else (recipe, name)
    return _generator(resources, recipe, name, chosen, policy, size, share_prefixes)


def _with_sampling(target: LoadedModel, sampling: str | None) -> LoadedModel:
    """Return a target whose generation config was checked, with the origin of sampling defaults."""
    target.generation.check(target.name)
    return dataclasses.replace(target, generation=target.generation.with_sampling(sampling))


def _remembering(draft: Any, drafter: Any, memory: str, prompts: bool) -> str:
    if isinstance(draft, str | os.PathLike) and drafter in ("auto", "model"):
        raise ConfigError("memory= needs the draft model as an expression: drafter='model(NAME)' instead of draft=")
    if not isinstance(drafter, str) or draft is not None:
        raise ConfigError("memory= needs a drafter that is an expression, such as 'suffix'")
    return remembering(
        "suffix" if drafter == "auto" else drafter, memory, prompts=check_flag("memory_prompts", prompts)
    )


def _draft_recipe(draft: Any, name: str) -> tuple[Recipe, str]:
    """Return the recipe and name of a draft model that is given by name, or loaded already."""
    if isinstance(draft, str | os.PathLike):
        return DRAFTERS["model"].make(os.fspath(draft)), str(Call("model", ((None, os.fspath(draft)),)))
    return draft_model(resolve(draft, LoadOptions(), None)), name


def _check_draft_weights(settings: LoadOptions, draft: Any, recipe: Recipe | None, name: str) -> None:
    loads = isinstance(draft, str | os.PathLike) if recipe is None else recipe.loads_model or name == "none"
    for option in ("draft_weights", "draft_device"):
        value = getattr(settings, option)
        if value is not None and not loads:
            given = f"drafter={name!r}" if draft is None else "draft="
            raise ConfigError(f"{option}={value!r} is for a draft model that is loaded by name, and {given} is none")


def change(
    generator: Generator,
    *,
    drafter: str | Drafter | Callable[[], Drafter] | None = None,
    num_draft_tokens: int | None = None,
    length: str | int | LengthPolicy | None = None,
    rule: str | Rule | None = None,
    max_batch_size: int | None = None,
) -> Generator:
    """Return a Generator over the same weights with some settings changed. Arguments as in `load`; None keeps a setting.

    A changed drafter uses its default length unless one is given.
    """
    resources = generator.resources
    if resources is None:
        raise ConfigError("this Generator was not made by foresay.load; make another instead of changing it")
    chosen = None if rule is None else read_rule(rule)
    if max_batch_size is not None:
        check_int("max_batch_size", max_batch_size, 1, MAX_BATCH_SIZE)
    if drafter is None:
        given = num_draft_tokens is not None or length is not None
        policy = _policy(generator.drafter_name, num_draft_tokens, length) if given else None
        return generator.with_settings(rule=chosen, policy=policy, max_batch_size=max_batch_size)
    if drafter == "auto":
        drafter = default_drafter(resources.target.name, resources.options)
        drafter = WITH_MTP if drafter == "suffix" and resources.has_mtp() else drafter
    recipe, name = _recipe(None, drafter, {})
    assert recipe is not None
    policy = _policy(name, num_draft_tokens, length)
    return _generator(
        resources,
        recipe,
        name,
        chosen or generator.rule,
        policy,
        max_batch_size or generator.max_batch_size,
        generator.share_prefixes,
    )


def _generator(
    resources: Resources,
    recipe: Recipe,
    name: str,
    rule: Rule,
    policy: LengthPolicy | None,
    size: int,
    share_prefixes: bool,
) -> Generator:
    build = recipe.prepare(resources)

    def own_length(rule: Rule) -> LengthPolicy:
        return read_length(recipe.length(rule))

    return Generator(
        resources.target,
        build,
        rule,
        policy or own_length,
        max_batch_size=size,
        drafter=name,
        resources=resources,
        forget=recipe.forget,
        share_prefixes=share_prefixes,
    )


def _recipe(draft: Any, drafter: Any, ngrams: dict[str, int]) -> tuple[Recipe | None, str]:
    """Return the recipe and its name; no recipe for a draft model that is not loaded yet."""
    if draft is not None and drafter not in ("auto", "model"):
        raise ConfigError(
            f"drafter={drafter!r} does not use a draft model, but draft={_shown(draft)} was given; drop one"
        )
    if drafter == "model" and draft is None:
        raise ConfigError("drafter='model' needs a draft model; pass draft=")
    if ngrams and (draft is not None or drafter not in ("auto", "prompt_lookup")):
        given = "a draft model was given" if draft is not None else f"not to drafter={drafter!r}"
        raise ConfigError(f"max_ngram and min_ngram belong to drafter='prompt_lookup', {given}")
    if draft is not None:
        return None, "model"
    if drafter == "auto" and not ngrams:
        drafter = "suffix"
    if drafter in ("auto", "prompt_lookup"):
        call = Call("prompt_lookup", tuple(ngrams.items()))
        return DRAFTERS["prompt_lookup"].make(**ngrams), str(call)
    if isinstance(drafter, str):
        return read_drafter(drafter), drafter
    if hasattr(drafter, "propose") and not isinstance(drafter, type):
        return own_drafter_recipe(lambda _: lambda: cast(Drafter, drafter)), type(drafter).__name__
    if callable(drafter):
        return own_drafter_recipe(lambda _: lambda: cast(Drafter, drafter())), _name_of(drafter)
    raise ConfigError(f"drafter={drafter!r} is neither a name, nor a Drafter, nor a function that makes one")


def _shown(draft: Any) -> str:
    """Return a name as it was given, and the type of anything else."""
    return repr(os.fspath(draft)) if isinstance(draft, str | os.PathLike) else f"({type(draft).__name__})"


def _name_of(maker: Any) -> str:
    return str(getattr(maker, "__name__", type(maker).__name__))


def _policy(name: str, number: int | None, length: Any) -> LengthPolicy | None:
    """Return the requested length policy; None for the drafter's default."""
    if number is not None and length is not None:
        raise ConfigError(f"num_draft_tokens={number} and length={length!r} contradict; give one of them")
    if name == "none" and (number or length is not None):
        given = f"num_draft_tokens={number}" if length is None else f"length={length!r}"
        raise ConfigError(f"drafter='none' drafts nothing, but {given} was given; drop one")
    if length is not None:
        return read_length(length)
    return None if number is None else ConstantLength(number)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    known = set(LoadOptions.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    return options
