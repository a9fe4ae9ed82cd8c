"""The servers that cases are sent to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.cases.servers import Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp)
    yield running
    running.close()
