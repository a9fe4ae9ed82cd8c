"""Errors in the words of the command line: flags in place of Python's argument names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

import click

from foresay.cli.environment import of_option

_ALIASES = {
    "max_batch_size": "batch_size",
    "batch_size": "batch_tokens",
    "rate": "learning_rate",
    "steps": "draft_steps",
    "heads": "attention_heads",
    "timeout_s": "timeout",
    "drain_s": "drain",
    "prefill_wait_s": "prefill_wait",
}
"""Names of Python arguments, and of the options that set them in commands without an option of the same name."""


def as_typed(message: str, flags: Mapping[str, str]) -> str:
    """Return the message with `name=value` and names with underscores replaced by flags: `top_k=-1` -> `--top-k -1`.

    flags: flag of each parameter. Text in brackets, after a dot or about a line of a file is left as it is: a name there is a
    setting of an expression or a key of the file.
    """
    if re.match(r"\S*\.toml\b|.*?, line \d+: ", message):
        return message
    known = {python: flags[name] for python, name in _ALIASES.items() if name in flags} | dict(flags)
    parts = (_translated(part, known) if outside else part for part, outside in _parts(message))
    return "".join(parts).rstrip()


def _translated(text: str, flags: Mapping[str, str]) -> str:
    for name, flag in flags.items():
        text = re.sub(rf"(?<![\w.\-]){name}=(?=[^\s,;.)]|$)", f"{flag} ", text)
        text = re.sub(rf"(?<![\w.\-]){name}=", flag, text)
        if "_" in name:
            text = re.sub(rf"(?<![\w.\-'\"/]){name}\b(?![=.'\"/])", flag, text)
    return text


def _parts(message: str) -> Iterator[tuple[str, bool]]:
    """Split a message at its brackets: (part, True outside of all brackets)."""
    depth = 0
    for part in re.split(r"([(\[)\]])", message):
        depth += part in ("(", "[")
        yield part, depth == 0
        depth = max(0, depth - (part in (")", "]")))


def usage_message(error: click.ClickException, args: Sequence[str]) -> str:
    """Return click's message about wrong usage as one plain line that names what was typed. args: the whole command line."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    help_ = f"see {'foresay' if context is None else context.command_path} -h"
    if parameter is None:
        message = error.format_message()
        extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", message, re.DOTALL)
        return message if extra is None else f"unexpected argument {extra[1]!r}; {help_}"
    given = [flag for flag in parameter.opts if any(arg.startswith(flag) for arg in args)]
    is_argument = isinstance(parameter, click.Argument)
    variable = of_option(parameter, context and context.auto_envvar_prefix)
    given = given or [one for one in (variable,) if os.environ.get(one)]
    name = parameter.metavar if is_argument else max(given or parameter.opts, key=len)
    return f"{name} is missing; {help_}" if isinstance(error, click.MissingParameter) else f"{name} {error.message}"
