"""`foresay.load`: names and options -> a Generator.

Owns the choice of drafter, rule and length, and their change on a loaded model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast

from foresay.checks import check_flag, check_int
from foresay.decoding.protocols import Drafter, LengthPolicy, Rule
from foresay.engine.loop import MAX_BATCH_SIZE
from foresay.errors import ConfigError, UnknownNameError
from foresay.generation.generator import Generator
from foresay.lengths import ConstantLength
from foresay.models.sources.load_options import LoadKeywords, LoadOptions
from foresay.models.sources.loading import resolve
from foresay.models.sources.packaged import default_drafter
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.expressions import Call
from foresay.spec.recipe import Recipe, Resources, own_drafter_recipe
from foresay.spec.recipes import draft_model, read_drafter, read_length, read_rule
from foresay.spec.remembering import remembering
from foresay.spec.settings_file import is_settings, read_settings
from foresay.text.tokenizer import Tokenizer

DEFAULT_BATCH = 32


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
    stored = read_settings(target) if is_settings(target) else None
    given: Mapping[str, Any] = {**options}
    named = NgramRange(max_ngram, min_ngram)
    if stored is not None:
        if drafter == "auto" and draft is None and not named:
            drafter = stored.drafter or drafter
            length = stored.length if length is None and num_draft_tokens is None else length
        target, rule = stored.target_from(target), rule if rule is not None else stored.rule
        max_batch_size = stored.max_batch_size if max_batch_size is None else max_batch_size
        given = stored.filled(given)
    settings, keeps = LoadOptions(**_known(given)), _memory(draft, drafter, memory, memory_prompts)
    method = None if drafter == "auto" and draft is None and not named else _method(draft, drafter, named, keeps)
    chosen, policy = read_rule("speculative" if rule is None else rule), _policy(method, num_draft_tokens, length)
    if method is not None:
        _check_draft_weights(settings, draft, method)
    size = check_int("max_batch_size", DEFAULT_BATCH if max_batch_size is None else max_batch_size, 1, MAX_BATCH_SIZE)
    resources = Resources(_with_sampling(resolve(target, settings, tokenizer, eos_token_ids), sampling), settings)
    if method is None:
        method = _default(resources, keeps)
        _check_draft_weights(settings, draft, method)
    return _generator(resources, method, chosen, policy, size, share_prefixes)


Memory = Callable[[str], str]
"""Adds a memory to the expression of a drafter."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter's recipe, and its expression or name."""

    recipe: Recipe
    name: str


@dataclass(frozen=True, slots=True)
class NgramRange:
    """Settings of the drafter prompt_lookup; None where not given."""

    max_ngram: int | None
    min_ngram: int | None

    def given(self) -> dict[str, int]:
        """Return the settings that are given."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    def __bool__(self) -> bool:
        return bool(self.given())


def _default(resources: Resources, keeps: Memory = lambda drafter: drafter) -> Method:
    """Return the default drafter of a target."""
    expression = keeps(default_drafter(resources.target.name, resources.options, resources.has_mtp))
    return Method(read_drafter(expression), expression)


def _with_sampling(target: LoadedModel, sampling: str | None) -> LoadedModel:
    """Return a target whose generation config was checked, with the origin of sampling defaults."""
    target.generation.check(target.name)
    return dataclasses.replace(target, generation=target.generation.with_sampling(sampling))


def _memory(draft: Any, drafter: Any, memory: str | os.PathLike[str] | None, prompts: bool) -> Memory:
    """Return a function that adds the memory to an expression. Raises ConfigError for drafters that are none."""
    if memory is None:
        return lambda drafter: drafter
    if isinstance(draft, str | os.PathLike) and drafter in ("auto", "model"):
        raise ConfigError("memory= needs the draft model as an expression: drafter='model(NAME)' instead of draft=")
    if not isinstance(drafter, str) or draft is not None:
        raise ConfigError("memory= needs a drafter that is an expression, such as 'suffix'")
    folder, check = os.fspath(memory), check_flag("memory_prompts", prompts)
    return lambda drafter: remembering(drafter, folder, prompts=check)


def _check_draft_weights(settings: LoadOptions, draft: Any, method: Method) -> None:
    loads = method.recipe.loads_model or method.name == "none"
    for option in ("draft_weights", "draft_device"):
        value = getattr(settings, option)
        if value is not None and not loads:
            given = f"drafter={method.name!r}" if draft is None else "draft="
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
    method = _default(resources) if drafter == "auto" else _method(None, drafter, NgramRange(None, None))
    return _generator(
        resources,
        method,
        chosen or generator.rule,
        _policy(method.name, num_draft_tokens, length),
        max_batch_size or generator.max_batch_size,
        generator.share_prefixes,
    )


def _generator(
    resources: Resources,
    method: Method,
    rule: Rule,
    policy: LengthPolicy | None,
    size: int,
    share_prefixes: bool,
) -> Generator:
    recipe = method.recipe
    return Generator(
        resources.target,
        recipe.prepare(resources),
        rule,
        policy or (lambda rule: read_length(recipe.length(rule))),
        max_batch_size=size,
        drafter=method.name,
        resources=resources,
        forget=recipe.forget,
        share_prefixes=share_prefixes,
    )


def _method(draft: Any, drafter: Any, named: NgramRange, keeps: Memory = lambda drafter: drafter) -> Method:
    """Return the drafter that the arguments choose. Raises ConfigError where they contradict."""
    if draft is not None and drafter not in ("auto", "model"):
        raise ConfigError(
            f"drafter={drafter!r} does not use a draft model, but draft={_shown(draft)} was given; drop one"
        )
    if drafter == "model" and draft is None:
        raise ConfigError("drafter='model' needs a draft model; pass draft=")
    if named and (draft is not None or drafter not in ("auto", "prompt_lookup")):
        given = "a draft model was given" if draft is not None else f"not to drafter={drafter!r}"
        raise ConfigError(f"max_ngram and min_ngram belong to drafter='prompt_lookup', {given}")
    if isinstance(draft, str | os.PathLike):
        drafter = str(Call("model", ((None, os.fspath(draft)),)))
    elif draft is not None:
        return Method(draft_model(draft), "model")
    if drafter in ("auto", "prompt_lookup"):
        drafter = str(Call("prompt_lookup", tuple(named.given().items())))
    if isinstance(drafter, str):
        drafter = keeps(drafter)
        return Method(read_drafter(drafter), drafter)
    if hasattr(drafter, "propose") and not isinstance(drafter, type):
        return Method(own_drafter_recipe(lambda _: lambda: cast(Drafter, drafter)), type(drafter).__name__)
    if callable(drafter):
        return Method(own_drafter_recipe(lambda _: lambda: cast(Drafter, drafter())), _name_of(drafter))
    raise ConfigError(f"drafter={drafter!r} is neither a name, nor a Drafter, nor a function that makes one")


def _shown(draft: Any) -> str:
    """Return a name as it was given, and the type of anything else."""
    return repr(os.fspath(draft)) if isinstance(draft, str | os.PathLike) else f"({type(draft).__name__})"


def _name_of(maker: Any) -> str:
    return str(getattr(maker, "__name__", type(maker).__name__))


def _policy(method: Method | str | None, number: int | None, length: Any) -> LengthPolicy | None:
    """Return the requested length policy; None for the drafter's default. method: the drafter; None for the default one."""
    name = method.name if isinstance(method, Method) else method
    if number is not None and length is not None:
        raise ConfigError(f"num_draft_tokens={number} and length={length!r} contradict; give one of them")
    if name == "none" and (number or length is not None):
        given = f"num_draft_tokens={number}" if length is None else f"length={length!r}"
        raise ConfigError(f"drafter='none' drafts nothing, but {given} was given; drop one")
    if length is not None:
        return read_length(length)
    return None if number is None else ConstantLength(number)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    known = set(LoadOptions.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    return options
