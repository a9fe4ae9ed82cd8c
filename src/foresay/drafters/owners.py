"""Things that are kept for the owners of requests: an API key, or a key and a salt that a client chose.

Owns the form of an owner's name, and the bound on the salts of one key, which clients could make without end.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
MOST_SALTS = 64
SALTED = "\n"
"""Separates a key, which has no line break, from a salt."""


def keep(kept: dict[str, T], owner: str, value: T) -> T:
    """Keep a value for an owner as the most recent one. Of a key's owners with a salt the MOST_SALTS most recent ones stay."""
    kept.pop(owner, None)
    kept[owner] = value
    key = owner.partition(SALTED)[0] + SALTED
    for old in [one for one in kept if one.startswith(key)][:-MOST_SALTS]:
        del kept[old]
    return value
