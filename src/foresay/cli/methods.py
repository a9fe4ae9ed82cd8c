"""`foresay methods`: what may be written where a drafter, a rule or a length is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from foresay.decoding.acceptance import RULES
from foresay.lengths import LENGTHS
from foresay.spec.recipes import DRAFTERS


def run() -> None:
    """List the drafters, rules and lengths with their settings."""
    for title, option, entries in catalogue():
        typer.echo(f"{title} ({option})")
        for signature, purpose in entries:
            typer.echo(f"  {signature}\n      {purpose}")
        typer.echo()
    typer.echo(
        "A setting is given in parentheses: suffix(scale=3), or cascade(model=small, max_gram; k=[[4, 8], [0, 8]])."
    )


def catalogue() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(title, option, [(signature, one line of what it is)]) for each kind."""
    return [
        ("Drafters", "--drafter", [(signature(name, one.make), one.summary) for name, one in DRAFTERS.items()]),
        ("Rules", "--rule", [(signature(name, make), _rule(make)) for name, make in RULES.items()]),
        ("Lengths", "--length", [(signature(name, make), _first_line(make)) for name, make in LENGTHS.items()]),
    ]


def signature(name: str, make: Callable[..., Any], given: Mapping[str, Any] | None = None) -> str:
    """A name with its settings and their defaults, or what was given instead, as an expression has them."""
    parts = []
    for parameter in inspect.signature(make).parameters.values():
        value = (given or {}).get(parameter.name, parameter.default)
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append(f"{parameter.name.upper()}...")
        else:
            parts.append(parameter.name if value is parameter.empty else f"{parameter.name}={shown(value)}")
    return f"{name}({', '.join(parts)})" if parts else name


def shown(value: Any) -> str:
    """A value as an expression has it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _first_line(make: Any) -> str:
    return (make.__doc__ or "").strip().split("\n")[0]


def _rule(make: Any) -> str:
    line = _first_line(make).removesuffix(" Lossy.")
    return line if make.exact else f"{line} Lossy: the output may differ from the target's own."
