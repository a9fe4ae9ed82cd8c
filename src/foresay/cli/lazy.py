"""Commands that are imported when they are chosen, so that starting the program and listing its commands is fast.

Knows no command by name, and nothing of what commands do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from foresay.cli.help_pages import HelpfulCommand, HelpfulGroup
from foresay.cli.option_groups import flatten_groups
from foresay.cli.typed_errors import as_typed
from foresay.errors import ForesayError


@dataclass(frozen=True, slots=True)
class Entry:
    """A command, or a group of commands, in the table of commands."""

    summary: str
    """Its line in a list of commands: the first line of its function's docstring, complete at 80 columns."""
    function: str = ""
    """`module:function` in foresay.cli; empty for a group, which prints its help."""
    examples: tuple[str, ...] = ()
    """Command lines at the end of its help page."""
    panel: str = "Commands"
    """Heading under which a list of commands shows it."""
    commands: Mapping[str, Entry] = field(default_factory=dict)
    """Commands of a group by name."""
    variables: str | None = None
    """Prefix of the environment variables from which its options are also read: this, `_` and the option's name."""

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"foresay.cli.{module}"), name)
        return function


class Command(HelpfulCommand):
    """A command whose errors name its options as they are typed."""

    def invoke(self, ctx: Any) -> Any:
        """Run the function. Raises its ForesayError with flags in place of the names of Python arguments."""
        try:
            return super().invoke(ctx)
        except ForesayError as error:
            error.args = (as_typed(str(error), self._flags()),)
            raise

    def _flags(self) -> dict[str, str]:
        """The flag of each option, by the option's name in Python and on the command line."""
        flags = {p.name: p.opts[0] for p in self.params if p.opts[0].startswith("-")}
        return {flag.lstrip("-").replace("-", "_"): flag for flag in flags.values()} | flags


class LazyGroup(HelpfulGroup):
    """A group that lists its commands by their summaries, and builds a command when it is chosen."""

    entries: Mapping[str, Entry]

    def fill(self, entries: Mapping[str, Entry]) -> None:
        """Set the group's commands."""
        self.entries = entries
        self.commands = {
            name: HelpfulCommand(name, help=entry.summary, rich_help_panel=entry.panel)
            for name, entry in entries.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command that the first argument names, the command, and the other arguments."""
        name, listed, others = super().resolve_command(ctx, args)
        return name, None if name is None or listed is None else build(name, self.entries[name]), others


def build(name: str, entry: Entry, *, cls: type[LazyGroup] = LazyGroup, root: Callable[..., Any] | None = None) -> Any:
    """Return the command or group of an entry. The function's signature gives the parameters.

    root: the callback of the whole program's group, which also gets options for shell completion.
    """
    maker = typer.Typer(
        name=name,
        cls=cls,
        add_completion=root is not None,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog="\n".join(entry.examples),
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "auto_envvar_prefix": entry.variables,
        },
    )
    if not entry.commands:
        maker.command(name, cls=Command, epilog="\n".join(entry.examples))(flatten_groups(entry.load()))
        return get_command(maker)
    maker.callback(invoke_without_command=True, help=entry.summary)(root or _show_help)
    group = get_command(maker)
    assert isinstance(group, LazyGroup)
    group.fill(entry.commands)
    return group


def _show_help(context: typer.Context) -> None:
    """Print the help of a group that is run without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
