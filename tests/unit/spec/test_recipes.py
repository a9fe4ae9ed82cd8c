"""Expressions to drafters: each builds on a tiny folder, each setting is checked, and changes keep what they should."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import foresay
from foresay import change, load
from foresay.decoding.acceptance import RULES, Lenience
from foresay.decoding.protocols import Drafter
from foresay.drafters import (
    BlockDrafter,
    Cascade,
    HeadDrafter,
    Hybrid,
    MaxGram,
    ModelDrafter,
    ModelTreeDrafter,
    NgramStoreDrafter,
    PromptLookup,
    SelfDrafter,
    SuffixDrafter,
    SuffixTreeDrafter,
)
from foresay.drafters.ngram_table import NgramTable
from foresay.errors import (
    ConfigError,
    ModelNotFoundError,
    UnknownNameError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from foresay.generation.generator import Generator
from foresay.lengths import LENGTHS, ConfidenceLength, ConstantLength, HeuristicLength, ThroughputLength
from foresay.models.drafts.files import write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import resolve
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.recipe import Resources
from foresay.spec.recipes import DRAFTERS, read_drafter, read_length, read_rule
from foresay.text.tokenizer import tokenizer_fingerprint
from helpers import tiny
from helpers.blocks import random_block
from helpers.families import make_seq2seq
from helpers.heads import random_head
from helpers.making import byte_level
from helpers.refusals import refused

VOCAB = len(tiny.tokenizer())
PROMPT = "hello hello hello hell"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every token is followed by the next one; ids from 10 to 19 make up the corpus."""
    counts = np.zeros(VOCAB, dtype=np.int64)
    counts[10:20] = np.arange(20, 10, -1)
    successor = np.roll(np.arange(VOCAB), -1)
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    NgramTable(successor, counts, fingerprint=tokenizer_fingerprint(tiny.tokenizer())).save(path)
    return str(path)


@pytest.fixture(scope="module")
def resources(folder: Path) -> Resources:
    return Resources(resolve(folder, LoadOptions(dtype="fp32"), None), LoadOptions(dtype="fp32"))


def built(resources: Resources, text: str) -> Drafter | None:
    return read_drafter(text).prepare(resources)()


@pytest.fixture(scope="module")
def head(resources: Resources, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("head")
    write_draft(random_head(resources.target.model), path)  # type: ignore[arg-type]
    return str(path)


@pytest.fixture(scope="module")
def block(resources: Resources, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("block")
    write_draft(random_block(resources.target.model), path)  # type: ignore[arg-type]
    return str(path)


def test_every_name_builds_what_it_says(resources: Resources, folder: Path, table: str, head: str, block: str) -> None:
    kinds: dict[str, tuple[str, type]] = {
        "none": ("none", type(None)),
        "prompt_lookup": ("prompt_lookup(max_ngram=3)", PromptLookup),
        "max_gram": (f"max_gram(table={table})", MaxGram),
        "ngram_store": ("ngram_store(n=3, levels=one)", NgramStoreDrafter),
        "suffix": ("suffix(scale=1.5)", SuffixDrafter),
        "model": (f"model({folder})", ModelDrafter),
        "suffix_tree": ("suffix_tree(branches=2)", SuffixTreeDrafter),
        "tree": (f"tree({folder}, branches=3)", ModelTreeDrafter),
        "head": (f"head({head})", HeadDrafter),
        "block": (f"block({block}, confidence=0.3)", BlockDrafter),
        "self": ("self(2)", SelfDrafter),
        "hybrid": (f"hybrid(suffix, head={head}; min_match=2, k=3)", Hybrid),
        "cascade": (f"cascade(model={folder}, self=1, max_gram(table={table}); k=[[2,1,1],[0,1,1],[0,0,1]])", Cascade),
    }
    assert kinds.keys() | {"mtp"} == DRAFTERS.keys(), "which needs a checkpoint with such layers"
    for text, kind in kinds.values():
        drafter = built(resources, text)
        assert type(drafter) is kind, text
        assert drafter is None or built(resources, text) is not drafter, "each engine has its own"


def test_settings_reach_the_drafter(resources: Resources, table: str) -> None:
    lookup: Any = built(resources, "prompt_lookup(max_ngram=7, min_ngram=3)")
    assert (lookup.max_ngram, lookup.min_ngram) == (7, 3)
    gram: Any = built(resources, f"max_gram({table})")
    assert gram.table is resources.tables[table] and built(resources, "max_gram").table is None  # type: ignore[union-attr]
    store: Any = built(resources, "ngram_store(5, one, 3, false, false, 99)")
    assert store._settings == {"n": 5, "levels": "one", "max_contexts": 99}
    assert (store.filler_top_k, store.stop_unknown, store._shared) == (3, False, None)
    suffix: Any = built(resources, "suffix(scale=4, min_match=2, keep=false)")
    assert (suffix.scale, suffix.min_match, suffix.memory) == (4.0, 2, None)
    assert built(resources, "suffix(keep=true, max_tokens=77)").memory.max_tokens == 77  # type: ignore[union-attr]
    cascade: Any = built(resources, "cascade(self=1, max_gram; k=[[2,1],[0,1]], lenience=3)")
    assert cascade.k == ((2, 1), (0, 1)) and cascade.lenience == 3.0
    assert [type(d) for d in cascade.drafters] == [SelfDrafter, MaxGram]
    assert read_drafter("cascade(max_gram; k=[[9]])").num_draft_tokens == 9


@pytest.mark.parametrize(
    ("other", "k"),
    [
        ("head={head}", 5),
        ("head({head}, nodes=12)", 12),
        ("block={block}", 7),
        ("self=2", 4),
        ("cascade(self=1, max_gram; k=[[2, 1], [0, 1]])", 3),
    ],
)
def test_a_hybrid_drafts_by_default_what_the_other_drafter_drafts(
    resources: Resources, head: str, block: str, other: str, k: int
) -> None:
    expression = f"hybrid(suffix, {other.format(head=head, block=block)})"
    drafter: Any = built(resources, expression)
    assert drafter.k == k
    assert built(resources, expression[:-1] + "; k=6)").k == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("drafter", "reads"),
    [
        ("none", False),
        ("suffix(scale=2)", False),
        ("ngram_store(n=4)", False),
        ("prompt_lookup(max_ngram=3)", False),
        ("max_gram", False),
        ("max_gram(table=/a/table)", True),
        ("self(2)", True),
        ("model(/a/model)", True),
        ("cascade(suffix, max_gram; k=[[2, 2], [0, 2]])", False),
        ("cascade(self=2, max_gram; k=[[2, 2], [0, 2]])", True),
    ],
)
def test_a_recipe_says_whether_it_reads_the_target(drafter: str, reads: bool) -> None:
    assert read_drafter(drafter).reads_target == reads


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [("suffix(scale=2)", SuffixDrafter), ("ngram_store(n=4)", NgramStoreDrafter), ("max_gram", MaxGram)],
)
def test_what_does_not_read_the_target_is_made_without_one(drafter: str, kind: type) -> None:
    """Layers and tokenizer are kept from it."""
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    made = read_drafter(drafter).prepare(Resources(LoadedModel("absent", model, None, frozenset())))()
    assert type(made) is kind


def test_models_and_tables_are_read_once(resources: Resources, folder: Path, table: str) -> None:
    one: Any = built(
        resources, f"cascade(model={folder}, model={folder}, max_gram({table}); k=[[1,1,1],[0,0,0],[0,0,0]])"
    )
    first, second, gram = one.drafters
    assert first.context.model.inner is second.context.model.inner is resources.models[str(folder)].model
    assert first.context is not second.context
    assert gram.table is resources.table(table)


@pytest.mark.parametrize(
    "drafter", ["max_gram({})", "cascade(self=1, max_gram({}); k=[[1, 2], [0, 1]])", "self(1, {}, 4)"]
)
def test_a_table_for_another_vocabulary_is_refused(resources: Resources, tmp_path: Path, drafter: str) -> None:
    """One of CS-Drafting's lists, which has no fingerprint: its length is that of the vocabulary it was made for."""
    path = tmp_path / "bigrams.json"
    path.write_text(json.dumps([1] * 100))
    with pytest.raises(
        VocabularyMismatchError, match=rf"for a vocabulary of 100 tokens, but the one in use has {VOCAB}"
    ):
        built(resources, drafter.format(path))
    path.write_text(json.dumps([1] * VOCAB))
    if "vocabulary" not in drafter and not drafter.startswith("self"):  # a list has no counts to trim a head by
        assert built(dataclasses.replace(resources, tables={}), drafter.format(path)) is not None


def test_heads_are_trimmed_to_a_tables_frequent_tokens(resources: Resources, folder: Path, table: str) -> None:
    eos = sorted(resources.target.eos_token_ids)
    for text in (f"self(2, vocabulary={table}, vocabulary_size=4)", f"model({folder}, {table}, 4)"):
        drafter: Any = built(resources, text)
        inner = drafter.context.model.inner
        assert inner.subset.token_ids.tolist() == [*eos, 10, 11, 12, 13], text
        assert inner.vocab_size == VOCAB
    covered: Any = built(resources, f"self(1, vocabulary={table}, coverage=0.5)")
    assert covered.context.model.inner.subset.token_ids.tolist() == [*eos, 10, 11, 12, 13, 14], "20 + ... + 16 of 155"


@pytest.mark.parametrize("drafter", [MaxGram, MaxGram(), lambda: MaxGram()])
def test_a_drafter_may_be_a_class_an_instance_or_a_function(folder: Path, drafter: Any) -> None:
    out = load(folder, drafter=drafter, dtype="fp32").generate(PROMPT, max_new_tokens=24)
    assert out.draft_error is None and out.stats.num_drafted > 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["suffix({})", "ngram_store(n=3, {})", "cascade(suffix({}); k=[[8]])"])
def test_forget_clears_what_outlives_requests(folder: Path, name: str, keep: bool) -> None:
    model = load(folder, drafter=name.format(f"keep={str(keep).lower()}"), num_draft_tokens=6, dtype="fp32")
    first = model.generate(PROMPT, max_new_tokens=24)
    again = model.generate(PROMPT, max_new_tokens=24)
    assert (again.stats.num_passes < first.stats.num_passes) == keep
    model.forget()
    assert model.generate(PROMPT, max_new_tokens=24).stats.num_passes == first.stats.num_passes
    assert first.text == again.text and again.draft_error is None


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return load(folder, drafter="suffix(keep=true)", length=7, rule="block", max_batch_size=3, dtype="fp32")


def settings(one: Generator) -> tuple[Any, ...]:
    return one.drafter_name, one.policy, one.rule, one.max_batch_size


def test_a_change_keeps_what_is_not_named(generator: Generator) -> None:
    before = settings(generator)
    for name, changed in (
        ("policy", change(generator, length="heuristic")),
        ("policy", change(generator, num_draft_tokens=2)),
        ("rule", change(generator, rule="lenience(3)")),
        ("max_batch_size", change(generator, max_batch_size=9)),
    ):
        same = [a is b or a == b for a, b in zip(before, settings(changed), strict=True)]
        assert same == [name != field for field in ("drafter_name", "policy", "rule", "max_batch_size")]
        assert changed.target is generator.target and changed._build_drafter is generator._build_drafter
    assert settings(generator) == before
    rule: Any = change(generator, rule="lenience(3)").rule
    assert rule.lenience == 3.0


def test_a_changed_drafter_takes_its_own_length(generator: Generator) -> None:
    other = change(generator, drafter="max_gram")
    assert other.drafter_name == "max_gram" and isinstance(other.policy, ThroughputLength)
    assert (other.rule, other.max_batch_size, other.target) == (generator.rule, 3, generator.target)
    assert isinstance(other.engine().drafter.inner, MaxGram)  # type: ignore[union-attr]
    plain = change(generator, drafter="none")
    assert plain.engine().drafter is None and plain.policy.budget([0]) == [0]  # type: ignore[arg-type]
    lossy = change(other, rule="lenience(2)")
    assert isinstance(lossy.policy, ConstantLength) and lossy.policy.num_draft_tokens == 10, (
        "its text would depend on it"
    )
    assert isinstance(change(lossy, rule="block").policy, ThroughputLength)
    assert change(other, max_batch_size=2).policy is other.policy, "with what it has measured"
    chosen = change(change(generator, drafter="max_gram", length="heuristic"), rule="lenience(2)")
    assert isinstance(chosen.policy, HeuristicLength), "what was chosen stays"
    timed = change(generator, drafter="self(1)", length="confidence(0.7)")
    assert isinstance(timed.policy, ConfidenceLength) and timed.policy.threshold == 0.7
    with refused("num_draft_tokens", 3):
        change(generator, num_draft_tokens=3, length="heuristic")
    with refused("drafter", "none"):
        change(plain, num_draft_tokens=3)


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        ("head(./nowhere)", "no such folder: './nowhere'; give the folder of a head"),
        ("head(nowhere.gguf)", "no such file: 'nowhere.gguf'"),
        ("hybrid(suffix, block(/nowhere))", "no such folder: '/nowhere'; give the folder of a block drafter"),
        ("model(./nowhere)", "no such file or folder: './nowhere'"),
        ("cascade(model=./nowhere, max_gram; k=[[4, 2], [0, 3]])", "no such file or folder: './nowhere'"),
    ],
)
def test_missing_files_are_named_before_the_target_is_loaded(drafter: str, problem: str) -> None:
    with pytest.raises(ModelNotFoundError, match=re.escape(problem)):
        foresay.load("/no/such/target", drafter=drafter)
    with pytest.raises(ModelNotFoundError, match="/no/such/target"):
        foresay.load("/no/such/target", drafter="hybrid(suffix, head(org/name))")


@pytest.mark.parametrize("drafter", ["suffix", "suffix_tree", "hybrid(suffix, max_gram)"])
@pytest.mark.parametrize("length", ["confidence(threshold=0.5)", "entropy"])
def test_lengths_that_read_probabilities_need_them(generator: Generator, drafter: str, length: str) -> None:
    with refused("length"):
        change(generator, drafter=drafter, length=length)
    with refused("length"):
        change(change(generator, drafter=drafter), length=length)
    assert change(generator, drafter="hybrid(suffix, self(1))", length=length).policy.needs_probabilities


def test_a_change_forgets_and_remembers_with_the_one_it_came_from(generator: Generator) -> None:
    generator.forget()
    twin = change(generator, length=8)
    cold = twin.generate(PROMPT, max_new_tokens=20).stats.num_passes
    assert generator.generate(PROMPT, max_new_tokens=20).stats.num_passes < cold, "they share the past"
    fresh = change(generator, drafter="suffix(keep=true)", length=8)
    assert fresh.generate(PROMPT, max_new_tokens=20).stats.num_passes == cold, "another drafter, another past"
    twin.forget()
    assert twin.generate(PROMPT, max_new_tokens=20).stats.num_passes == cold


@pytest.mark.parametrize(
    ("text", "error", "param", "value"),
    [
        ("sufix", UnknownNameError, "drafter", "sufix"),
        ("none(1)", ConfigError, "drafter", "none(1)"),
        ("prompt_lookup(max_ngram=1)", ConfigError, "min_ngram", 2),
        ("max_gram(table=3)", ConfigError, "table", 3),
        ("ngram_store(n=1)", ConfigError, "n", 1),
        ("ngram_store(n=1, keep=true)", ConfigError, "n", 1),
        ("ngram_store(levels=two)", ConfigError, "levels", "two"),
        ("ngram_store(keep=1)", ConfigError, "keep", 1),
        ("ngram_store(filler_top_k=65)", ConfigError, "filler_top_k", 65),
        ("ngram_store(stop_unknown=no)", ConfigError, "stop_unknown", "no"),
        ("ngram_store(max_contexts=1)", ConfigError, "max_contexts", 1),
        ("suffix(scale=0)", ConfigError, "scale", 0),
        ("suffix(min_match=0)", ConfigError, "min_match", 0),
        ("suffix(keep=yes)", ConfigError, "keep", "yes"),
        ("suffix(keep=true, max_tokens=-1)", ConfigError, "max_tokens", -1),
        ("model", ConfigError, "drafter", "model"),
        ("model(7)", ConfigError, "name", 7),
        ("model(A, vocabulary=7)", ConfigError, "vocabulary", 7),
        ("model(A, vocabulary_size=7)", ConfigError, "vocabulary_size", 7),
        ("self(0)", ConfigError, "layers", 0),
        ("self(1, T, vocabulary_size=0)", ConfigError, "vocabulary_size", 0),
        ("self(1, coverage=0)", ConfigError, "coverage", 0),
        ("cascade(max_gram)", ConfigError, "drafter", "cascade"),
        ("cascade(k=[[1]])", ConfigError, "drafters", ()),
        ("cascade(max_gram; k=[[1, 2]])", ConfigError, "k", [[1, 2]]),
        ("cascade(max_gram; k=[[1]], lenience=0)", ConfigError, "lenience", 0),
        ("cascade(maxgram; k=[[1]])", UnknownNameError, "drafter", "maxgram"),
        ("cascade(suffix(scale=0); k=[[1]])", ConfigError, "scale", 0),
        ("cascade(lenient=2, max_gram; k=[[1]])", ConfigError, "lenient", 2),
        ("hybrid(lenient=2, max_gram)", ConfigError, "lenient", 2),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(
    text: str, error: type[Exception], param: str, value: Any
) -> None:
    with refused(param, value, error):
        read_drafter(text)


def test_what_only_the_models_can_tell(resources: Resources, folder: Path, tmp_path: Path) -> None:
    for text, param, value in (
        ("self(3)", "layers", 3),
        ("cascade(max_gram, suffix; k=[[1,1],[0,1]])", "k[1]", [0, 1]),
        ("cascade(none, max_gram; k=[[1,1],[0,0]])", "drafter", "none"),
    ):
        with refused(param, value):
            built(resources, text)
    NgramTable(np.arange(VOCAB), fingerprint="f" * 64).save(tmp_path / "foreign.safetensors")
    with pytest.raises(VocabularyMismatchError, match="built with another tokenizer"):
        built(resources, f"max_gram({tmp_path}/foreign.safetensors)")
    wordy = dataclasses.replace(resources.target, model=object())
    with pytest.raises(UnsupportedModelError, match="self-speculation needs a transformers model"):
        built(Resources(wordy), "self(1)")


def test_what_drafts_for_an_encoder_decoder(table: str, head: str) -> None:
    """Its own first layers, alone and in a cascade; heads and trimmed vocabularies read a decoder-only model."""
    t5 = resolve(make_seq2seq("t5", vocab_size=VOCAB), LoadOptions(), tiny.tokenizer())  # type: ignore[arg-type]
    theirs = Resources(t5)
    for text in ("self(2)", "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])", "hybrid(suffix, self=1)"):
        assert built(theirs, text) is not None
    with pytest.raises(UnsupportedModelError, match="trims the LM head of a decoder-only transformers model only"):
        built(theirs, f"self(1, {table}, 4)")
    for text in (f"head({head})", f"head({head}, nodes=3)"):
        with pytest.raises(
            UnsupportedModelError, match="a head reads the hidden states of a decoder-only transformers model"
        ):
            built(theirs, text)


def test_an_encoder_decoder_drafts_for_no_other_kind_and_in_no_other_tokens(resources: Resources) -> None:
    theirs = resolve(make_seq2seq("t5", vocab_size=VOCAB), LoadOptions(), tiny.tokenizer())
    taken = Resources(resources.target, models={"t5": theirs})
    with pytest.raises(
        UnsupportedModelError, match="is an encoder-decoder model and cannot draft for a decoder-only one"
    ):
        built(taken, "model(t5)")
    other = dataclasses.replace(theirs, tokenizer=byte_level())
    with pytest.raises(VocabularyMismatchError):
        built(Resources(theirs, models={"t5": other}), "model(t5)")


def test_rules_and_lengths_by_expression() -> None:
    assert {read_rule(name).name for name in RULES} == set(RULES)
    one = Lenience(4)
    assert read_rule(one) is one
    typical: Any = read_rule("typical(0.5, delta=0.2)")
    assert (typical.eps, typical.delta, typical.exact) == (0.5, 0.2, False)
    with refused("lenience", 0.5):
        read_rule("lenience(0.5)")
    with refused("rule", "blok", UnknownNameError):
        read_rule("blok")
    for length, wanted in ((5, 5), ("5", 5), (" 0 ", 0), ("constant(3)", 3)):
        policy = read_length(length)
        assert isinstance(policy, ConstantLength) and policy.num_draft_tokens == wanted
    assert all(read_length(name) for name in LENGTHS if name not in ("constant", "acceptance"))  # which need a value
    heuristic: Any = read_length("heuristic(3, high=9)")
    assert isinstance(heuristic, HeuristicLength) and (heuristic.start, heuristic.high) == (3, 9)
    assert read_length(heuristic) is heuristic
    for bad, param, value in (
        ("-1", "length", -1),
        ("--5", "length", "--5"),
        ("²", "length", "²"),
        ("2.5", "expression", "2.5"),
        (True, "length", True),
        ("heuristic(low=0)", "low", 0),
        ("constant", "length", "constant"),
    ):
        with refused(param, value):
            read_length(bad)


def test_a_self_draft_takes_no_memory(resources: Resources) -> None:
    assert isinstance(resources.target.model, CausalModel)
    drafter: Any = built(resources, "self(1)")
    own = {p.data_ptr() for p in resources.target.model.model.parameters()}
    assert {p.data_ptr() for p in drafter.context.model.inner.model.parameters()} <= own
    assert isinstance(drafter.context.model.device, torch.device)


def test_an_error_names_the_innermost_expression_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_drafter("cascade(suffix(scale=0), max_gram; k=[[1, 1], [0, 1]])")
    assert str(caught.value).startswith("suffix(scale=0): scale=0"), str(caught.value)
