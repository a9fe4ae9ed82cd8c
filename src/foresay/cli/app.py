"""The program: its command tree, and how errors, Ctrl-C and closed pipes end it."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated, Any

import typer

from foresay import __version__
from foresay.cli.commands import COMMANDS
from foresay.cli.lazy import Entry, LazyGroup, build
from foresay.cli.typed_errors import usage_message
from foresay.errors import ForesayError

CLOSED_PIPE = 141
"""128 + SIGPIPE, the exit code that a shell reports for a program ended by that signal."""
_OBJECTS = 200_000
"""Objects created between two garbage collections. Importing PyTorch and transformers creates a million, none of them garbage."""
PURPOSE = "Exact speculative decoding of language models: the same output, faster."


class _Program(LazyGroup):
    """The group of all commands. A closed standard output ends any of them without a message."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            raise typer.Exit(CLOSED_PIPE) from None
        return code


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foresay {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Print the help of the program when it is run without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app = build("foresay", Entry(PURPOSE, commands=COMMANDS), cls=_Program, root=_root)


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
    except typer.TyperException as error:  # wrong usage
        return _fail(usage_message(error, sys.argv[1:] if args is None else args))
    except (KeyboardInterrupt, typer.Abort):
        return 130
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
