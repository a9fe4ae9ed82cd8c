"""Texts between two tokenizers: a growing context read again, and a draft read back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from foresay.text.cross_tokenizer import TokenizerPair
from helpers.bilingual import retokenizer, tokenizer
from helpers.making import byte_fallback


def read(pair: TokenizerPair, tokens: Sequence[int], strides: Sequence[int], ahead: int = 0) -> list[int]:
    """The text that a reader makes of tokens that grow by strides, of which the last `ahead` are draft tokens each time."""
    reader, end, out = pair.reader(), 0, []
    while end < len(tokens):
        end = min(len(tokens), end + strides[end % len(strides)])
        out = reader.read(tokens[:end], max(1, end - ahead))
    return out


WORDS = ["hello", "the", "there", "loll", "x", "naïve", "日本語", "😀", "9,1"]
SEPARATORS = {"spaces": " ", "runs": "  ", "lines": "\n\n", "indents": "\n    ", "eos": "<eos>", "mixed": " <eos> \n"}


@pytest.mark.parametrize("names", [("target", "draft"), ("draft", "target")], ids="-".join)
@pytest.mark.parametrize("kind", SEPARATORS)
def test_a_growing_text_reads_as_the_whole(kind: str, names: tuple[str, str]) -> None:
    pair, rng = retokenizer(*names), random.Random(1)
    text = SEPARATORS[kind].join(rng.choice(WORDS) for _ in range(250))
    tokens = tokenizer(names[0])(text).input_ids
    assert len(tokens) > 800, "many times settled"
    wanted = tokenizer(names[1])(text).input_ids
    for strides, ahead in (([1, 5, 3], 0), ([7], 4), ([10_000], 0)):
        assert read(pair, tokens, strides, ahead) == wanted


@pytest.mark.parametrize("which", ["from", "to"])
def test_sentencepiece_spaces_are_kept_where_a_text_is_cut(which: str) -> None:
    """Decoders that drop a first space, and tokenizers that add one, do so once and not at every cut."""

    plain, marked = tokenizer("target"), byte_fallback()
    pair = TokenizerPair(*((marked, plain) if which == "from" else (plain, marked)))
    rng = random.Random(1)
    for gap in (" ", "  ", "\n", "\n  "):
        text = gap.join(rng.choice(["hello", "the", "cat", "x"]) for _ in range(300))
        tokens = pair.target(text).input_ids
        assert read(pair, tokens, [9]) == pair.draft(text).input_ids


def test_texts_without_a_like_in_the_drafts_tokens() -> None:
    """Tokens of the target alone are left out, an incomplete character waits for its end, and no context is empty."""
    pair, names, draft = retokenizer(), tokenizer("target"), tokenizer("draft")
    tokens = names("<bos>hello<user> the<eos>x").input_ids
    assert pair.text(tokens) == "hello the<eos>x"
    assert pair.reader().read(tokens, len(tokens)) == draft("hello the<eos>x").input_ids
    tokens, reader = names("x 日").input_ids, pair.reader()
    for end in range(3, len(tokens)):
        assert reader.read(tokens[:end], end) == draft("x ").input_ids
    assert reader.read(tokens, len(tokens)) == draft("x 日").input_ids
    assert pair.reader().read([names.convert_tokens_to_ids("<user>")], 1) == [int(pair.shared[0][0])]


def test_a_draft_is_read_back_in_the_targets_tokens() -> None:
    pair, names, draft = retokenizer(), tokenizer("target"), tokenizer("draft")
    cut = draft("x日").input_ids[:-1]
    for context, drafted in (("the ", "lo"), ("x", " the"), ("hell", "o the"), ("日", "本"), ("x ", "<eos>")):
        before = names(context).input_ids
        assert names.decode(pair.to_target(before, draft(drafted).input_ids)) == drafted
        assert pair.to_target(before, cut) == names("x").input_ids
        assert pair.to_target(before, cut[1:]) == []
    marked = byte_fallback()
    before, both = (marked(text, add_special_tokens=False).input_ids for text in ("the", "there"))
    ours = TokenizerPair(marked, draft).to_target(before, draft("re").input_ids)
    assert ours == both[len(before) :], "no space is put before them"
