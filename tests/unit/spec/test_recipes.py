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
from foresay import Generator, change, load
from foresay.decoding.acceptance import RULES, Lenience
from foresay.drafters import MaxGram
from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ModelNotFoundError, UnknownNameError, UnsupportedModelError, VocabularyMismatchError
from foresay.lengths import LENGTHS, ConfidenceLength, ConstantLength, HeuristicLength, ThroughputLength
from foresay.models.drafts.files import write_draft
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
def resources(tmp_path_factory: pytest.TempPathFactory) -> Resources:
    folder = tiny.save(tmp_path_factory.mktemp("target"))
    return Resources(resolve(folder, LoadOptions(dtype="fp32"), None), LoadOptions(dtype="fp32"))


@pytest.fixture(scope="module")
def files(resources: Resources, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of the target, of a head and of a block drafter for it, and a table.

    In the table every token is followed by the next one; ids from 10 to 19 make up the corpus.
    """
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("head", "block", "table")}
    write_draft(random_head(resources.target.model), Path(folders["head"]))  # type: ignore[arg-type]
    write_draft(random_block(resources.target.model), Path(folders["block"]))  # type: ignore[arg-type]
    counts = np.zeros(VOCAB, dtype=np.int64)
    counts[10:20] = np.arange(20, 10, -1)
    folders["table"] += "/table.safetensors"
    table = NgramTable(np.roll(np.arange(VOCAB), -1), counts, fingerprint=tokenizer_fingerprint(tiny.tokenizer()))
    table.save(folders["table"])
    return {**folders, "folder": str(resources.target.name)}


def built(resources: Resources, text: str) -> Any:
    return read_drafter(text).prepare(resources)()


BUILT = {
    "none": "NoneType",
    "prompt_lookup(max_ngram=3)": "PromptLookup",
    "max_gram(table={table})": "MaxGram",
    "ngram_store(n=3, levels=one)": "NgramStoreDrafter",
    "suffix(scale=1.5)": "SuffixDrafter",
    "model({folder})": "ModelDrafter",
    "suffix_tree(branches=2)": "SuffixTreeDrafter",
    "tree({folder}, branches=3)": "ModelTreeDrafter",
    "head({head})": "HeadDrafter",
    "block({block}, confidence=0.3)": "BlockDrafter",
    "self(2)": "SelfDrafter",
    "hybrid(suffix, head={head}; min_match=2, k=3)": "Hybrid",
    "cascade(model={folder}, self=1, max_gram(table={table}); k=[[2,1,1],[0,1,1],[0,0,1]])": "Cascade",
}


def test_every_name_builds_its_drafter(resources: Resources, files: dict[str, str]) -> None:
    assert {text.split("(")[0] for text in BUILT} | {"mtp"} == DRAFTERS.keys(), (
        "which needs a checkpoint with such layers"
    )
    for text, kind in BUILT.items():
        drafter = built(resources, text.format(**files))
        assert type(drafter).__name__ == kind, text
        assert drafter is None or built(resources, text.format(**files)) is not drafter, "each engine has its own"


def test_settings_reach_the_drafter_and_files_are_read_once(resources: Resources, files: dict[str, str]) -> None:
    lookup = built(resources, "prompt_lookup(max_ngram=7, min_ngram=3)")
    assert (lookup.max_ngram, lookup.min_ngram) == (7, 3)
    store = built(resources, "ngram_store(5, one, 3, false, false, 99)")
    assert store._settings == {"n": 5, "levels": "one", "max_contexts": 99}
    assert (store.filler_top_k, store.stop_unknown, store._shared) == (3, False, None)
    suffix = built(resources, "suffix(scale=4, min_match=2, keep=false)")
    assert (suffix.scale, suffix.min_match, suffix.memory) == (4.0, 2, None)
    assert built(resources, "suffix(keep=true, max_tokens=77)").memory.max_tokens == 77
    assert read_drafter("cascade(max_gram; k=[[9]])").num_draft_tokens == 9
    table, folder = files["table"], files["folder"]
    members = f"model={folder}, model={folder}, self=1, max_gram({table})"
    matrix = "[[2,1,1,1],[0,0,0,0],[0,0,0,0],[0,0,0,0]]"
    cascade = built(resources, f"cascade({members}; k={matrix}, lenience=3)")
    first, second, own, gram = cascade.drafters
    assert cascade.k[0] == (2, 1, 1, 1) and cascade.lenience == 3.0
    assert first.context.model.inner is second.context.model.inner is resources.models[folder].model
    assert first.context is not second.context
    assert (
        gram.table is resources.tables[table] is resources.table(table) and built(resources, "max_gram").table is None
    )
    known = {p.data_ptr() for p in resources.target.model.model.parameters()}  # type: ignore[attr-defined]
    assert {p.data_ptr() for p in own.context.model.inner.model.parameters()} <= known, "a self-draft takes no memory"


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
    resources: Resources, files: dict[str, str], other: str, k: int
) -> None:
    expression = f"hybrid(suffix, {other.format(**files)}"
    assert built(resources, expression + ")").k == k
    assert built(resources, expression + "; k=6)").k == 6


def test_what_does_not_read_the_target_is_made_without_one() -> None:
    """Layers and tokenizer are kept from it."""
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    absent = Resources(LoadedModel("absent", model, None, frozenset()))
    for text in ("none", "suffix(scale=2)", "ngram_store(n=4)", "prompt_lookup(max_ngram=3)", "max_gram"):
        assert not read_drafter(text).reads_target
        read_drafter(text).prepare(absent)()
    assert not read_drafter("cascade(suffix, max_gram; k=[[2, 2], [0, 2]])").reads_target
    for text in ("max_gram(/a/table)", "self(2)", "model(/a)", "cascade(self=2, max_gram; k=[[2, 2], [0, 2]])"):
        assert read_drafter(text).reads_target


def test_a_table_for_another_vocabulary_is_refused(resources: Resources, tmp_path: Path) -> None:
    """One of CS-Drafting's lists, which has no fingerprint: its length is that of the vocabulary it was made for."""
    path = tmp_path / "bigrams.json"
    texts = [f"max_gram({path})", f"cascade(self=1, max_gram({path}); k=[[1, 2], [0, 1]])", f"self(1, {path}, 4)"]
    path.write_text(json.dumps([1] * 100))
    for text in texts:
        with pytest.raises(VocabularyMismatchError, match=rf"of 100 tokens, but the one in use has {VOCAB}"):
            built(resources, text)
    path.write_text(json.dumps([1] * VOCAB))
    for text in texts[:2]:  # a list has no counts to trim a head by
        assert built(dataclasses.replace(resources, tables={}), text) is not None
    NgramTable(np.arange(VOCAB), fingerprint="f" * 64).save(tmp_path / "foreign.safetensors")
    with pytest.raises(VocabularyMismatchError, match="built with another tokenizer"):
        built(resources, f"max_gram({tmp_path}/foreign.safetensors)")


def test_heads_are_trimmed_to_a_tables_frequent_tokens(resources: Resources, files: dict[str, str]) -> None:
    eos = sorted(resources.target.eos_token_ids)
    for text, last in (
        ("self(2, vocabulary={table}, vocabulary_size=4)", 13),
        ("model({folder}, {table}, 4)", 13),
        ("self(1, vocabulary={table}, coverage=0.5)", 14),  # 20 + ... + 16 of 155
    ):
        inner = built(resources, text.format(**files)).context.model.inner
        assert inner.subset.token_ids.tolist() == [*eos, *range(10, last + 1)] and inner.vocab_size == VOCAB, text


@pytest.mark.parametrize("drafter", [MaxGram, MaxGram(), lambda: MaxGram()], ids=["class", "instance", "function"])
def test_a_drafter_may_be_a_class_an_instance_or_a_function(files: dict[str, str], drafter: Any) -> None:
    out = load(files["folder"], drafter=drafter, dtype="fp32").generate(PROMPT, max_new_tokens=24)
    assert out.draft_error is None and out.stats.num_drafted > 0


@pytest.mark.parametrize("name", ["suffix(keep={})", "ngram_store(n=3, keep={})", "cascade(suffix(keep={}); k=[[8]])"])
def test_forget_clears_what_outlives_requests(files: dict[str, str], name: str) -> None:
    for keep in (True, False):
        drafter = name.format(str(keep).lower())
        model = load(files["folder"], drafter=drafter, num_draft_tokens=6, dtype="fp32")
        first = model.generate(PROMPT, max_new_tokens=24)
        again = model.generate(PROMPT, max_new_tokens=24)
        assert (again.stats.num_passes < first.stats.num_passes) == keep
        model.forget()
        assert model.generate(PROMPT, max_new_tokens=24).stats.num_passes == first.stats.num_passes
        assert first.text == again.text and again.draft_error is None


@pytest.fixture(scope="module")
def generator(files: dict[str, str]) -> Generator:
    return load(files["folder"], drafter="suffix(keep=true)", length=7, rule="block", max_batch_size=3, dtype="fp32")


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
        ("cascade(model=./nowhere, max_gram; k=[[4, 2], [0, 3]])", "no such file or folder: './nowhere'"),
        ("hybrid(suffix, head(org/name))", "/no/such/target"),
    ],
)
def test_missing_files_are_named_before_the_target_is_loaded(drafter: str, problem: str) -> None:
    with pytest.raises(ModelNotFoundError, match=re.escape(problem)):
        foresay.load("/no/such/target", drafter=drafter)


def test_lengths_that_read_probabilities_need_them(generator: Generator) -> None:
    for length in ("confidence(threshold=0.5)", "entropy"):
        for drafter in ("suffix", "suffix_tree", "hybrid(suffix, max_gram)"):
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


WRONG: list[tuple[str, str, Any]] = [
    ("none(1)", "drafter", "none(1)"),
    ("prompt_lookup(max_ngram=1)", "min_ngram", 2),
    ("prompt_lookup(min_ngram=0)", "min_ngram", 0),
    ("prompt_lookup(max_ngram=65)", "min_ngram", 2),
    ("prompt_lookup(max_ngram=2.5)", "max_ngram", 2.5),
    ("prompt_lookup(min_ngram=true)", "min_ngram", True),
    ("max_gram(table=3)", "table", 3),
    ("ngram_store(n=1, keep=true)", "n", 1),
    ("ngram_store(levels=two)", "levels", "two"),
    ("ngram_store(keep=1)", "keep", 1),
    ("ngram_store(filler_top_k=65)", "filler_top_k", 65),
    ("ngram_store(filler_top_k=0)", "filler_top_k", 0),
    ("ngram_store(stop_unknown=no)", "stop_unknown", "no"),
    ("ngram_store(max_contexts=8)", "max_contexts", 8),
    ("suffix(scale=0.05)", "scale", 0.05),
    ("suffix(min_match=0)", "min_match", 0),
    ("suffix(keep=yes)", "keep", "yes"),
    ("suffix(keep=true, max_tokens=-1)", "max_tokens", -1),
    ("model", "drafter", "model"),
    ("model(7)", "name", 7),
    ("model(A, vocabulary=7)", "vocabulary", 7),
    ("model(A, vocabulary_size=7)", "vocabulary_size", 7),
    ("self(0)", "layers", 0),
    ("self(1, T, vocabulary_size=0)", "vocabulary_size", 0),
    ("self(1, coverage=0)", "coverage", 0),
    ("cascade(max_gram)", "drafter", "cascade"),
    ("cascade(k=[[1]])", "drafters", ()),
    ("cascade(max_gram; k=[[1, 2]])", "k", [[1, 2]]),
    ("cascade(max_gram; k=[[1]], lenience=0)", "lenience", 0),
    ("cascade(suffix(scale=0); k=[[1]])", "scale", 0),
    ("cascade(lenient=2, max_gram; k=[[1]])", "lenient", 2),
    ("hybrid(lenient=2, max_gram)", "lenient", 2),
]


def test_settings_are_checked_before_anything_is_loaded() -> None:
    for text, param, value in WRONG:
        with refused(param, value):
            read_drafter(text)
    for text, name in (("sufix", "sufix"), ("cascade(maxgram; k=[[1]])", "maxgram")):
        with refused("drafter", name, UnknownNameError):
            read_drafter(text)
    with refused("scale", 0) as caught:
        read_drafter("cascade(suffix(scale=0), max_gram; k=[[1, 1], [0, 1]])")
    assert str(caught.value).startswith("suffix(scale=0): scale=0"), "the innermost expression once"


def test_what_only_the_models_can_report(resources: Resources) -> None:
    for text, param, value in (
        ("self(3)", "layers", 3),
        ("cascade(max_gram, suffix; k=[[1,1],[0,1]])", "k[1]", [0, 1]),
        ("cascade(none, max_gram; k=[[1,1],[0,0]])", "drafter", "none"),
    ):
        with refused(param, value):
            built(resources, text)
    wordy = dataclasses.replace(resources.target, model=object())
    with pytest.raises(UnsupportedModelError, match="self-speculation needs a transformers model"):
        built(Resources(wordy), "self(1)")


def test_encoder_decoders(resources: Resources, files: dict[str, str]) -> None:
    """Their own first layers draft for them; heads and trimmed vocabularies do not, nor do they for another kind."""
    t5 = resolve(make_seq2seq("t5", vocab_size=VOCAB), LoadOptions(), tiny.tokenizer())  # type: ignore[arg-type]
    theirs = Resources(t5)
    for text in ("self(2)", "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])", "hybrid(suffix, self=1)"):
        assert built(theirs, text) is not None
    other = dataclasses.replace(t5, tokenizer=byte_level())
    hidden = "a head reads the hidden states of a decoder-only transformers model"
    for given, text, error, problem in (
        (theirs, "self(1, {table}, 4)", UnsupportedModelError, "trims the LM head of a decoder-only"),
        (theirs, "head({head})", UnsupportedModelError, hidden),
        (theirs, "head({head}, nodes=3)", UnsupportedModelError, hidden),
        (
            Resources(resources.target, models={"t5": t5}),
            "model(t5)",
            UnsupportedModelError,
            "cannot draft for a decoder",
        ),
        (Resources(t5, models={"t5": other}), "model(t5)", VocabularyMismatchError, None),
    ):
        with pytest.raises(error, match=problem):
            built(given, text.format(**files))


WRONG_LENGTHS: list[tuple[Any, str, Any]] = [
    ("-1", "length", -1),
    ("--5", "length", "--5"),
    ("\u00b2", "length", "\u00b2"),
    ("2.5", "expression", "2.5"),
    (True, "length", True),
    ("constant", "length", "constant"),
    ("constant(65)", "num_draft_tokens", 65),
    ("constant(true)", "num_draft_tokens", True),
    ("heuristic(0, low=1)", "start", 0),
    ("heuristic(21)", "start", 21),
    ("heuristic(low=9, high=8)", "low", 9),
    ("heuristic(low=0)", "low", 0),
    ("heuristic(high=65)", "high", 65),
    ("heuristic(up=-1)", "up", -1),
    ("heuristic(down=0.5)", "down", 0.5),
    ("confidence(1.5)", "threshold", 1.5),
    ("confidence(low=0)", "low", 0),
    ("entropy(-1)", "threshold", -1),
    ("entropy(low=21)", "low", 21),
    ("throughput(start=17)", "start", 17),
    ("throughput(high=0)", "high", 0),
]


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
    for wrong, param, value in WRONG_LENGTHS:
        with refused(param, value):
            read_length(wrong)
