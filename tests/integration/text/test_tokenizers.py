"""Tokenizers without weights: where they come from, what they are counted with, and the bytes of their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from foresay.errors import ModelLoadError, ModelNotFoundError
from foresay.models.sources.loading import load_tokenizer
from foresay.text.tokenizer import token_bytes, tokenizer_fingerprint, tokenizer_size
from foresay_lab.training.corpus import CorpusReader
from foresay_lab.training.ngrams import NgramCounter, count_corpus
from helpers import tiny


def test_tokenizers_are_loaded_by_any_name(tmp_path: Path, smollm2_folder: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path / "names")  # and nothing else
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "names")) == tokenizer_fingerprint(tiny.tokenizer())
    alias = load_tokenizer("smollm2-135m")
    assert tokenizer_fingerprint(alias) == tokenizer_fingerprint(load_tokenizer(smollm2_folder))
    assert tokenizer_size(alias) == 49_152
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelNotFoundError, match=r"empty' has no tokenizer \(tokenizer\.json, tokenizer\.model, \.\.\.\)"
    ):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2-135m'"):
        load_tokenizer("smollm2-135")
    (tmp_path / "a.gguf").write_bytes(b"none")
    with pytest.raises(ModelLoadError, match="download it again"):
        load_tokenizer(tmp_path / "a.gguf")


def test_a_tokenizer_without_a_fast_version(tmp_path: Path) -> None:
    slow = ByT5Tokenizer()
    assert not slow.is_fast
    assert tokenizer_fingerprint(slow) == tokenizer_fingerprint(ByT5Tokenizer())
    path = tmp_path / "a.txt"
    path.write_text("hello\nworld, hey")
    counter = NgramCounter(2, tokenizer_size(slow))
    count_corpus(counter, CorpusReader([str(path)], separator="line"), slow)
    assert counter.num_tokens == 15
    assert slow.decode([counter.table().next(slow("h", add_special_tokens=False).input_ids)]) == "e"


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
