"""Help pages as plain text: arguments, options by panel, commands by panel, examples.

Nothing is truncated, boxed or coloured, so a page reads the same on a terminal and in a pipe, and rich is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

_NARROW = 70
"""Columns below which the description of an option goes under its name."""
_TYPES = {"str": "TEXT", "int": "N", "float": "X", "path": "PATH", "Path": "PATH", "bool": ""}
_TYPE = re.compile(r"<(?:list\[)?(\w+)\]?(?: range)?>")
_VARIABLE = re.compile(r"(?<=\[)env var: \w+; |  \[env var: \w+\]")
"""Note about an environment variable, which the text of the page explains once."""
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


class HelpfulCommand(TyperCommand):
    """A command whose page has panels and examples. The epilog is the examples, one a line."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(argument_name(one) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by panel."""
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(self.epilog, formatter)


class HelpfulGroup(TyperGroup):
    """A group whose page has panels of commands, and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by panel, then the options."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            rows.setdefault(command.rich_help_panel or "Commands", []).append((name, command.help or ""))
        width = max(len(name) for name in self.commands)
        for panel, some in rows.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in some])
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(self.epilog, formatter)


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    arguments: list[tuple[str, str]] = []
    panels: dict[str, list[tuple[str, str]]] = {"Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        name, text = record[0], _VARIABLE.sub("", record[1]).strip()
        if parameter.param_type_name == "argument":
            arguments.append((argument_name(parameter), text))
        else:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(
                (_TYPE.sub(lambda found: _TYPES.get(found[1], found[1]), name).strip(), text)
            )
    for title, rows in {"Arguments": arguments, **panels}.items():
        if rows:
            with formatter.section(title):
                _write_rows(rows, formatter)


def argument_name(parameter: Any) -> str:
    """The name of a positional argument: its metavar, else its name in capitals, in brackets if it may be left out."""
    name = parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]"
    return str(parameter.metavar or name + "..." * (parameter.nargs != 1))


def _write_rows(rows: Iterable[tuple[str, str]], formatter: Any) -> None:
    if formatter.width >= _NARROW:
        formatter.write_dl(rows)
        return
    for name, text in rows:
        formatter.write(f"  {name}\n")
        formatter.indent()
        formatter.indent()
        formatter.write_text(text)
        formatter.dedent()
        formatter.dedent()


def _write_examples(epilog: str | None, formatter: Any) -> None:
    if not epilog:
        return
    with formatter.section("Examples"):
        for example in epilog.splitlines():
            formatter.write("".join(f"  {line}\n" for line in _folded(example, formatter.width - 4)))


def _folded(example: str, width: int) -> list[str]:
    r"""A shell command on lines of at most `width` characters where its words allow it; all but the last end in "\"."""
    lines: list[str] = []
    for word in _WORD.findall(example):
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
