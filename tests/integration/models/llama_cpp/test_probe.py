"""Whether llama.cpp's layouts work is found out in a process of its own, which may die."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresay.errors import ModelLoadError
from foresay.models.llama_cpp import probe

DIES = "import os, signal, sys\nif sys.argv[2] in {kinds!r}: os.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama.cpp"


def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    script = tmp_path / "trial.py"
    script.write_text(text)
    monkeypatch.setattr(probe, "__file__", str(script))


def works() -> bool:
    return probe.extra_buffers_work(Path("a.gguf"), "Q4_1 F32", "1")


def test_kernels_that_work_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    trial(tmp_path, monkeypatch, "")
    assert works()
    [kept] = cache.iterdir()
    assert json.loads(kept.read_text())["extra_buffers"] is True
    trial(tmp_path, monkeypatch, DIES.format(kinds="01"))
    assert works(), "what is kept is not tried again"
    with pytest.raises(ModelLoadError):
        probe.extra_buffers_work(Path("a.gguf"), "Q4_1 F32", "2")  # another version is
    kept.write_text("{")
    with pytest.raises(ModelLoadError, match="signal 11"):
        works()


def test_kernels_that_crash_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial(tmp_path, monkeypatch, DIES.format(kinds="1"))
    assert not works() and "signal 11" in caplog.text
    caplog.clear()
    assert not works() and not caplog.records


def test_a_file_that_cannot_be_decoded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial(tmp_path, monkeypatch, "raise SystemExit('the file cannot be loaded')")
    with pytest.raises(ModelLoadError, match="the file cannot be loaded"):
        works()


def test_a_trial_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    trial(tmp_path, monkeypatch, "import sys, time\nif sys.argv[2] == '1': time.sleep(60)")
    monkeypatch.setattr(probe, "_LIMIT_S", 1.0)
    assert not works() and not cache.exists(), "another time it may go well"


def test_a_folder_that_keeps_nothing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    trial(tmp_path, monkeypatch, "")
    cache.parent.write_text("a file")
    assert works()
