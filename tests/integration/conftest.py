"""The command line in this process, and the tiny models that its tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import tiny


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tiny.Shell:
    return tiny.Shell(monkeypatch, capsys)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a chat template."""
    return tiny.save(tmp_path_factory.mktemp("plain") / "tiny")


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    return tiny.save(tmp_path_factory.mktemp("chat") / "tiny", chat=True)
