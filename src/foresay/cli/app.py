"""The command tree, and what becomes of errors, Ctrl-C and closed pipes."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
import typer

from foresay.cli import generate, info, models, version

app = typer.Typer(
    name="foresay",
    help="Exact speculative decoding: language models that write faster and write the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("generate")(generate.run)
app.command("models")(models.run)
app.command("info")(info.run)
app.command("version")(version.run)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit."""
    code = _run(args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    sys.exit(code)


def _run(args: list[str] | None) -> int:
    from foresay.errors import ForesayError

    try:
        result: Any = app(args, standalone_mode=False)
    except ForesayError as error:
        return _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())  # noqa: T201
        return 2
    except click.ClickException as error:
        return _fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print("foresay: " + " ".join(message.split()), file=sys.stderr)  # noqa: T201
    return 2


def _discard_stdout() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
