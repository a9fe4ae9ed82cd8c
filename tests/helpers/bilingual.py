"""Two byte-level tokenizers that split text differently and number their tokens differently."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foresay.text.cross_tokenizer import TokenizerPair

HELLO = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
THERE = [("t", "h"), ("th", "e"), ("l", "o"), ("Ġ", "the"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]


@cache
def tokenizer(which: str) -> Any:
    """One of the target, one of a draft, and the target's own under other numbers."""
    merges = {"target": HELLO, "draft": THERE, "renumbered": HELLO}[which]
    specials = ["<eos>", "<bos>", "<user>"] if which != "draft" else ["<pad>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*specials, *alphabet, *("".join(pair) for pair in merges)]
    if which != "target":
        random.Random(3).shuffle(words)
    inner = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def retokenizer(target: str = "target", draft: str = "draft") -> TokenizerPair:
    return TokenizerPair(tokenizer(target), tokenizer(draft))
