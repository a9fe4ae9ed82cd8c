"""Drafters, rules and length policies from expressions.

Owns the names that expressions may use, and the resources that each drafter needs: other models, n-gram tables, stores that
outlive a request. Settings are checked when an expression is read; models are loaded later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from foresay.checks import check_flag, check_float, check_has, check_int
from foresay.decoding.acceptance import RULES
from foresay.decoding.protocols import Drafter, LengthPolicy, Rule, UsesTargetCache
from foresay.drafters import (
    AssistantDrafter,
    BlockDrafter,
    Cascade,
    HeadDrafter,
    Hybrid,
    ModelDrafter,
    ModelTreeDrafter,
    SelfDrafter,
)
from foresay.drafters.cascade import check_matrix, drafted_at_most
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.errors import ConfigError, UnsupportedModelError, VocabularyMismatchError
from foresay.lengths import LENGTHS, ConstantLength
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.models.sources.catalogue import PUBLISHED
from foresay.models.sources.drafts import check_draft_exists
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import resolve
from foresay.models.sources.location import check_exists
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec import ngram_recipes as ngram
from foresay.spec import third_party
from foresay.spec.expressions import Call, apply, parse
from foresay.spec.ngram_recipes import check_path
from foresay.spec.recipe import TRAITS, DrafterBuilder, Recipe, Resources
from foresay.text.tokenizer import check_vocabularies

_Trim = Callable[[Resources, Any], Any]


def _tree(name: str, branches: int = 2, width: int = 1) -> Recipe:
    name = check_path("name", name)
    check_int("branches", branches, 1, 16)
    check_int("width", width, 1, 16)

    def prepare(resources: Resources) -> DrafterBuilder:
        draft = resources.model(name)
        _refuse_encoder(resources, draft)
        check_vocabularies(resources.target.tokenizer, draft.tokenizer, (resources.target.name, draft.name))
        return lambda: ModelTreeDrafter(draft.model, resources.vocab_size, branches=branches, width=width)

    check = partial(check_exists, name)
    return Recipe(prepare, 8, check_files=check, reads_target=True, loads_model=True, samples=True)


def _head(name: str, sample: bool = True, nodes: int = 0) -> Recipe:
    name = check_path("name", name)
    check_flag("sample", sample)
    check_int("nodes", nodes, 0, MAX_DRAFT_TOKENS)

    def prepare(resources: Resources) -> DrafterBuilder:
        head = resources.head(name)
        made: Any = AssistantDrafter if isinstance(head, UsesTargetCache) else HeadDrafter
        return lambda: made(head, resources.vocab_size, sample=sample, nodes=nodes)

    check = partial(check_draft_exists, name, "head")
    return Recipe(prepare, max(5, nodes), check_files=check, reads_target=True, loads_model=True, samples=sample)


def _mtp(sample: bool = True) -> Recipe:
    check_flag("sample", sample)

    def prepare(resources: Resources) -> DrafterBuilder:
        head = resources.mtp()
        return lambda: HeadDrafter(head, resources.vocab_size, sample=sample)

    return Recipe(prepare, 3, reads_target=True, loads_model=True, samples=sample)


def _block(name: str, sample: bool = True, confidence: float = 0.0, nodes: int = 0) -> Recipe:
    name = check_path("name", name)
    check_flag("sample", sample)
    check_float("confidence", confidence, 0.0, 1.0)
    check_int("nodes", nodes, 0, MAX_DRAFT_TOKENS)

    def prepare(resources: Resources) -> DrafterBuilder:
        block = resources.block(name)
        return lambda: BlockDrafter(block, resources.vocab_size, sample=sample, confidence=confidence, nodes=nodes)

    check = partial(check_draft_exists, name, "block")
    return Recipe(prepare, max(7, nodes), check_files=check, reads_target=True, loads_model=True, samples=sample)


def _model(
    name: str, vocabulary: str | None = None, vocabulary_size: int | None = None, coverage: float = 0.98
) -> Recipe:
    trim = _trim(vocabulary, vocabulary_size, coverage)
    name = check_path("name", name)

    def prepare(resources: Resources) -> DrafterBuilder:
        return _draft_with(resources, resources.model(name), trim)

    check = partial(check_exists, name)
    return Recipe(prepare, 5, check_files=check, reads_target=True, loads_model=True, samples=True)


def draft_model(model: Any) -> Recipe:
    """Return the recipe of a draft model that is already loaded: a transformers model or a LanguageModel."""

    def prepare(resources: Resources) -> DrafterBuilder:  # wraps it once the target is there
        return _draft_with(resources, resolve(model, LoadOptions(), None), None)

    return Recipe(prepare, 5, reads_target=True, samples=True)


def _refuse_encoder(resources: Resources, draft: LoadedModel) -> None:
    if draft.model.capabilities.reads_source and not resources.target.model.capabilities.reads_source:
        raise UnsupportedModelError(
            f"{draft.name!r} is an encoder-decoder model and cannot draft for a decoder-only one; choose another draft model"
        )


def _draft_with(resources: Resources, draft: LoadedModel, trim: _Trim | None) -> DrafterBuilder:
    _refuse_encoder(resources, draft)
    try:
        check_vocabularies(resources.target.tokenizer, draft.tokenizer, (resources.target.name, draft.name))
    except VocabularyMismatchError:
        reads = draft.model.capabilities.reads_source  # its encoder reads the source in the target's tokens
        if resources.target.tokenizer is None or draft.tokenizer is None or trim is not None or reads:
            raise
        from foresay.text.cross_tokenizer import TokenizerPair

        retokenizer = TokenizerPair(resources.target.tokenizer, draft.tokenizer)
        return lambda: CrossTokenizerDrafter(draft.model, resources.vocab_size, retokenizer)
    model = draft.model if trim is None else trim(resources, draft.model)
    return lambda: ModelDrafter(model, resources.vocab_size)


def _self(
    layers: int, vocabulary: str | None = None, vocabulary_size: int | None = None, coverage: float = 0.98
) -> Recipe:
    trim = _trim(vocabulary, vocabulary_size, coverage)
    check_int("layers", layers, 1, 10_000)

    def prepare(resources: Resources) -> DrafterBuilder:
        from foresay.models.huggingface.causal import CausalModel
        from foresay.models.huggingface.early_exit import first_decoder_layers, first_layers
        from foresay.models.huggingface.seq2seq import Seq2SeqModel

        target = resources.target.model
        if not isinstance(target, CausalModel | Seq2SeqModel):
            raise UnsupportedModelError(
                f"self-speculation needs a transformers model, but {resources.target.name!r} is not one; choose another drafter"
            )
        model: Any = (
            first_decoder_layers(target, layers) if isinstance(target, Seq2SeqModel) else first_layers(target, layers)
        )
        if trim is not None:
            model = trim(resources, model)
        return lambda: SelfDrafter(model, resources.vocab_size)

    return Recipe(prepare, 4, reads_target=True, samples=True)


def _trim(vocabulary: str | None, size: int | None, coverage: float) -> _Trim | None:
    """Return a function that trims a draft model's LM head to the most frequent tokens of a table, or None."""
    if size is not None:
        check_int("vocabulary_size", size, 1, 1 << 24)
    check_float("coverage", coverage, 0.01, 1.0)
    if vocabulary is None:
        if size is not None:
            text = "needs {vocabulary}, a table built with `foresay distill --kind ngram`"
            raise ConfigError(text, param="vocabulary_size", value=size, vocabulary=...)
        return None
    path = check_path("vocabulary", vocabulary)

    def trim(resources: Resources, model: Any) -> Any:
        from foresay.models.huggingface.causal import CausalModel
        from foresay.models.huggingface.early_exit import trimmed_head

        if not isinstance(model, CausalModel):
            raise UnsupportedModelError(
                "vocabulary= trims the LM head of a decoder-only transformers model only; remove it or choose another draft model"
            )
        ends = resources.target.eos_token_ids
        return trimmed_head(model, resources.table(path).draft_vocabulary(size, coverage, ends, model.vocab_size))

    return trim


def _cascade(*drafters: tuple[str | None, Any], k: Sequence[Sequence[int]], lenience: float = 1.0) -> Recipe:
    recipes = [_member(key, value, "k, lenience") for key, value in drafters]
    check_matrix(k, len(recipes))
    check_float("lenience", lenience, 1.0, 1e6)

    def prepare(resources: Resources) -> DrafterBuilder:
        builders = [recipe.prepare(resources) for recipe in recipes]

        def build() -> Drafter:
            return Cascade([_made(builder) for builder in builders], k, lenience=lenience)

        build()  # checks which members can verify, now that they are loaded
        return build

    def forget() -> None:
        for recipe in recipes:
            recipe.forget()

    traits = {name: any(getattr(one, name) for one in recipes) for name in TRAITS}
    return Recipe(prepare, drafted_at_most(k), forget, _all_files(recipes), fixed=True, **traits)


def _hybrid(*drafters: tuple[str | None, Any], min_match: int = 3, k: int | None = None) -> Recipe:
    if len(drafters) != 2:
        raise ConfigError(f"has two drafters, an n-gram drafter and another one, not {len(drafters)}", param="hybrid")
    recipes = [_member(key, value, "min_match, k") for key, value in drafters]
    check_int("min_match", min_match, 1)
    k = max(1, recipes[1].num_draft_tokens) if k is None else check_int("k", k, 1, MAX_DRAFT_TOKENS)

    def prepare(resources: Resources) -> DrafterBuilder:
        builders = [recipe.prepare(resources) for recipe in recipes]

        def build() -> Drafter:
            first, other = (_made(builder) for builder in builders)
            return Hybrid(first, other, min_match=min_match, k=k)  # type: ignore[arg-type]

        build()  # checks the class of the first, now that it is loaded
        return build

    def forget() -> None:
        for recipe in recipes:
            recipe.forget()

    traits = {name: any(getattr(one, name) for one in recipes) for name in TRAITS}
    return Recipe(prepare, max(k, recipes[0].num_draft_tokens), forget, _all_files(recipes), **traits)


def _all_files(recipes: Sequence[Recipe]) -> Callable[[], None]:
    """Return the check of the files of all members."""

    def check() -> None:
        for recipe in recipes:
            recipe.check_files()

    return check


def _made(builder: DrafterBuilder) -> Drafter:
    drafter = builder()
    if drafter is None:
        text = "drafts nothing and cannot be a part of another one; remove it"
        raise ConfigError(text, param="drafter", value="none")
    return drafter


def _member(key: str | None, value: Any, settings: str) -> Recipe:
    """Return the recipe of one drafter of a cascade or hybrid: `max_gram`, `suffix(scale=3)` or `model=NAME`.

    settings: names of the cascade's or hybrid's own settings, for errors.
    """
    if key is None:
        call = value if isinstance(value, Call) else Call("none" if value is None else str(value))
    elif key in ("model", "head", "block", "self"):
        call = Call(key, ((None, value),))
    else:
        text = f"is neither a setting ({settings}) nor a drafter (model=NAME, head=NAME, block=NAME, self=LAYERS)"
        raise ConfigError(text, param=str(key), value=value)
    return apply("drafter", call, _makers(call.name))


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter's entry for commands, benchmarks, cost models and documentation."""

    make: Callable[..., Recipe]
    """Function whose parameters are the settings."""
    summary: str
    """Source of the draft tokens, in a sentence."""
    kind: Literal["none", "lookup", "model", "cascade"]
    """Cost of drafting: nothing, n-gram matching, passes of a model, or that of its members."""
    compared: bool = False
    """True if `bench`, `replay`, `generate --compare` and `tune` try it by default."""


DRAFTERS: dict[str, DrafterSpec] = {
    "none": DrafterSpec(ngram.none, "No drafts: plain decoding.", "none"),
    "prompt_lookup": DrafterSpec(
        ngram.prompt_lookup,
        "The tokens that followed the last few tokens earlier in the text.",
        "lookup",
        compared=True,
    ),
    "max_gram": DrafterSpec(
        ngram.max_gram,
        "The tokens after the longest match in the text, of any length; then an n-gram table, if one is given.",
        "lookup",
        compared=True,
    ),
    "ngram_store": DrafterSpec(
        ngram.ngram_store,
        "The most frequent next tokens, counted while decoding; keep=true shares the counts between requests.",
        "lookup",
        compared=True,
    ),
    "suffix": DrafterSpec(
        ngram.suffix,
        "The tokens after the longest match in the text or (keep=true) in earlier requests; longer drafts for longer matches.",
        "lookup",
        compared=True,
    ),
    "suffix_tree": DrafterSpec(
        ngram.suffix_tree, "A tree of the tokens after the longest matches: several continuations at once.", "lookup"
    ),
    "model": DrafterSpec(_model, "A smaller model, named like --model.", "model"),
    "tree": DrafterSpec(_tree, "A tree of a smaller model's likeliest continuations, named like --model.", "model"),
    "head": DrafterSpec(
        _head,
        "A head on the target's hidden states (EAGLE-3), in chains or trees of `nodes`: its folder or hub id.",
        "model",
    ),
    "mtp": DrafterSpec(_mtp, "The multi-token-prediction layers of the target's own checkpoint.", "model"),
    "block": DrafterSpec(
        _block,
        "A block in one pass, or a tree of `nodes` (DFlash, DFlash2, DSpark, P-EAGLE): the draft's folder or hub id.",
        "model",
    ),
    "self": DrafterSpec(_self, "The target's own first layers.", "model"),
    "hybrid": DrafterSpec(
        _hybrid, "An n-gram drafter where its match is long, else a head or a draft model.", "cascade"
    ),
    "cascade": DrafterSpec(
        _cascade, "Several drafters: cheap ones draft for better ones, and continue their drafts.", "cascade"
    ),
}
"""Drafters by name. A new drafter is a file, a test and an entry here."""


def named(kind: str | None = None, *, compared: bool = False) -> tuple[str, ...]:
    """Return the names of the drafters of a kind (None: any). compared: only those that are compared by default."""
    return tuple(name for name, one in DRAFTERS.items() if kind in (None, one.kind) and (one.compared or not compared))


_MAKERS = {name: one.make for name, one in DRAFTERS.items()}


def drafter_spec(name: str) -> DrafterSpec:
    """The drafter of this name, foresay's own or another package's. Raises ConfigError for one that cannot be loaded."""
    if name in DRAFTERS:
        return DRAFTERS[name]
    make = third_party.recipe_maker(name)
    return DrafterSpec(make, (make.__doc__ or "No description.").split("\n")[0], "model")


def third_party_names() -> list[str]:
    """Names of the drafters of other packages that are not foresay's own names."""
    return [name for name in third_party.names() if name not in DRAFTERS]


def _makers(name: str) -> dict[str, Callable[..., Recipe]]:
    """The makers that an expression of this name chooses from; another package's drafter is imported only if it is named."""
    if name in DRAFTERS:
        return _MAKERS
    others = third_party_names()
    return _MAKERS | dict.fromkeys(others, ngram.none) | ({name: drafter_spec(name).make} if name in others else {})


def read_drafter(text: str) -> Recipe:
    """Return the recipe of the drafter that an expression names. Raises ConfigError or UnknownNameError for a wrong one."""
    call = parse(text)
    if call.name == PUBLISHED:
        problem = "is a choice for one target; name the expression that `foresay drafts MODEL` prints"
        raise ConfigError(problem, param="drafter", value=text)
    return apply("drafter", call, _makers(call.name))


def read_rule(rule: str | Rule) -> Rule:
    """Return the acceptance rule that an expression names; a Rule is returned unchanged."""
    return apply("rule", parse(rule), RULES) if isinstance(rule, str) else check_has("rule", rule, "verify", "a Rule")


def read_length(length: str | int | LengthPolicy) -> LengthPolicy:
    """Return the length policy of an expression or a number of tokens; a LengthPolicy is returned unchanged."""
    if isinstance(length, str) and re.fullmatch(r"-?\d+", length.strip(), re.ASCII):
        length = int(length)
    if isinstance(length, int):
        return ConstantLength(check_int("length", length, 0, MAX_DRAFT_TOKENS))
    if isinstance(length, str):
        return apply("length", parse(length), LENGTHS)
    return check_has("length", length, "budget", "a LengthPolicy")
