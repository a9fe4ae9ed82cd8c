"""`foresay.load`: names and options -> a Generator.

Owns the choice of drafter, rule and length, and their change on a loaded model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast

from foresay.checks import check_flag, check_has, check_int
from foresay.decoding.protocols import Drafter, LengthPolicy, Rule
from foresay.engine.loop import MAX_BATCH_SIZE
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.kept_prompts import KeptPrompts, keeping
from foresay.lengths import LENGTHS, ConstantLength
from foresay.models.sources.catalogue import PUBLISHED, published_drafter
from foresay.models.sources.generation_settings import GenerationSettings
from foresay.models.sources.load_options import LoadKeywords, LoadOptions
from foresay.models.sources.loading import resolve
from foresay.models.sources.location import find
from foresay.models.sources.packaged import default_drafter
from foresay.spec.expressions import Call, parse, to_expression
from foresay.spec.recipe import Recipe, Resources, own_drafter_recipe
from foresay.spec.recipes import DRAFTERS, draft_model, read_drafter, read_length, read_rule
from foresay.spec.remembering import remembering
from foresay.spec.settings_file import Settings, is_settings, read_settings
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
    keep_prompts: str | os.PathLike[str] | None = None,
    keep_prompts_gb: float = 10.0,
    sampling: str | None = None,
    **options: Unpack[LoadKeywords],
) -> Generator:
    """Load a target model with its drafter.

    Args:
        target: An alias (`foresay info` lists them), a hub id, a folder, a GGUF file, or a transformers model (with `tokenizer`).
            Also a settings file (foresay.toml of `foresay tune`), or what one contains as Settings; arguments given here
            replace its values.
        draft: A draft model, named like a target.
        drafter: "auto": the draft model if one is given, else "suffix", before the target's packaged head or MTP layer if any.
            "published": the best known draft of the target that others published (`foresay drafts` lists them). Or an
            expression like "max_gram" or "cascade(model=A, max_gram; k=[[5, 10], [0, 10]])", a Drafter, or a function that makes
            one.
        num_draft_tokens: Draft tokens per pass; 0 is plain decoding. By default lengths adapt to throughput unless that changes
            the text of a seed, as for rows sampled with a draft model or lossy rules.
        length: Instead of `num_draft_tokens`, a length policy such as "heuristic".
        rule: "speculative" (default), "block", "match", "coupled", or a lossy one, "lenience(2)" or "typical".
        max_batch_size: Maximum number of rows decoded at once, by default 32.
        max_ngram: Length of the longest n-gram that drafter="prompt_lookup" searches for.
        min_ngram: Length of the shortest n-gram that drafter="prompt_lookup" searches for.
        tokenizer: The target's tokenizer; by default the one in its files.
        eos_token_ids: Tokens that end an output; by default the model's.
        share_prefixes: Copy keys and values of common prefixes instead of prefilling them (the same bits).
        memory: A folder, created if missing, that keeps outputs; the drafter also copies from them.
        memory_prompts: Keep prompts in `memory` too.
        keep_prompts: A folder, created if missing, that keeps the keys and values of beginnings of prompts that are used twice,
            or that a request names (`keep_prompt`): a later process copies them instead of prefilling them (the same bits).
        keep_prompts_gb: Gigabytes that the folder may take; the least recently used files are removed.
        sampling: Defaults of parameters that a request leaves out: "foresay" (greedy, the default) or "model", those of the
            model's generation config. That config's constraints, such as a repetition penalty, always apply, as in
            transformers' `generate`.
        **options: Fields of LoadOptions, for target and draft alike.

    Raises:
        ConfigError: Wrong or contradicting arguments.
        ModelNotFoundError: No model has that name or path.
        ModelLoadError: The model's files cannot be read.
        UnsupportedModelError: The model cannot be decoded exactly.
        VocabularyMismatchError: The draft model has other tokens.
    """
    asked = Arguments(
        draft=draft,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        length=length,
        rule=rule,
        max_batch_size=max_batch_size,
        ngrams={k: v for k, v in (("max_ngram", max_ngram), ("min_ngram", min_ngram)) if v is not None},
        memory=memory,
        memory_prompts=check_flag("memory_prompts", memory_prompts),
        options=dict(options),
    )
    check_has("tokenizer", tokenizer, "__call__", "a tokenizer")
    check_has("progress", options.get("progress"), "__call__", "a function of a text")
    check_flag("trust_remote_code", options.get("trust_remote_code", False))
    if not isinstance(eos_token_ids, int | Iterable | None):
        raise ConfigError("must be a token id, or several", param="eos_token_ids", value=eos_token_ids)
    if isinstance(target, Settings):
        target, asked = target.target, asked.filled(target)
    elif is_settings(target):
        stored = read_settings(target)
        target, asked = stored.target_from(target), asked.filled(stored)
    chosen = asked.with_published(target).chosen()
    loaded = resolve(target, chosen.options, tokenizer, eos_token_ids, sampling=sampling)
    loaded.generation.check(loaded.name)
    kept = None
    if keep_prompts is not None:
        kept = keeping(loaded, keep_prompts, keep_prompts_gb, share_prefixes=share_prefixes)
    return chosen.generator(Resources(loaded, chosen.options), share_prefixes, kept)


def check_model(settings: Settings, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Check arguments of `load` and the files that they name, and load nothing.

    Args:
        settings: A target and how to decode it.
        arguments: Arguments of `load` that replace values of the settings.

    Returns:
        The batch size, and the bytes of the target's weight files if they are on this machine and computed by its processor.

    Raises:
        ForesayError: What `load` would raise, as far as it is known before anything is loaded.
    """
    given, own = dict(arguments), {f.name for f in dataclasses.fields(Arguments)} - {"options"}
    GenerationSettings().with_sampling(given.pop("sampling", None))
    for name in ("keep_prompts", "keep_prompts_gb"):  # which are checked when the model is loaded
        given.pop(name, None)
    values = {name: given.pop(name) for name in own & given.keys()}
    asked = Arguments(**values, options=given).filled(settings)
    if asked.drafter == PUBLISHED:  # found, and perhaps downloaded, when the model is loaded
        asked = dataclasses.replace(asked, drafter="model(org/name)")
    chosen = asked.chosen()
    stored = find(settings.target).stored_bytes()
    return chosen.max_batch_size, stored if chosen.options.computes_on.type == "cpu" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of `load` that do not concern the target, with their defaults."""

    draft: Any = None
    drafter: Any = "auto"
    num_draft_tokens: int | None = None
    length: Any = None
    rule: str | Rule | None = None
    max_batch_size: int | None = None
    ngrams: dict[str, int] = dataclasses.field(default_factory=dict)
    """Settings of the drafter prompt_lookup that are given."""
    memory: str | os.PathLike[str] | None = None
    memory_prompts: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def names_drafter(self) -> bool:
        """False if the target's default drafter is wanted."""
        return self.drafter != "auto" or self.draft is not None or bool(self.ngrams)

    def filled(self, stored: Settings) -> Arguments:
        """Return the arguments with the values of a settings file where none are given."""
        changes: dict[str, Any] = {"options": stored.filled(self.options)}
        for name in ("rule", "max_batch_size"):
            if getattr(self, name) is None:
                changes[name] = getattr(stored, name)
        if not self.names_drafter:
            changes["drafter"] = stored.drafter or self.drafter
            if self.length is None and self.num_draft_tokens is None:
                changes["length"] = stored.length
        return dataclasses.replace(self, **changes)

    def with_published(self, target: Any, options: LoadOptions | None = None) -> Arguments:
        """Return the arguments with the best published draft in place of that choice. Raises as `published_drafter` does.

        options: those that the target was loaded with, if it is loaded.
        """
        if self.drafter != PUBLISHED or self.draft is not None or self.ngrams:
            return self
        if not isinstance(target, str | os.PathLike):
            kind = type(target).__name__
            raise ConfigError(f"needs a target that is loaded by name, not a {kind}", param="drafter", value=PUBLISHED)
        dataclasses.replace(self, drafter="model(org/name)").chosen()  # checks the other arguments before a request
        found = published_drafter(os.fspath(target), options or LoadOptions.of(self.options))
        return dataclasses.replace(self, drafter=found)

    def chosen(self) -> Chosen:
        """Return the choices, before any file of a model is read. Raises ConfigError where arguments contradict."""
        options = LoadOptions.of(self.options, {f.name for f in dataclasses.fields(self)} - {"ngrams", "options"})
        self._check_memory()
        method = self._method() if self.names_drafter else None
        size = DEFAULT_BATCH if self.max_batch_size is None else self.max_batch_size
        chosen = Chosen(
            method,
            read_rule("speculative" if self.rule is None else self.rule),
            read_policy(method.name if method else None, self.num_draft_tokens, self.length),
            check_int("max_batch_size", size, 1, MAX_BATCH_SIZE),
            options,
            self.remembered,
        )
        if method is not None:
            chosen.check_method(method)
        return chosen

    def remembered(self, drafter: str) -> str:
        """Return the expression of a drafter with the memory, if one is given."""
        if self.memory is None:
            return drafter
        return remembering(drafter, os.fspath(self.memory), prompts=self.memory_prompts)

    def _check_memory(self) -> None:
        if self.memory is None:
            return
        if not isinstance(self.memory, str | os.PathLike):
            raise ConfigError("must be the path of a folder", param="memory", value=self.memory)
        if isinstance(self.draft, str | os.PathLike) and self.drafter in ("auto", "model"):
            text = "needs the draft model as an expression: drafter='model(NAME)' instead of {draft}"
            raise ConfigError(text, param="memory", value=self.memory, draft=...)
        if not isinstance(self.drafter, str) or self.draft is not None:
            text = "needs a {drafter} that is an expression, such as 'suffix'"
            raise ConfigError(text, param="memory", value=self.memory, drafter=...)

    def _method(self) -> Method:
        """Return the drafter that the arguments name. Raises ConfigError where they contradict."""
        draft, drafter = self.draft, self.drafter
        if draft is not None and drafter not in ("auto", "model"):
            given = draft if isinstance(draft, str | os.PathLike) else type(draft).__name__
            text = "does not use a draft model, but {draft} was given; drop one"
            raise ConfigError(text, param="drafter", value=drafter, draft=given)
        if drafter == "model" and draft is None:
            raise ConfigError("needs a draft model; pass {draft}", param="drafter", value=drafter, draft=...)
        if self.ngrams and (draft is not None or drafter not in ("auto", "prompt_lookup")):
            other = {"drafter": drafter} if draft is None else {"draft": ...}
            raise ConfigError(f"is for drafter='prompt_lookup', not for {{{min(other)}}}", param="max_ngram", **other)
        if isinstance(draft, str | os.PathLike):
            drafter = str(Call("model", ((None, os.fspath(draft)),)))
        elif draft is not None:
            return Method(draft_model(draft), "model")
        elif drafter in ("auto", "prompt_lookup"):
            drafter = str(Call("prompt_lookup", tuple(self.ngrams.items())))
        return read_method(self.remembered(drafter) if isinstance(drafter, str) else drafter)


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter's recipe, and its expression or name."""

    recipe: Recipe
    name: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choices that follow from the arguments of `load` and `change`; None for a default drafter or length policy."""

    method: Method | None
    rule: Rule
    policy: LengthPolicy | None
    max_batch_size: int
    options: LoadOptions
    remembered: Callable[[str], str] = str
    """Adds a memory to the expression of the default drafter."""

    def generator(self, resources: Resources, share_prefixes: bool, kept: KeptPrompts | None = None) -> Generator:
        """Return the Generator of a loaded target; here its default drafter is chosen, if none is named."""
        method, policy = self.method, self.policy
        if method is None:
            drafter = default_drafter(resources.target.name, resources.options, resources.has_mtp)
            method = read_method(self.remembered(drafter))
            self.check_method(method)
        recipe = method.recipe
        return Generator(
            resources.target,
            recipe.prepare(resources),
            self.rule,
            policy or (lambda rule: read_length(recipe.length(rule))),
            max_batch_size=self.max_batch_size,
            drafter=method.name,
            is_default=self.method is None,
            resources=resources,
            forget=recipe.forget,
            share_prefixes=share_prefixes,
            kept_prompts=kept,
        )

    def check_method(self, method: Method) -> None:
        """Raise ConfigError for a length policy or options that this drafter cannot have, ModelNotFoundError for its files."""
        check_length(self.policy, method)
        method.recipe.check_files()
        if method.recipe.loads_model or method.name == "none":
            return
        for option in ("draft_weights", "draft_device"):
            if (value := getattr(self.options, option)) is not None:
                other = {"draft": ...} if method.name == "model" else {"drafter": method.name}
                text = f"is for a draft model that is loaded by name, and {{{min(other)}}} is none"
                raise ConfigError(text, param=option, value=value, **other)


def change(
    generator: Generator,
    *,
    drafter: str | Drafter | Callable[[], Drafter] | None = None,
    num_draft_tokens: int | None = None,
    length: str | int | LengthPolicy | None = None,
    rule: str | Rule | None = None,
    max_batch_size: int | None = None,
) -> Generator:
    """Return a Generator over the same weights with some settings changed; None keeps a setting.

    Args:
        generator: A Generator that `load` or `change` returned.
        drafter: As in `load`. A changed drafter uses its default length unless one is given.
        num_draft_tokens: As in `load`.
        length: As in `load`.
        rule: As in `load`.
        max_batch_size: As in `load`.

    Raises:
        ConfigError: Wrong or contradicting arguments, or a Generator that `load` did not make.
    """
    resources = check_has("generator", generator, "with_settings", "a Generator").resources
    if resources is None:
        raise ConfigError("was not made by foresay.load; make another instead of changing it", param="generator")
    asked = Arguments(
        drafter="auto" if drafter is None else drafter,
        num_draft_tokens=num_draft_tokens,
        length=length,
        rule=generator.rule if rule is None else rule,
        max_batch_size=generator.max_batch_size if max_batch_size is None else max_batch_size,
    )
    chosen = asked.with_published(resources.target.name, resources.options).chosen()
    if drafter is not None:
        return chosen.generator(resources, generator.share_prefixes, generator.kept_prompts)
    policy = read_policy(generator.drafter_name, num_draft_tokens, length)
    if parse(generator.drafter_name).name in DRAFTERS:  # an expression, not the class of an own drafter
        check_length(policy, read_method(generator.drafter_name))
    return generator.with_settings(
        rule=None if rule is None else chosen.rule, policy=policy, max_batch_size=chosen.max_batch_size
    )


def read_method(drafter: Any) -> Method:
    """Return the drafter of an expression, of a Drafter or of a function that makes one. Raises ConfigError."""
    if isinstance(drafter, str):
        return Method(read_drafter(drafter), drafter)
    if hasattr(drafter, "propose") and not isinstance(drafter, type):
        return Method(own_drafter_recipe(lambda _: lambda: cast(Drafter, drafter)), type(drafter).__name__)
    if callable(drafter):
        name = str(getattr(drafter, "__name__", type(drafter).__name__))
        return Method(own_drafter_recipe(lambda _: lambda: cast(Drafter, drafter())), name)
    raise ConfigError("is neither a name, nor a Drafter, nor a function that makes one", param="drafter", value=drafter)


def check_length(policy: LengthPolicy | None, method: Method) -> None:
    """Raise ConfigError for a length policy that ends drafts by probabilities which the drafter does not have."""
    if policy is not None and policy.needs_probabilities and not method.recipe.has_probabilities:
        text = "ends drafts by a draft model's probabilities, which {drafter} does not have; use throughput"
        raise ConfigError(text, param="length", value=to_expression(policy, LENGTHS), drafter=method.name)


def read_policy(drafter: str | None, number: int | None, length: Any) -> LengthPolicy | None:
    """Return the requested length policy; None for the drafter's default. drafter: its name; None for the default one."""
    if number is not None and length is not None:
        text = "and {length} contradict; give one of them"
        raise ConfigError(text, param="num_draft_tokens", value=number, length=length)
    if drafter == "none" and (number or length is not None):
        given = {"num_draft_tokens": number} if length is None else {"length": length}
        text = f"drafts nothing, but {{{min(given)}}} was given; drop one"
        raise ConfigError(text, param="drafter", value=drafter, **given)
    if length is not None:
        return read_length(length)
    return None if number is None else ConstantLength(number)
