"""Prints docs/cli.md: the help of every command, as it is shown at 100 columns."""

import contextlib
import io
import os

os.environ |= {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}

from foresay.cli.app import _run

COMMANDS = (
    *("generate", "chat", "serve", "compare", "demo", "methods", "models", "info", "compile", "version"),
    *("record", "replay", "profile", "profile shapes", "bench", "tune", "report"),
    *("prune", "distill", "export", "head data", "head train", "head eval", "ngram build", "ngram show"),
)


def help_of(*args: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _run([*args, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def _section(*args: str) -> str:
    return f"## foresay {' '.join(args)}".rstrip() + f"\n\n```text\n{help_of(*args)}\n```\n"


def page() -> str:
    parts = ["# The command line\n\nMade by `scripts/docs`; a test compares it with the program.\n"]
    parts += [_section(*args) for args in ((), *(tuple(name.split()) for name in COMMANDS))]
    parts.append(
        "## Exit codes\n\n0: done. 1: `generate --compare`, `compare`, `demo` or `bench` found a difference under an exact rule, "
        "or `bench` could run nothing. 2: wrong input, with one line on standard error. 130: interrupted. 141: whoever read "
        "the output has gone.\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
