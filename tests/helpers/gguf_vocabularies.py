"""Tiny vocabularies as GGUF files without weights, and texts that take every branch of the patterns that split them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from helpers.gguf_image import Image

MARKS = {"<|im_start|>": 3, "<|im_end|>": 3, "<｜Assistant｜>": 3, "<think>": 4, "</think>": 4, "    ": 4}
"""Control and user-defined tokens, at the end of each vocabulary."""
WORDS = (
    "hello world the and of THE HTMLParser camelCase snake_case x1y2 it's I'LL WE'VE don't 'S 're ' ! ? !? ... -> (a )[ <= ; // "
    "$5.00 #x _a_ `c` ~^| «x» naïve Größe ÉCOLE e\u0301 Привет мир مرحبا ٣٤٥ שלום नमस्ते हिन्दी १२३ বাংলা ১২৩ ไทย ภาษา ๑๒ "
    "한국어 日本語 カタカナ ひらがな 中文字符 ，。！ 「」 …。 Ελληνικά ქართული Հայերեն አማርኛ 😀 "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 🇩🇪 ❤️ ½ ²³ Ⅻ ﬁ ǅ 0 7 23 456 1234 12345678 3.14 1,000"
)
BLANKS = (" ", " ", " ", "  ", "   ", "     ", "\n", "\n\n", "\r\n", "\n \n", "\t", "\u00a0", "\u3000", "\u2028")


def texts(count: int = 500, seed: int = 0, marks: Sequence[str] = tuple(MARKS)) -> list[str]:
    """Random texts of white space, digits, letters of several scripts, emoji, and marks within them."""
    dice = random.Random(seed)

    def part() -> str:
        kind = dice.random()
        return dice.choice(BLANKS if kind < 0.4 else marks if kind < 0.5 and marks else WORDS.split())

    return ["".join(part() for _ in range(dice.randrange(1, 20))) for _ in range(count)]


@cache
def trained() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges learned without any splitting, so that ids depend on where a text is split."""
    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts(600, seed=1, marks=()), BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    tokens = sorted(inner.get_vocab(), key=inner.get_vocab().get)
    merges = [tuple(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]
    return tokens, merges


def byte_level(ignore_merges: bool = False) -> Tokenizer:
    """The trained vocabulary with its marks, but neither a pre-tokenizer nor a normalizer."""
    tokens, merges = trained()
    ids = {token: i for i, token in enumerate([*tokens, *MARKS])}
    inner = Tokenizer(BPE(ids, merges, ignore_merges=ignore_merges))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([mark for mark, kind in MARKS.items() if kind == 3])
    inner.add_tokens([mark for mark, kind in MARKS.items() if kind == 4])
    return inner


def write_vocabulary(
    path: Path,
    tokens: Sequence[str] | None = None,
    types: Sequence[int] | None = None,
    *,
    merges: Sequence[tuple[str, str]] | None = None,
    family: str = "llama",
    others: Mapping[str, Any] | None = None,
    **values: Any,
) -> Path:
    """A file with a vocabulary, by default the trained one with its marks.

    values: "tokenizer.ggml." keys without that prefix. others: keys in full.
    """
    if tokens is None:
        own, merges = trained()
        tokens, types = [*own, *MARKS], [*[1] * len(own), *MARKS.values()]
    pairs = None if merges is None else [" ".join(pair) for pair in merges]
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": [*tokens], "token_type": types, "merges": pairs, **values}
    stored = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return Image([], []).changed({"general.architecture": family, **stored, **(others or {})}).write(path)
