"""A text that is refused before it is tokenized has more tokens than the limit, whatever the tokenizer does with it."""

from __future__ import annotations

import random
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
BYTES = pre_tokenizers.ByteLevel.alphabet()


def trained(model: Any, pre: Any, trainer: Any, normalizer: Any = None) -> Any:
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_level(pattern: str = "", normalizer: Any = None, *, words: bool = True, alphabet: Any = BYTES) -> Any:
    """words: False if words are merged across spaces and line breaks."""
    options: dict[str, Any] = {"initial_alphabet": alphabet, "special_tokens": ["<s>"], "show_progress": False}
    pre: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words and not pattern)
    if pattern:
        pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre])
    return trained(BPE(), pre, trainers.BpeTrainer(vocab_size=360, **options), normalizer)


def sentences() -> Any:
    """As Llama 2: no pre-tokenizer, bytes for what has no token."""
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581"), ("a", "a")]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abdefhnrstix", *map("".join, merges)]
    made = Tokenizer(BPE({one: i for i, one in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def unigram() -> Any:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(Unigram(), pre_tokenizers.Metaspace(), trainer, normalizers.Replace(Regex(" {2,}"), " "))


def stripping() -> Any:
    made = byte_level()
    made.add_tokens([AddedToken("<end>", rstrip=True, special=True)])
    return made


def whole_words() -> Any:
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    return trained(WordLevel(unk_token="<unk>"), pre_tokenizers.WhitespaceSplit(), trainer)


MADE: dict[str, Callable[[], Any]] = {
    "gpt2": byte_level,
    "gpt4": lambda: byte_level(GPT4),
    "composed": lambda: byte_level(GPT4, normalizers.NFKC()),
    "some bytes": lambda: byte_level(alphabet=[]),
    "llama2": sentences,
    "unigram": unigram,
    "strips": stripping,
    "crossing": lambda: byte_level(words=False),
    "words": whole_words,
}


def texts(count: int) -> list[str]:
    """Words, runs of one character, blanks, bytes that have no token, and characters that a normalizer shortens."""
    dice = random.Random(0)
    parts = ["the", "river", " ", "\n", "  \n", "a" * 40, " " * 40, "東京。\n", "ab "]
    parts += ["\u1100\u1161\u11a8", "\U0001d7ce", "<end>", "<s>", "\U000f0000", "12345"]
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


@pytest.mark.parametrize("name", MADE)
def test_what_is_refused_does_not_fit(name: str) -> None:
    assert wrong(MADE[name]()) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("some bytes", {"missing": b""}), ("gpt2", {"longest": 2}), ("strips", {"longest": 8}), ("unigram", {"longest": 8}),
        ("crossing", {"cuts": tuple(cut for cut, _ in excess._CUTS)}),
    ],
)  # fmt: skip
def test_other_bounds_would_be_wrong(name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: of dropped bytes, of the longest token, of tokens that stand for any number of bytes or cross a cut."""
    tokenizer = MADE[name]()
    fields = {"longest": excess._read(tokenizer).longest if "cuts" not in change else None, **change}
    monkeypatch.setattr(excess, "_read", lambda _: excess._Facts(**fields))
    assert wrong(tokenizer)


@pytest.mark.parametrize("name", ["gpt2", "gpt4", "llama2"])
def test_long_texts_are_refused_without_being_tokenized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, honest, seen = MADE[name](), PreTrainedTokenizerFast.__call__, list[int]()

    def watched(self: Any, text: str, **options: Any) -> Any:
        seen.append(len(text))
        return honest(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", watched)
    for text in ("the river\n" * 4000, "a" * 40_000, " " * 40_000, "東京。\n" * 9000):
        for prompt in (text, FillIn("a", text)):
            with pytest.raises(ContextLengthError, match=r"has at least \d+ tokens, and the model's context is 101"):
                encode(prompt, tokenizer, limits=Limits(100))
    assert sum(seen) < 20_000


def test_a_chat_is_measured_as_its_template_writes_it() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    blank = [{"role": "user", "content": " " * 90_000 + "the sea"}]
    assert len(encode(blank, tokenizer, limits=Limits(100))) < 10


def with_text(place: str, text: str) -> tuple[list[Any], ChatOptions]:
    """Messages and options with a text somewhere."""
    own = dict.fromkeys(("content", "reasoning", "arguments", "tools", "variables"), "") | {place: text}
    call = {"type": "function", "function": {"name": "look", "arguments": {"for": own["arguments"]}}}
    turn = {"role": "assistant", "content": own["content"], "reasoning_content": own["reasoning"], "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "look", "description": own["tools"], "parameters": {}}}
    return [turn], ChatOptions(tools=[tool], variables={"date": own["variables"]})


@pytest.mark.parametrize("place", ["content", "reasoning", "arguments", "tools", "variables"])
def test_a_text_is_counted_wherever_it_is(place: str) -> None:
    """By its tokens and by the memory that they take; without a text there are few of both (control)."""
    tokenizer, needed = byte_level(), list[int]()
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}{{ date }}{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    for text in ("the sea " * 9000, "<|" * 30_000):
        messages, options = with_text(place, text)
        with pytest.raises(ContextLengthError, match="at least"):
            encode(messages, tokenizer, options, Limits(100))
        encode(messages, tokenizer, options, Limits(reserve=needed.append))
        assert needed.pop() > TOKENIZING_BYTES * len(text)
    messages, options = with_text(place, "")
    encode(messages, tokenizer, options, Limits(1000, needed.append))
    assert needed.pop() < TOKENIZING_BYTES * 1000


def test_a_prediction_is_tokenized_as_far_as_it_is_needed() -> None:
    tokenizer, needed = byte_level(), list[int]()
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
