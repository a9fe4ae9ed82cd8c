"""Text for values in reports: percentages, yes or no, the origin of a token, and a mark of noise."""

from __future__ import annotations

from foresay.decoding.outcome import Origin

MEANINGS = {
    Origin.DRAFT: "drafted and accepted",
    Origin.RESIDUAL: "from the target, in place of a rejected draft token",
    Origin.BONUS: "from the target, after a fully accepted draft or without a draft",
}
"""The meaning of each origin of a token."""
NOISE = "~"
"""Mark of a speed-up that is noise; see `is_noise`."""
REASON = f"{NOISE} noise: within the spread of its runs or of plain decoding, or above tokens per pass"


def percent(value: float | None) -> str:
    """Format a share as a percentage; None gives "-"."""
    return "-" if value is None else f"{value:.0%}"


def yes_no(value: bool | None) -> str:
    """Format a boolean as "yes" or "no"; None gives "-"."""
    return {None: "-", True: "yes", False: "no"}[value]


def is_noise(speed_up: float, spread: float, per_pass: float | None) -> bool:
    """Return True for a speed-up that is no gain and no loss as far as runs show. The server's page has the same rule.

    spread: the relative difference of equal runs. per_pass: tokens per pass, which bound a speed-up; None if they are not known.
    """
    return abs(speed_up - 1) <= spread or (per_pass is not None and speed_up > max(1, per_pass))
