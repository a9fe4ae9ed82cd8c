"""How what happened is put to a reader: shares, yes or no, and who wrote a token."""

from __future__ import annotations

from foresay.decoding.outcome import Origin

MEANINGS = {
    Origin.DRAFT: "guessed by the drafter and accepted",
    Origin.RESIDUAL: "the target's, where a guess was rejected",
    Origin.BONUS: "the target's, where every guess held or none was made",
}
"""What each origin says of a token."""


def percent(value: float | None) -> str:
    """A share as a percentage, "-" when there is none."""
    return "-" if value is None else f"{value:.0%}"


def yes_no(value: bool | None) -> str:
    """An answer in words, "-" when there is none."""
    return {None: "-", True: "yes", False: "no"}[value]
