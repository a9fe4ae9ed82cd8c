"""How results are worded for a reader: percentages, yes or no, and the origin of a token."""

from __future__ import annotations

from foresay.decoding.outcome import Origin

MEANINGS = {
    Origin.DRAFT: "drafted and accepted",
    Origin.RESIDUAL: "the target's, in place of a rejected draft token",
    Origin.BONUS: "the target's, after a draft that was accepted whole, or without a draft",
}
"""The meaning of each origin of a token."""


def percent(value: float | None) -> str:
    """A share as a percentage, "-" when there is none."""
    return "-" if value is None else f"{value:.0%}"


def yes_no(value: bool | None) -> str:
    """An answer in words, "-" when there is none."""
    return {None: "-", True: "yes", False: "no"}[value]
