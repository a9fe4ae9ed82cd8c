"""The policy's own time is 0 here: passes take simulated seconds, and a pause of the machine would change what pays."""

from __future__ import annotations

import pytest

from foresay.lengths import throughput


@pytest.fixture(autouse=True)
def policy_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "perf_counter", lambda: 0.0)
