"""The command tree, and what becomes of errors, Ctrl-C and closed pipes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from foresay.cli import (
    bench,
    chat,
    compare,
    demo,
    generate,
    info,
    methods,
    models,
    ngram,
    profile,
    record,
    replay,
    report,
    tune,
    version,
)
from foresay.cli.options import spread

CLOSED_PIPE = 141
"""128 + SIGPIPE, what a shell reports for a program that the signal ended."""


_LOOKS: Any = {"context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100}}


def _group(name: str, purpose: str) -> typer.Typer:
    """Commands under one name, which alone prints their help."""
    group = typer.Typer(
        name=name,
        help=purpose,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        **_LOOKS,
    )

    @group.callback(invoke_without_command=True, help=purpose)
    def _alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(2)

    return group


app = _group("foresay", "Exact speculative decoding: language models that write faster and write the same.")
ngram_group = _group("ngram", "Make n-gram tables from text, and look into them.")


profile_group = typer.Typer(
    name="profile", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **_LOOKS
)


def _add(name: str, command: Callable[..., Any], group: typer.Typer = app, *, alone: bool = False) -> None:
    """Register a command; a reader that has gone ends it quietly.

    alone: it is what the group's own name does. It then takes the `context`, and runs unless another command is named.
    """
    command = spread(command)

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            raise typer.Exit(CLOSED_PIPE) from None
        return code

    if alone:
        group.callback(invoke_without_command=True)(guarded)
    else:
        group.command(name)(guarded)


_add("generate", generate.run)
_add("chat", chat.run)
_add("compare", compare.run)
_add("demo", demo.run)
_add("methods", methods.run)
_add("models", models.run)
_add("info", info.run)
_add("version", version.run)
_add("build", ngram.build, ngram_group)
_add("show", ngram.show, ngram_group)
app.add_typer(ngram_group)
_add("record", record.run)
_add("replay", replay.run)
_add("profile", profile.model, profile_group, alone=True)
_add("shapes", profile.shapes, profile_group)
app.add_typer(profile_group)
_add("bench", bench.run)
_add("tune", tune.run)
_add("report", report.run)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?" instead of ending the run
    sys.exit(_run(args))


def _run(args: list[str] | None) -> int:
    from foresay.errors import ForesayError

    try:
        result: Any = app(args, prog_name="foresay", standalone_mode=False)
    except ForesayError as error:
        return _fail(str(error))
    except typer.TyperException as error:  # a usage error
        format_message = getattr(error, "format_message", None)
        return _fail(format_message() if format_message is not None else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        _discard_stdout()
        return _fail(f"{error.strerror or error}")
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print("foresay: " + " ".join(message.split()), file=sys.stderr)  # noqa: T201
    return 2


def _discard_stdout() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
