"""Shares, yes or no, and origins in words."""

from __future__ import annotations

from foresay.decoding.outcome import Origin
from foresay.text.formatting import MEANINGS, percent, yes_no


def test_a_share() -> None:
    assert [percent(value) for value in (None, 0.0, 0.126, 1.0)] == ["-", "0%", "13%", "100%"]


def test_yes_and_no() -> None:
    assert [yes_no(value) for value in (True, False, None)] == ["yes", "no", "-"]


def test_every_origin_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Origin)
