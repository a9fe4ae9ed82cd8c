"""Drafting methods that a client may choose: only methods that load nothing, since a client must not choose files to open.

Owns that rule. Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from foresay.decoding.acceptance import RULES
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.lengths import LENGTHS
from foresay.server.errors import FieldError
from foresay.server.option_fields import Drafting
from foresay.spec.expressions import parse, to_expression
from foresay.spec.recipes import named, read_drafter, read_length, read_rule

MEMORY_SETTINGS = frozenset({"keep", "max_contexts", "max_tokens"})
"""Settings with which n-gram drafters keep text between requests."""
LOADING_LENGTHS = frozenset({"acceptance"})
"""Length policies that read files."""
_CHOICES: dict[str, tuple[Callable[[Any], Any], frozenset[str]]] = {
    "drafter": (read_drafter, frozenset({*named("lookup"), "none"})),
    "length": (read_length, frozenset(LENGTHS) - LOADING_LENGTHS),
    "rule": (read_rule, frozenset(RULES)),
}
"""Field -> how its value is read, and the names that it may have."""


@dataclass(frozen=True, slots=True)
class DraftingChoice:
    """Drafting method of a request. None stands for the server's setting."""

    drafter: str | None = None
    length: str | int | None = None
    rule: str | None = None

    @staticmethod
    def of(requested: Drafting | None) -> DraftingChoice:
        """Return the choice of a request. Raises ApiError for an unknown method or one that would load a file."""
        if requested is None:
            return DraftingChoice()
        for field, (read, allowed) in _CHOICES.items():
            if (value := getattr(requested, field)) is not None:
                _read(field, value, read, allowed)
        return DraftingChoice(requested.drafter, requested.length, requested.rule)


def drafting_facts(generator: Generator) -> dict[str, Any]:
    """Return the names of a model's drafting methods and of those that a request may choose, without settings: some are paths."""
    found = re.findall(r"(?<![^\s(,=])\w+(?=[(),;]|$)", generator.drafter_name)
    first, *others = [one for one in found if one in {*named(), "none"}] or ["other"]
    length, rule = to_expression(generator.policy, LENGTHS), to_expression(generator.rule, RULES)
    return {
        "drafter": f"{first}({', '.join(others)})" if others else first,
        "length": length.partition("(")[0],
        "rule": rule.partition("(")[0],
        "choices": {field: _alone(read, allowed) for field, (read, allowed) in _CHOICES.items()},
    }


def _alone(read: Callable[[Any], Any], names: Iterable[str]) -> list[str]:
    """Return the names that need no settings."""
    found = []
    for name in sorted(names):
        with suppress(ForesayError):
            read(name)
            found.append(name)
    return found


def _harmless(name: str | None, value: object) -> bool:
    """True if a setting opens no file, stores little, and shares no text between requests."""
    return name not in MEMORY_SETTINGS and isinstance(value, int | float) and not isinstance(value, bool)


def _read(field: str, value: str | int, read: Callable[[Any], Any], allowed: frozenset[str]) -> None:
    """Raise ApiError unless the value is allowed. Names are checked first, since building a drafter loads its files at once."""
    try:
        call = None if isinstance(value, int) or value.strip().isdecimal() else parse(value)
        if call is None or (call.name in allowed and all(_harmless(*one) for one in call.values)):
            read(value)
            return
    except (ForesayError, ValueError, RecursionError) as error:
        raise FieldError(f"foresay.{field}", f": {error}") from None
    names = ", ".join(sorted(allowed))
    raise FieldError(f"foresay.{field}", f"is not available to clients; choose one of: {names}", value=value)
