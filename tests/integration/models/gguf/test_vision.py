"""GGUF files whose model reads images in other programs: texts are computed as by the language model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from foresay.errors import ModelLoadError
from foresay.models.sources.loading import load_model
from helpers import gguf_files, tiny
from helpers.families import make
from helpers.gguf_scores import difference, scores

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2vl": ("qwen2", {"use_sliding_window": False}),
    "qwen3vl": ("qwen3", {"head_dim": 16}),
    "qwen3vlmoe": ("qwen3_moe", {"head_dim": 16, "mlp_only_layers": [], "moe_intermediate_size": 32}),
}


def file_of(name: str, path: Path, monkeypatch: pytest.MonkeyPatch, sections: list[int] | None) -> tuple[Path, Any]:
    family, changes = CASES[name]
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96, **changes}
    model, intact = make(family, 3, **sizes), gguf.GGUFWriter.add_vocab_size

    def more(writer: gguf.GGUFWriter, size: int) -> None:
        intact(writer, size)
        if name != "qwen2vl":
            writer.add_num_deepstack_layers(3)
        if sections is not None:
            writer.add_rope_dimension_sections(sections)

    monkeypatch.setitem(gguf_files._NAMES, family, name)
    monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", more)
    return gguf_files.write_gguf(path, model), model


@pytest.mark.parametrize("name", CASES)
def test_texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path, reference = file_of(name, tmp_path / "tiny.gguf", monkeypatch, [2, 3, 3, 0])
    assert difference(path, scores(reference)) < 1e-5
    assert "for text only" in caplog.text


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sections", [None, [2, 3, 2, 0], [9, -1, 0, 0]])
def test_positions_that_do_not_fit_a_head_are_refused(
    name: str, sections: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = file_of(name, tmp_path / "tiny.gguf", monkeypatch, sections)
    with pytest.raises(ModelLoadError, match="dimension_sections"):
        load_model(path)
