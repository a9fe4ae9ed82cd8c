"""The moving average of acceptance against its baseline."""

from __future__ import annotations

import logging
import random

import pytest

from foresay.decoding.outcome import Step
from foresay.server.acceptance import BASELINE, WINDOW, Acceptance, AcceptanceMonitor


def step(accepted: int, tested: int) -> Step:
    return Step(0, (1,) * (accepted + 1), (), tested, accepted, (1,) * tested)


def fed(monitor: AcceptanceMonitor, rate: float, tokens: int, seed: int = 0) -> Acceptance:
    dice = random.Random(seed)
    for _ in range(tokens // 4):
        monitor.take("suffix", step(sum(dice.random() < rate for _ in range(4)), 4))
    return monitor.methods["suffix"]


def test_the_average_follows_and_the_baseline_stays(caplog: pytest.LogCaptureFixture) -> None:
    monitor = AcceptanceMonitor("tiny")
    with caplog.at_level(logging.WARNING, "foresay.server"):
        first = fed(monitor, 0.6, BASELINE // 2)
        assert first.baseline is None and first.ratio == 1.0 and first.average == pytest.approx(0.6, abs=0.02)
        found = fed(monitor, 0.6, BASELINE)
        assert found.baseline == pytest.approx(0.6, abs=0.02) and found.ratio == pytest.approx(1.0, abs=0.06)
        assert not caplog.records
        fed(monitor, 0.3, 4 * WINDOW)
        assert found.baseline == pytest.approx(0.6, abs=0.02) and found.average == pytest.approx(0.3, abs=0.04)
        assert found.ratio == pytest.approx(0.5, abs=0.08)
        fed(monitor, 0.3, 4 * WINDOW)
        assert len(caplog.records) == 1, "logged once"
        assert "acceptance of suffix for tiny has fallen: 4" in caplog.text and "60% at first" in caplog.text.replace(
            "59%", "60%"
        )
        fed(monitor, 0.6, 6 * WINDOW)
        fed(monitor, 0.3, 6 * WINDOW)
    assert len(caplog.records) == 2, "and again after it had recovered"


def test_no_draft_and_no_acceptance() -> None:
    monitor = AcceptanceMonitor("tiny")
    monitor.take("none", step(0, 0))
    assert monitor.methods == {}
    found = fed(monitor, 0.0, 2 * BASELINE)
    assert found.baseline == 0.0 and found.ratio == 1.0 and not found.has_fallen


def test_methods_are_apart() -> None:
    monitor = AcceptanceMonitor("tiny")
    monitor.take("a", step(4, 4))
    monitor.take("b", step(0, 4))
    assert [one.average for one in monitor.methods.values()] == [1.0, 0.0]
