"""The table of commands: foresay's own, and those of entry points. Importing it imports nothing that a command needs to run.

An entry point of the group `foresay.commands` is a tuple of commands, and its name is their heading on the help page. One of the
group `foresay.features` is a module that does the work of an option of our own commands. Both are read when they are needed.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from foresay.cli.command import Command
from foresay.cli.commands import other, run
from foresay.errors import ConfigError

OWN: dict[str, tuple[Command, ...]] = {"Run": run.COMMANDS, "Measure": (), "Train": (), "Other": other.COMMANDS}
"""Commands of this package by heading, and the order of headings on the help page; those of other packages go after them."""
REMOVED = {
    "compare": "generate --compare",
    "methods": "info --methods",
    "prune": "distill --kind pruned",
    "ngram": "distill --kind ngram, info TABLE",
    "acceptance-head": "distill --kind acceptance",
}
"""Commands of earlier versions, and what does their work now."""


@cache
def commands() -> dict[str, tuple[Command, ...]]:
    """Return all commands by heading, in the order of the help page.

    An entry point that cannot be used is named in a line on standard error, and its commands are left out.
    """
    found = dict(OWN)
    for point in entry_points(group="foresay.commands"):
        try:
            found[point.name] = (*found.get(point.name, ()), *_added(point, named(found)))
        except ConfigError as error:
            print(f"foresay: {error}", file=sys.stderr)  # noqa: T201
    return found


def named(some: dict[str, tuple[Command, ...]] | None = None) -> dict[str, Command]:
    """Return commands by name: all, or those of a table by heading."""
    return {one.name or "": one for each in (commands() if some is None else some).values() for one in each}


def find(name: str) -> Command | None:
    """Return the command of this name, if there is one. Entry points are read only if it is not one of OWN."""
    return named(OWN).get(name) or named().get(name)


def feature(name: str) -> Any:
    """Return the module of a feature. Raises ConfigError if no package has it, and if it cannot be imported."""
    for point in entry_points(group="foresay.features", name=name):
        return _loaded(point, "feature")
    raise ConfigError(f"feature {name!r} is in no installed package; install foresay again")


def _added(point: EntryPoint, known: dict[str, Command]) -> tuple[Command, ...]:
    """Return the commands of an entry point. Raises ConfigError, which names its package, for one that cannot be used."""
    added = tuple(_loaded(point, "commands"))
    for one in added:
        if not isinstance(one, Command) or one.name in known:
            why = f"{one.name!r} exists" if isinstance(one, Command) else f"{one!r} is no foresay.cli.command.Command"
            raise ConfigError(f"commands {_described(point)} are left out: {why}")
    return added


def _loaded(point: EntryPoint, kind: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(f"{kind} {_described(point)} cannot be loaded: {type(error).__name__}: {error}") from error


def _described(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{point.name!r} of {package} ({point.value})"
