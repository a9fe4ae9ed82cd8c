"""The program: its commands, and how errors, Ctrl-C and closed pipes end it."""

from __future__ import annotations

import gc
import os
import re
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from foresay.cli.command import CONTEXT, INTERRUPTED, write_panels
from foresay.cli.commands import REMOVED, commands, find, named
from foresay.cli.dialects import hint
from foresay.cli.environment import idle
from foresay.cli.typed_errors import usage_message
from foresay.errors import ForesayError
from foresay.version import __version__

CLOSED_PIPE = 141
"""128 + SIGPIPE, the exit code that a shell reports for a program ended by that signal."""
_OBJECTS = 200_000
"""Objects created between two garbage collections. Importing PyTorch and transformers creates a million, none of them garbage."""
SHELLS = ("bash", "zsh", "fish")


class Program(click.Group):
    """The group of all commands, listed by heading."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help page."""
        return list(named())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. Raises UsageError for an unknown one, and for one of an earlier version, naming its successor."""
        if (found := find(cmd_name)) is not None:
            return found
        if cmd_name in REMOVED:
            raise click.UsageError(f"{cmd_name} is now part of another command: foresay {REMOVED[cmd_name]}", ctx)
        if not ctx.resilient_parsing and not cmd_name.startswith("-"):
            raise click.NoSuchCommand(cmd_name, possibilities=named(), ctx=ctx)
        return None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return commands and options for the shell."""
        items = [CompletionItem(name, help=one.summary) for name, one in named().items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by heading, then the options."""
        width = max(map(len, named()))
        panels = {
            title: [((one.name or "").ljust(width), one.summary) for one in some] for title, some in commands().items()
        }
        options = [record for one in self.get_params(ctx) if (record := one.get_help_record(ctx))]
        write_panels({**panels, "Options": options}, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command. A closed standard output and Ctrl-C end it without a message."""
        for line in idle(os.environ, lambda: named().values()):
            print(f"foresay: {line}", file=sys.stderr)  # noqa: T201
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(CLOSED_PIPE)
        except KeyboardInterrupt:  # here, since click would print a line
            ctx.exit(INTERRUPTED)
        return code


def _show_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        kind = get_completion_class(shell)
        assert kind is not None
        click.echo(kind(ctx.command, {}, "foresay", "_FORESAY_COMPLETE").source())
        ctx.exit()


@click.group(cls=Program, context_settings=CONTEXT)
@click.version_option(__version__, message="foresay %(version)s", help="Print the version and exit.")
@click.option(
    "--show-completion",
    metavar="SHELL",
    type=click.Choice(SHELLS),
    expose_value=False,
    is_eager=True,
    callback=_show_completion,
    help=f"Print a script that completes commands in {', '.join(SHELLS[:-1])} or {SHELLS[-1]}, and exit.",
)
def app() -> None:
    """Exact speculative decoding of language models: the same output, faster."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit."""
    gc.set_threshold(_OBJECTS)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?", and the run goes on
    code = _run(args)
    gc.freeze()  # else the interpreter looks for garbage among all objects once more, for a second, before it exits
    sys.exit(code)


def _run(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code. Errors are printed on stderr in one line."""
    try:
        result: Any = app(args, prog_name="foresay", standalone_mode=False)
    except ForesayError as error:
        return _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        return 2
    except click.ClickException as error:  # wrong usage
        given = sys.argv[1:] if args is None else args
        message, more = usage_message(error, given), hint(error, given)
        return _fail(f"{re.split(r' .?Did you mean', message)[0]} {more}" if more else message)
    except click.Abort:
        return INTERRUPTED
    except OSError as error:
        _discard_stdout()
        where = "" if error.filename is None else f"{str(error.filename)!r}: "
        return _fail(f"{where}{error.strerror or error}")
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print("foresay: " + " ".join(message.split()), file=sys.stderr)  # noqa: T201
    return 2


def _discard_stdout() -> None:
    """Send what is left in standard output's buffer to nowhere, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
