"""Every name of `tokenizer.ggml.pre`: the ids of its family's published patterns for random texts."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Regex, pre_tokenizers

from foresay.errors import ModelLoadError
from foresay.models.gguf import tokenizer as building
from foresay.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from foresay.models.sources.loading import load_tokenizer
from helpers.gguf_vocabularies import MARKS, byte_level, texts, write_vocabulary

TEXTS = texts(200)


def split(pattern: str, behavior: str = "isolated") -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior)


def bytes_of(*, words: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


# -- the rules as others publish them ----------------------------------------------------------------------------------

S = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + S + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + S + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
DEEPSEEK3 = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", MARKED + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
IDEOGRAPHS = "[一-龥\u0800-一가-\ud7ff]+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        + S
        + "?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        + S
        + "?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
JAIS2 = S + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)"
    r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"

PUBLISHED: dict[str, list[Any]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": [LLAMA3],
    "dbrx smaug-bpe glm4 chatglm-bpe": [LLAMA3],
    "minicpm5": [r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")],
    "jais-2": [JAIS2],
    "deepseek-llm": [
        *(split(one) for one in (r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", IDEOGRAPHS)),
        pre_tokenizers.Digits(individual_digits=True),
        bytes_of(),
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}"],
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": DEEPSEEK3,
    "spark2_5": [*DEEPSEEK3[:2], MARKED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"],
    "youtu": [YOUTU, GPT4O.replace("{1,3}", "")],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        bytes_of(words=True),
        pre_tokenizers.Digits(individual_digits=False),
        split("[0-9][0-9][0-9]"),
    ],
    "starcoder refact smollm codeshell exaone minerva-7b mellum2 command-r": [
        pre_tokenizers.Digits(individual_digits=True),
        bytes_of(words=True),
    ],
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
    "roberta-bpe exaone4 jais trillion granite-docling mpt olmo": [bytes_of(words=True)],
    "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2 qwen2": [QWEN2],
    "qwen35": [S + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "poro-chat bloom gpt3-finnish": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), bytes_of()],
    "viking": [BLOOM, r"\p{N}"],
    "tekken": [GPT4O.replace("{1,3}", "").replace(S + "?", "")],
    "chameleon": [
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ],
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": [GPT4O],
    "tiny_aya cohere2moe": [split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(GPT4O), bytes_of()],
    "kimi-k2": [KIMI],
    "superbpe": [split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), bytes_of()],
    "bailingmoe bailingmoe2 llada-moe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+"
    ],
    "seed-coder": [S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "ufakzeka": [QWEN2.removeprefix(S + "|")],
    "afmoe": [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN, DEEPSEEK3[2]],
    "laguna": [split(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), split(QWEN2), bytes_of()],
    "exaone-moe": [
        S
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
}
"""Names -> patterns as llama.cpp or the family writes them, or the steps of the family's tokenizer.json."""
COMPOSED = {"qwen2", "qwen35", "command-r", "mpt", "olmo"}
"""Families whose own tokenizer composes characters first, which llama.cpp leaves out."""
WITHOUT_MERGES = {*next(iter(n for n in PUBLISHED if "llama-bpe" in n)).split(), "minicpm5", "youtu", "tekken"} | {
    "granite-embed-multi-97m"
}


@cache
def reference(names: str, ignore_merges: bool, composed: bool) -> list[list[int]]:
    """Ids of the texts by the published rule."""
    inner, steps = byte_level(ignore_merges), PUBLISHED[names]
    inputs = [unicodedata.normalize("NFC", text) if composed else text for text in TEXTS]
    if not isinstance(steps[0], str):
        inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return [inner.encode(text).ids for text in inputs]
    inner.pre_tokenizer = bytes_of()
    patterns = [regex.compile(one, regex.V1) for one in steps]
    marks = regex.compile("(" + "|".join(map(regex.escape, MARKS)) + ")")
    found = []
    for text in inputs:
        pieces = [
            piece
            for part in marks.split(text)
            if part
            for piece in ([part] if part in MARKS else isolated(part, patterns))
        ]
        found.append(inner.encode(pieces, is_pretokenized=True).ids)
    return found


def isolated(text: str, patterns: list[Any]) -> list[str]:
    """The pieces of a text: each match of a pattern within the pieces of the one before, and what lies between."""
    pieces = [text]
    for pattern in patterns:
        split_more = []
        for piece in pieces:
            at = 0
            for match in pattern.finditer(piece):
                split_more += [piece[at : match.start()], match[0]]
                at = match.end()
            split_more.append(piece[at:])
        pieces = [piece for piece in split_more if piece]
    return pieces


RUNS = {" ": "a", "Aa": "", "!": "", "\n": "a"}


def backend_of(path: Path, pre: str | None) -> Any:
    return load_tokenizer(write_vocabulary(path / "a.gguf", pre=pre, add_bos_token=False)).backend_tokenizer


def ids_of(backend: Any) -> list[list[int]]:
    return [backend.encode(text).ids for text in TEXTS]


def test_the_table_has_every_name_of_llama_cpp() -> None:
    names = [name for names in PUBLISHED for name in names.split()]
    marked = {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}  # spaces are U+2581; see test_tokenizer.py
    assert len(names) == len(set(names)) and {*names, *marked} == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("names", PUBLISHED)
def test_each_name_splits_as_published(tmp_path: Path, names: str) -> None:
    """One name of each rule is read from a file. Its steps are linear in runs of one kind.

    An expression that looks at the rest of a text from each character would take minutes.
    """
    for name in {PRE_TOKENIZERS[one]: one for one in names.split()}.values():
        backend = backend_of(tmp_path, name)
        assert ids_of(backend) == reference(names, name in WITHOUT_MERGES, name in COMPOSED)
    for name in names.split():
        rule = PRE_TOKENIZERS[name]
        assert (rule.ignore_merges, rule.composes) == (name in WITHOUT_MERGES, name in COMPOSED), name
    digits = 100_000 if names in ("superbpe", "tiny_aya cohere2moe", "afmoe") else 20_000
    for run, count, last in (("1", digits, "a"), *((run, 20_000, last) for run, last in RUNS.items())):
        text = run * count + last
        assert sum(len(piece) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)) == len(text)


def test_the_texts_tell_the_rules_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another name's rule, or one without a step, gives other ids."""
    found = [reference(names, False, False) for names in PUBLISHED]
    names = [one.split()[0] for one in PUBLISHED]
    same = [(a, b) for i, a in enumerate(names) for j, b in enumerate(names) if i < j and found[i] == found[j]]
    assert same == [("llama3", "dbrx"), ("stablelm2", "bailingmoe")]  # the first pair differs in its flags
    monkeypatch.setattr(building, "PRE_TOKENIZERS", {"gpt-2": PRE_TOKENIZERS["qwen2"]})
    assert ids_of(backend_of(tmp_path, "gpt-2")) != reference("default", False, False)


def test_an_issue_of_people(tmp_path: Path) -> None:
    """The digits and signs of "1234(a" under DeepSeek's rules."""
    for name, pieces in (("deepseek-v3", ["123", "4", "(a"]), ("deepseek-coder", ["1", "2", "3", "4", "(", "a"])):
        found = backend_of(tmp_path, name).pre_tokenizer.pre_tokenize_str("1234(a")
        assert [piece for piece, _ in found] == pieces


def test_an_unknown_name_is_refused_and_a_missing_one_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre is 'qwen9'; allowed is one of llama\.cpp's"):
        backend_of(tmp_path, "qwen9")
    assert caplog.messages == []
    assert ids_of(backend_of(tmp_path, None)) == reference("default", False, False)
    [line] = caplog.messages
    assert "does not state how it splits texts (tokenizer.ggml.pre)" in line
