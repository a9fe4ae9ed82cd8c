"""Commands whose modules are imported when they are chosen: the program starts, and lists its commands, without them.

Knows no command by name, and nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from foresay.cli.option_groups import flatten_groups


@dataclass(frozen=True, slots=True)
class Entry:
    """A command, or a group of commands, as a table has it."""

    summary: str
    """Its line in a list of commands: the first of its function's docstring."""
    function: str = ""
    """`module:function` in foresay.cli; a group without one prints its help."""
    commands: Mapping[str, Entry] = field(default_factory=dict)
    """Those of a group."""
    variables: str | None = None
    """Options of the command are also read from environment variables: this, `_` and their names."""

    def load(self) -> Callable[..., Any]:
        """Import the module, and give the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"foresay.cli.{module}"), name)
        return function


class LazyGroup(TyperGroup):
    """A group that lists its commands by their summaries, and builds one when it is chosen."""

    entries: Mapping[str, Entry]

    def fill(self, entries: Mapping[str, Entry]) -> None:
        """Give the group its commands."""
        self.entries = entries
        self.commands = {name: TyperCommand(name, help=entry.summary) for name, entry in entries.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names, built, and the other arguments."""
        name, listed, others = super().resolve_command(ctx, args)
        return name, None if name is None or listed is None else build(name, self.entries[name]), others


def build(name: str, entry: Entry, cls: type[LazyGroup] = LazyGroup) -> Any:
    """The command or group of an entry; what the function takes is read off its signature."""
    maker = typer.Typer(
        name=name,
        cls=cls,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "auto_envvar_prefix": entry.variables,
        },
    )
    if not entry.commands:
        maker.command(name)(flatten_groups(entry.load()))
        return get_command(maker)
    if entry.function:
        maker.callback(invoke_without_command=True)(flatten_groups(entry.load()))
    else:
        maker.callback(invoke_without_command=True, help=entry.summary)(_show_help)
    group = get_command(maker)
    assert isinstance(group, LazyGroup)
    group.fill(entry.commands)
    return group


def _show_help(context: typer.Context) -> None:
    """A group by itself does nothing else."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
