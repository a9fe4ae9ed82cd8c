"""A text that is refused before it is tokenized has more tokens than the limit, whatever the tokenizer does with it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import PreTrainedTokenizerFast

from foresay.errors import ContextLengthError
from foresay.text import excess
from foresay.text.excess import TOKENIZING_BYTES, Limits, beginning, first_tokens, lower_bound
from foresay.text.prompts import ChatOptions, FillIn, encode

CORPUS = [
    "the river, the sea and the tide; def f(x):\n    return x\n",
    "naïve café 東京 和風。\n海は広い\n\nEnd",
    " \n ab  ab\n",
    "a" * 64,
    " " * 64,
] * 9
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(model: Any, pre: Any, trainer: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(CORPUS, trainer)
    return made


def byte_level(pre: Any = None, normalizer: Any = None, *, whole: bool = True) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if whole else []
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False) if pre is None else pre
    return trained(BPE(), pre, trainer, normalizer)


def split(pattern: str) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


def sentences() -> Tokenizer:
    """As Llama 2: no pre-tokenizer, bytes for what has no token."""
    names = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"\u2581abdefhnrstix",
        "th",
        "the",
        "\u2581the",
        "\u2581\u2581",
        "aa",
    ]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581"), ("a", "a")]
    made = Tokenizer(BPE({one: i for i, one in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return made


def pieces() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(Unigram(), pre_tokenizers.Metaspace(), trainer, normalizers.Replace(Regex(" {2,}"), " "))


def stripping() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<end>", rstrip=True)])
    return made


def crossing() -> Tokenizer:
    """Words are merged across spaces and line breaks."""
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


MADE: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level,
    "gpt4": lambda: byte_level(split(GPT4)),
    "composed": lambda: byte_level(split(GPT4), normalizers.NFKC()),
    "some bytes": lambda: byte_level(whole=False),
    "llama2": sentences,
    "unigram": pieces,
    "strips": stripping,
    "crossing": crossing,
    "words": lambda: trained(
        WordLevel(unk_token="<unk>"),
        pre_tokenizers.WhitespaceSplit(),
        trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False),
    ),
}


@pytest.fixture(params=MADE)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=MADE[request.param]())


def texts(count: int) -> list[str]:
    """Words, runs of one character, blanks, bytes that have no token, and characters that a normalizer shortens."""
    dice = random.Random(0)
    parts = [
        "the",
        "river",
        " ",
        "\n",
        "  \n",
        "a" * 40,
        " " * 40,
        "東京。\n",
        "ab ",
        "\u1100\u1161\u11a8",
        "\U0001d7ce",
        "<end>",
        "<s>",
        "\U000f0000",
        "12345",
    ]
    mixed = ["".join(dice.choices(dice.sample(parts, 3), k=dice.randint(1, 120))) for _ in range(count)]
    return [*mixed, *(one * 200 for one in parts), ("<end>" + " " * 400) * 9]


def wrong(tokenizer: Any) -> list[str]:
    """Texts that are refused although they fit, or whose beginning is not theirs."""
    found = []
    for text in texts(150):
        ids = tokenizer(text).input_ids
        for most in (1, 4, 20, 100, len(ids)):
            bound, first = lower_bound(tokenizer, text, most), beginning(tokenizer, text, most)
            if (bound and not (most < bound <= len(ids))) or first != ids[: len(first)]:
                found.append(text)
    return found


def test_what_is_refused_does_not_fit(tokenizer: Any) -> None:
    assert wrong(tokenizer) == []


def test_cuts_that_a_token_crosses_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the vocabulary is not examined."""
    never = re.compile("(?!)")
    monkeypatch.setattr(excess, "_CUTS", tuple((cut, never) for cut, _ in excess._CUTS))
    assert wrong(PreTrainedTokenizerFast(tokenizer_object=crossing()))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("some bytes", {"missing": b""}), ("gpt2", {"longest": 2}), ("strips", {"longest": 8}), ("unigram", {"longest": 8}),
    ],
)  # fmt: skip
def test_other_bounds_would_be_wrong(name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: of dropped bytes, of the longest token, of tokens that stand for any number of bytes."""
    honest = excess._read
    fields = {"cuts": (), "longest": None, "missing": b""}

    def changed(tokenizer: Any) -> Any:
        own = honest(tokenizer)
        return excess._Facts(**{**fields, "longest": own.longest, **change})

    monkeypatch.setattr(excess, "_read", changed)
    assert wrong(PreTrainedTokenizerFast(tokenizer_object=MADE[name]()))


@pytest.mark.parametrize("name", ["gpt2", "gpt4", "llama2"])
@pytest.mark.parametrize("text", ["the river\n" * 4000, "a" * 40_000, " " * 40_000, "東京。\n" * 9000])
def test_long_texts_are_refused_without_being_tokenized(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=MADE[name]())
    seen: list[int] = []
    honest = PreTrainedTokenizerFast.__call__

    def watched(self: Any, text: str, **options: Any) -> Any:
        seen.append(len(text))
        return honest(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", watched)
    with pytest.raises(ContextLengthError, match=r"the prompt has at least \d+ tokens, and the model's context is 101"):
        encode(text, tokenizer, limits=Limits(100))
    with pytest.raises(ContextLengthError):
        encode(FillIn("a", text), tokenizer, limits=Limits(100))
    assert sum(seen) < 5000


def test_a_chat_is_measured_as_its_template_writes_it() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    long, blank = [{"role": "user", "content": one} for one in ("the sea " * 9000, " " * 90_000 + "the sea")]
    with pytest.raises(ContextLengthError, match="at least"):
        encode([long], tokenizer, limits=Limits(100))
    assert len(encode([blank], tokenizer, limits=Limits(100))) < 10


def told(place: str, text: str) -> tuple[list[Any], ChatOptions]:
    """Messages and options with a text somewhere."""
    call = {
        "type": "function",
        "function": {"name": "look", "arguments": {"for": text if place == "arguments" else ""}},
    }
    turn = {"role": "assistant", "content": text if place == "content" else "", "tool_calls": [call]}
    if place == "reasoning":
        turn["reasoning_content"] = text
    tool = {"name": "look", "description": text if place == "tools" else "", "parameters": {}}
    variables = {"date": text} if place == "variables" else {}
    return [turn], ChatOptions(tools=[{"type": "function", "function": tool}], variables=variables)


@pytest.mark.parametrize("place", ["content", "reasoning", "arguments", "tools", "variables"])
@pytest.mark.parametrize("text", ["the sea " * 9000, "<|" * 30_000])
def test_a_text_is_counted_wherever_it_is(place: str, text: str) -> None:
    """By its tokens and by the memory that they take; without a text there are few of both (control)."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}{{ date }}{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    needed: list[int] = []
    messages, options = told(place, text)
    with pytest.raises(ContextLengthError, match="at least"):
        encode(messages, tokenizer, options, Limits(100))
    encode(messages, tokenizer, options, Limits(reserve=needed.append))
    assert needed[0] > TOKENIZING_BYTES * len(text)
    messages, options = told(place, "")
    encode(messages, tokenizer, options, Limits(1000, needed.append))
    assert needed[1] < TOKENIZING_BYTES * 1000


def test_a_prediction_is_tokenized_as_far_as_it_is_needed() -> None:
    tokenizer, needed = PreTrainedTokenizerFast(tokenizer_object=byte_level()), list[int]()
    limits = Limits(reserve=needed.append)
    for text in ("the sea, the river\n" * 20_000, " " * 400_000, "<|" * 200_000):
        ids = first_tokens(tokenizer, text, 20, limits)
        whole = tokenizer(text).input_ids
        assert len(ids) == min(20, len(whole)) and ids == whole[:20]
    assert needed[0] < TOKENIZING_BYTES * 200 and first_tokens(tokenizer, "the sea", 20, limits)


def test_a_tokenizer_of_another_kind_refuses_nothing() -> None:
    class Letters:
        def __call__(self, text: str) -> Any:
            return type("Encoded", (), {"input_ids": list(text.encode())})

    assert lower_bound(Letters(), "a b" * 1000, 5) == 0
    assert len(encode("a b" * 1000, Letters(), limits=Limits(5))) == 3000
