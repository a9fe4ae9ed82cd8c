"""The moving average of acceptance against its baseline."""

from __future__ import annotations

import logging
import random

import pytest

from foresay.decoding.outcome import Step
from foresay.server.acceptance import BASELINE, WINDOW, Acceptance


def step(accepted: int, tested: int) -> Step:
    return Step(0, (1,) * (accepted + 1), (), tested, accepted, (1,) * tested)


def feed(found: Acceptance, rate: float, tokens: int, seed: int = 0) -> None:
    dice = random.Random(seed)
    for _ in range(tokens // 4):
        found.take(step(sum(dice.random() < rate for _ in range(4)), 4), "suffix for tiny")


def test_the_average_follows_and_the_baseline_stays(caplog: pytest.LogCaptureFixture) -> None:
    found = Acceptance()
    with caplog.at_level(logging.WARNING, "foresay.server"):
        feed(found, 0.6, BASELINE // 2)
        assert found.ratio == 1.0 and found.average == pytest.approx(0.6, abs=0.02)
        feed(found, 0.6, BASELINE)
        assert found.ratio == pytest.approx(1.0, abs=0.06) and not caplog.records
        feed(found, 0.3, 8 * WINDOW)
        assert found.accepted / found.tested == pytest.approx(0.6, abs=0.02)
        assert found.average == pytest.approx(0.3, abs=0.04) and found.ratio == pytest.approx(0.5, abs=0.08)
        assert len(caplog.records) == 1, "logged once"
        assert "acceptance of suffix for tiny has fallen: 4" in caplog.text
        assert "60% at first" in caplog.text.replace("59%", "60%")
        feed(found, 0.6, 6 * WINDOW)
        feed(found, 0.3, 6 * WINDOW)
    assert len(caplog.records) == 2, "and again after it had recovered"
    none = Acceptance()
    feed(none, 0.0, 2 * BASELINE)
    assert none.tested == BASELINE and none.ratio == 1.0 and not none.has_fallen
