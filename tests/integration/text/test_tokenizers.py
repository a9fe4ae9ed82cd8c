"""Tokenizers without weights: where they come from, and what they are counted with."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

from foresay.errors import ModelLoadError, ModelNotFoundError
from foresay.models.sources.loading import load_tokenizer
from foresay.text.tokenizer import tokenizer_fingerprint, tokenizer_size
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
