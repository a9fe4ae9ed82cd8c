"""A working folder with prompts, and the model that the commands load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresay_lab.measure import roofline
from helpers import tiny
from helpers.small_alias import share_kernels

TEXTS = ["hello world, hello", "one two three one two", "abc abc abc", "hello", "x = 1\ny = 2"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of memory is measured in a moment."""
    monkeypatch.setattr(roofline, "BLOCK_BYTES", 1 << 16)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with five prompts of two categories in p.jsonl, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORESAY_CACHE", str(share_kernels(tmp_path / "cache")))
    lines = [json.dumps({"id": f"t{i}", "prompt": text, "category": "ab"[i % 2]}) for i, text in enumerate(TEXTS)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def which(folder: Path) -> list[str]:
    return ["--model", str(folder), "--dtype", "fp32"]


@pytest.fixture(scope="session")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the tiny model, made by the command, next to its prompts in p.txt."""
    path = tmp_path_factory.mktemp("made") / "r.jsonl"
    prompts = path.with_name("p.txt")
    prompts.write_text("hello world, hello\none two three one two\nabc abc abc\n")
    args = ["record", str(path), "--model", str(folder), "--dtype", "fp32", "--prompts", str(prompts), "-n", "24"]
    assert tiny.printed(*args) == f"{path}: 3 outputs, 72 tokens\n"
    return path
