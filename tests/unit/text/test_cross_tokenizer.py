"""Texts between two tokenizers: a growing context read again, and a draft read back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from foresay.text.cross_tokenizer import TokenizerPair
from helpers.bilingual import retokenizer, tokenizer
from helpers.making import byte_fallback


def read(told: TokenizerPair, tokens: Sequence[int], strides: Sequence[int], ahead: int = 0) -> list[int]:
    """The text that a reader makes of tokens that grow by strides, of which the last `ahead` are draft tokens each time."""
    reader, end, out = told.reader(), 0, []
    while end < len(tokens):
        end = min(len(tokens), end + strides[end % len(strides)])
        out = reader.read(tokens[:end], max(1, end - ahead))
    return out


WORDS = ["hello", "the", "there", "loll", "x", "naïve", "日本語", "😀", "9,1"]
SEPARATORS = {"spaces": " ", "runs": "  ", "lines": "\n\n", "indents": "\n    ", "eos": "<eos>", "mixed": " <eos> \n"}
PAIRS = [("target", "draft"), ("draft", "target")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", SEPARATORS)
def test_a_growing_text_reads_as_the_whole(kind: str, pair: tuple[str, str]) -> None:
    told, rng = retokenizer(*pair), random.Random(1)
    text = SEPARATORS[kind].join(rng.choice(WORDS) for _ in range(250))
    tokens = tokenizer(pair[0])(text).input_ids
    assert len(tokens) > 800, "many times settled"
    wanted = tokenizer(pair[1])(text).input_ids
    for strides, ahead in (([1, 5, 3], 0), ([7], 4), ([10_000], 0)):
        assert read(told, tokens, strides, ahead) == wanted


@pytest.mark.parametrize("which", ["from", "to"])
def test_sentencepiece_spaces_are_kept_where_a_text_is_cut(which: str) -> None:
    """Decoders that drop a first space, and tokenizers that add one, do so once and not at every cut."""

    plain, marked = tokenizer("target"), byte_fallback()
    told = TokenizerPair(*((marked, plain) if which == "from" else (plain, marked)))
    rng = random.Random(1)
    for gap in (" ", "  ", "\n", "\n  "):
        text = gap.join(rng.choice(["hello", "the", "cat", "x"]) for _ in range(300))
        tokens = told.target(text).input_ids
        assert read(told, tokens, [9]) == told.draft(text).input_ids


def test_what_only_the_target_knows_is_left_out() -> None:
    tokens = tokenizer("target")("<bos>hello<user> the<eos>x").input_ids
    assert retokenizer().reader().read(tokens, len(tokens)) == tokenizer("draft")("hello the<eos>x").input_ids
    assert retokenizer().text(tokens) == "hello the<eos>x"


def test_an_incomplete_character_waits_for_its_end() -> None:
    told, names = retokenizer(), tokenizer("target")
    tokens = names("x 日").input_ids
    reader = told.reader()
    for end in range(3, len(tokens)):
        assert reader.read(tokens[:end], end) == tokenizer("draft")("x ").input_ids
    assert reader.read(tokens, len(tokens)) == tokenizer("draft")("x 日").input_ids


def test_a_text_without_tokens_is_still_a_context() -> None:
    told = retokenizer()
    assert told.reader().read([tokenizer("target").convert_tokens_to_ids("<user>")], 1) == [int(told.shared[0][0])]


@pytest.mark.parametrize(
    ("context", "drafted", "wanted"),
    [
        ("the ", "lo", "lo"), ("x", " the", " the"), ("hell", "o the", "o the"), ("日", "本", "本"), ("x ", "<eos>", "<eos>"),
    ],
)  # fmt: skip
def test_a_draft_is_read_back_in_the_targets_tokens(context: str, drafted: str, wanted: str) -> None:
    told = retokenizer()
    tokens = told.to_target(tokenizer("target")(context).input_ids, tokenizer("draft")(drafted).input_ids)
    assert tokenizer("target").decode(tokens) == wanted
    cut = tokenizer("draft")("x日").input_ids[:-1]
    assert told.to_target(tokenizer("target")(context).input_ids, cut) == tokenizer("target")("x").input_ids
    assert told.to_target(tokenizer("target")(context).input_ids, cut[1:]) == []
