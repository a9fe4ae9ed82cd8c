"""A token's bytes, whichever way a tokenizer has of naming them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foresay.text.tokenizer import token_bytes
from helpers import tiny

TEXT = "héllo 東京 🙂\n\t\x7f"


def test_a_tokenizer_of_bytes() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer(TEXT).input_ids
    assert b"".join(token_bytes(tokenizer, one) for one in ids).decode() == TEXT
    assert any("\ufffd" in tokenizer.decode([one]) for one in ids), "of which some are no text alone"
    every = {token_bytes(tokenizer, one) for one in range(len(tokenizer))}
    assert every >= {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("strips", [False, True])
def test_bytes_named_by_number(strips: bool) -> None:
    words = {"▁a": 0, "<0xE6>": 1, "<0x9D>": 2, "<0xB1>": 3, "é": 4}
    inner = Tokenizer(BPE(words, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert b"".join(token_bytes(tokenizer, one) for one in (0, 1, 2, 3, 4)).decode() == " a東é"
