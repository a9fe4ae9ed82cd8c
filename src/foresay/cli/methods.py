"""`foresay methods`: the expressions that name a drafter, a rule or a length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from foresay.decoding.acceptance import RULES
from foresay.lengths import LENGTHS
from foresay.methods.recipes import DRAFTERS as RECIPES

DRAFTERS = {
    "none": "Nothing: plain decoding.",
    "prompt_lookup": "What followed the last few tokens earlier in the text.",
    "max_gram": "What followed the longest match in the text, whatever its length; then a table of n-grams, if one is given.",
    "ngram_store": "Counts of what followed the last few tokens, learned while decoding; keep=true shares them among answers.",
    "suffix": "What followed the longest match in the text or (keep=true) in earlier answers, more of it the longer the match.",
    "model": "A smaller model, named as --model is.",
    "self": "The target's own first layers.",
    "cascade": "Several drafters: cheaper ones draft for better ones, and draft the last tokens of a proposal themselves.",
}
"""Where the draft tokens of each drafter come from."""


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
        ("Drafters", "--drafter", [(signature(name, make), DRAFTERS[name]) for name, make in RECIPES.items()]),
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
