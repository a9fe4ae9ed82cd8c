"""Text for values in reports: percentages, yes or no, and the origin of a token."""

from __future__ import annotations

from foresay.decoding.outcome import Origin

MEANINGS = {
    Origin.DRAFT: "drafted and accepted",
    Origin.RESIDUAL: "from the target, in place of a rejected draft token",
    Origin.BONUS: "from the target, after a fully accepted draft or without a draft",
}
"""The meaning of each origin of a token."""


def percent(value: float | None) -> str:
    """Format a share as a percentage; None gives "-"."""
    return "-" if value is None else f"{value:.0%}"


def yes_no(value: bool | None) -> str:
    """Format a boolean as "yes" or "no"; None gives "-"."""
    return {None: "-", True: "yes", False: "no"}[value]
