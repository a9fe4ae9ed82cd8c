"""Which ways of drafting a client may ask for: those that load nothing, for a client does not choose what a server opens.

Owns that rule. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foresay.decoding.acceptance import RULES
from foresay.errors import ForesayError
from foresay.lengths import LENGTHS
from foresay.server.errors import ApiError
from foresay.server.requests import Drafting
from foresay.spec.expressions import parse
from foresay.spec.recipes import named, read_drafter, read_length, read_rule

KEEPS = frozenset({"keep", "max_contexts", "max_tokens"})
"""Settings of what look-ups keep between requests."""
LOADS = frozenset({"acceptance"})
"""Length policies that read files."""


@dataclass(frozen=True, slots=True)
class DraftingChoice:
    """How a request is drafted for; None is the server's."""

    drafter: str | None = None
    length: str | int | None = None
    rule: str | None = None

    @staticmethod
    def of(asked: Drafting | None) -> DraftingChoice:
        """What a request says of it. Raises ApiError for what is unknown, or would load something."""
        if asked is None:
            return DraftingChoice()
        if asked.drafter is not None:
            _read("drafter", asked.drafter, read_drafter, frozenset({*named("lookup"), "none"}))
        if asked.length is not None:
            _read("length", asked.length, read_length, frozenset(LENGTHS) - LOADS)
        if asked.rule is not None:
            _read("rule", asked.rule, read_rule, frozenset(RULES))
        return DraftingChoice(asked.drafter, asked.length, asked.rule)


def _harmless(name: str | None, value: object) -> bool:
    """Whether a setting opens nothing, holds little, and shares no text between requests."""
    return name not in KEEPS and isinstance(value, int | float) and not isinstance(value, bool)


def _read(what: str, value: str | int, read: Callable[[Any], Any], allowed: frozenset[str]) -> None:
    """Names are checked before anything is made of them: what loads something does so at once."""
    try:
        call = None if isinstance(value, int) or value.strip().isdecimal() else parse(value)
        if call is None or (call.name in allowed and all(_harmless(*one) for one in call.values)):
            read(value)
            return
    except (ForesayError, ValueError, RecursionError) as error:
        raise ApiError(400, str(error), param=f"foresay.{what}") from None
    names = ", ".join(sorted(allowed))
    raise ApiError(
        400, f"{what}={value!r} is not among those that a client may choose: {names}", param=f"foresay.{what}"
    )
