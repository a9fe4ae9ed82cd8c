"""The drafters, rules and lengths that expressions may name, with their settings, as `foresay info --methods` lists them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foresay.decoding.acceptance import RULES
from foresay.errors import ConfigError
from foresay.lengths import LENGTHS
from foresay.spec.recipes import DRAFTERS, drafter_spec, third_party_names


def described() -> Iterator[str]:
    """Lines of `foresay info --methods`."""
    for title, option, entries in catalogue():
        yield f"{title} ({option})"
        for signature, purpose in entries:
            yield f"  {signature}\n      {purpose}"
        yield ""
    yield "Settings are given in parentheses: suffix(scale=3), cascade(model=small, max_gram; k=[[4, 8], [0, 8]])."


def catalogue() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return (title, option, [(signature, one line about it)]) of each kind."""
    return [
        ("Drafters", "--drafter", [_drafter(name) for name in (*DRAFTERS, *third_party_names())]),
        ("Rules", "--rule", [(signature(name, make), _rule(make)) for name, make in RULES.items()]),
        ("Lengths", "--length", [(signature(name, make), _first_line(make)) for name, make in LENGTHS.items()]),
    ]


def _drafter(name: str) -> tuple[str, str]:
    try:
        one = drafter_spec(name)
    except ConfigError as error:
        return name, f"Cannot be used: {error}"
    return signature(name, one.make), one.summary


def signature(name: str, make: Callable[..., Any], given: Mapping[str, Any] | None = None) -> str:
    """A name with its settings as in an expression: the given values, else the defaults."""
    parts = []
    for parameter in inspect.signature(make).parameters.values():
        value = (given or {}).get(parameter.name, parameter.default)
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append(f"{parameter.name.upper()}...")
        else:
            parts.append(parameter.name if value is parameter.empty else f"{parameter.name}={shown(value)}")
    return f"{name}({', '.join(parts)})" if parts else name


def shown(value: Any) -> str:
    """A value as in an expression."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _first_line(make: Any) -> str:
    return (make.__doc__ or "").strip().split("\n")[0]


def _rule(make: Any) -> str:
    line = _first_line(make).removesuffix(" Lossy.")
    return line if make.exact else f"{line} Lossy: the output may differ from plain decoding's."
