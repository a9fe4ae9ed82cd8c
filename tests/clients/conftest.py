"""Servers over small models, and no connections to other machines."""

from __future__ import annotations

import os

from helpers.client_server import OFFLINE, Served, make_models

os.environ.update(OFFLINE)  # clients read it when they are imported

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), f"a connection to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def writer(folders: Path) -> Iterator[Served]:
    """A model that writes a text, a call or JSON, as its template chooses."""
    served = Served(folders / "writer", "--length", "16")  # a fixed number: calls arrive in large pieces
    yield served
    served.close()


@pytest.fixture(scope="session")
def random(folders: Path) -> Iterator[Served]:
    """A model whose scores depend on the whole text."""
    served = Served(folders / "random", "--dtype", "fp32")
    yield served
    served.close()
