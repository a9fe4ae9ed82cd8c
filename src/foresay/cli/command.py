"""Commands, options and arguments over click, and their help pages as plain text.

Nothing of a page is truncated, boxed or coloured, so it reads the same on a terminal and in a pipe. Knows no command by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from foresay.cli.environment import of_option
from foresay.cli.typed_errors import as_typed
from foresay.errors import ConfigError, ForesayError

Given = SimpleNamespace
"""Values of a command's parameters by name. `typed`: the flags of options on the command line, by name."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, 128 + SIGINT."""
_TYPES = {"N": int, "X": float, "FILE": Path, "FOLDER": Path, "DIR": Path}
_NARROW = 70
"""Columns below which the description of an option goes under its name."""
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


class Option(click.Option):
    """An option, and the heading under which a help page shows it."""

    panel = "Options"


def option(spec: str, help: str, default: Any = None, **more: Any) -> Option:
    """Return an option from its names and metavar as a help page shows them: "-n --max-new-tokens N".

    A metavar N is an integer, X a number, FILE, FOLDER and DIR are paths, others are texts; without a metavar the option is a
    flag. With "..." it may be repeated. A first word without dashes is the name in Python, if that differs.
    """
    words = spec.split()
    metavar = None if words[-1].startswith("-") else words.pop()
    if metavar is not None:
        many = metavar.endswith("...")
        metavar = metavar.removesuffix("...")
        more = {"metavar": metavar, "multiple": many, "type": _TYPES.get(metavar, str), **more}
    else:
        more = {"is_flag": True, **more}
    if default is not None:
        more = {"default": default, "show_default": True, **more}
    return Option(words, help=help, **more)


def argument(spec: str, help: str, type: Any = str, name: str = "", *, many: bool = False) -> click.Argument:
    """Return an argument from its name as a help page shows it: FILE, [PROMPT], FILES...

    many: True if it takes several values although its name has no dots.
    """
    many, required = many or "..." in spec, not spec.startswith("[")
    name = name or spec.strip("[].").lower()
    return click.Argument([name], metavar=spec, help=help, required=required, nargs=-1 if many else 1, type=type)


def group(panel: str, *options: Option) -> tuple[Option, ...]:
    """Return options that a help page shows under one heading."""
    for one in options:
        one.panel = panel
    return options


class Command(click.Command):
    """A command whose errors name its options as they are typed, and whose help page has panels and examples."""

    @property
    def summary(self) -> str:
        """The first line of the help page's text."""
        return (self.help or "").partition("\n")[0]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the function. Raises its ForesayError with flags in place of the names of Python arguments."""
        assert self.callback is not None
        flags = {p.name: max(p.opts, key=len) for p in self.params if p.name and p.opts[0].startswith("-")}
        flags = {flag.lstrip("-").replace("-", "_"): flag for flag in flags.values()} | flags
        typed, variables = (
            {name for name in ctx.params if ctx.get_parameter_source(name) is source}
            for source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
        )
        flags |= {p.name: of_option(p, ctx.auto_envvar_prefix) for p in self.params if p.name in variables}
        try:
            given = Given(**ctx.params, typed={name: flag for name, flag in flags.items() if name in typed})
            if "model_argument" in ctx.params:
                choose_model(given, given.model_argument)
            return self.callback(given)
        except ForesayError as error:
            error.args = (as_typed(str(error), flags),)
            raise

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments."""
        arguments = [one for one in self.params if isinstance(one, click.Argument)]
        write_panels({"Arguments": [one.get_help_record(ctx) for one in arguments]}, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by panel."""
        panels: dict[str, list[tuple[str, str]]] = {"Options": []}
        for one in self.get_params(ctx):
            if isinstance(one, click.Option) and (record := one.get_help_record(ctx)):
                panels.setdefault(getattr(one, "panel", "Options"), []).append(record)
        write_panels(panels, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for example in (self.epilog or "").splitlines():
                formatter.write("".join(f"  {line}\n" for line in _folded(example, formatter.width - 4)))


def command(
    name: str,
    text: str,
    *params: click.Parameter | Iterable[click.Parameter],
    examples: str,
    variables: str = "",
    package: str = "foresay.cli",
) -> Command:
    """Return the command that `run` of the module NAME of a package executes, which is imported when it is.

    text: the text of the help page, its summary first. examples: command lines, one a line. variables: prefix of the environment
    variables from which options are also read: this, `_` and the option's name.
    """

    def run(given: Given) -> int:
        done: int = import_module(f"{package}.{name.replace('-', '_')}").run(given)
        return done

    return Command(
        name,
        callback=run,
        params=[one for some in params for one in ([some] if isinstance(some, click.Parameter) else some)],
        help=inspect.cleandoc(text),
        epilog=inspect.cleandoc(examples),
        context_settings=CONTEXT | {"auto_envvar_prefix": variables or None},
    )


CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command."""


def choose_model(given: Given, argument: str | None) -> None:
    """Take the model from the argument, else from --model. Raises ConfigError if both are on the command line."""
    if argument is not None and "model" in given.typed:
        raise ConfigError(
            f"the model is given twice, as the argument {argument!r} and with --model {given.model!r}; drop one"
        )
    given.model = given.model if argument is None else argument


def write_panels(panels: Mapping[str, Sequence[tuple[str, str]]], formatter: click.HelpFormatter) -> None:
    """Write (name, description) under headings; on narrow screens, descriptions under names."""
    for title, rows in panels.items():
        with formatter.section(title) if rows else formatter.indentation():
            if rows and formatter.width >= _NARROW:
                formatter.write_dl(rows)
                continue
            for name, text in rows:
                formatter.write(f"  {name}\n")
                with formatter.indentation(), formatter.indentation():
                    formatter.write_text(text)


def _folded(example: str, width: int) -> list[str]:
    r"""A shell command on lines of at most `width` characters where its words allow it; all but the last end in "\"."""
    lines: list[str] = []
    for word in _WORD.findall(example):
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
