"""Errors in the words of the command line: flags in place of Python's argument names, and what was typed wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from foresay.cli.environment import PREFIX, of_option
from foresay.errors import as_argument, shown

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
_PATHS = ("path", "folder", "memory", "expression")
"""Names of Python arguments that several options set: files, folders and expressions."""


def typed(value: Any) -> str:
    """Return a value as it is typed, if it is a plain word or a number, else as errors show it."""
    if isinstance(value, float) and value == float(f"{value:g}"):
        return f"{value:g}"
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    return text if re.fullmatch(r"[\w@%+=:,./-]{1,200}", text, re.ASCII) else shown(value)


def as_typed(flags: Mapping[str, str], given: Mapping[str, Any]) -> Callable[..., str]:
    """Return the names of the command line for `ForesayError.worded`: `top_k=-1` -> `--top-k -1`.

    A file is named by the flag or argument that gave it, or else by its path alone; fields of files keep their names.
    flags: flag of each parameter, or name of the argument. given: values of the parameters.
    """
    known = {python: flags[name] for python, name in _ALIASES.items() if name in flags} | dict(flags)

    def named(name: str, *value: Any) -> str:
        flag = name if name in known.values() else known.get(name.lstrip("-").replace("-", "_"))
        if flag is None and value and name in _PATHS:
            flag = next((one for name, one in flags.items() if str(value[0]) in _texts(given.get(name))), "")
            return f"{flag} {typed(value[0])}".lstrip()
        if flag is None:
            return as_argument(name, *value)
        between = "=" if flag.startswith(PREFIX) else " "  # an environment variable
        return between.join([flag, *(typed(one) for one in value if not isinstance(one, bool))])

    return named


def _texts(value: Any) -> list[str]:
    """Values of a parameter, which may take several, as texts."""
    return [str(one) for one in (value if isinstance(value, tuple) else (value,))]


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
