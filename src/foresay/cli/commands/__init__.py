"""The table of commands. Importing it imports nothing that a command needs to run."""

from __future__ import annotations

from foresay.cli.command import Command
from foresay.cli.commands import measure, other, run, train

COMMANDS: dict[str, tuple[Command, ...]] = {
    "Run": run.COMMANDS,
    "Measure": measure.COMMANDS,
    "Train": train.COMMANDS,
    "Other": other.COMMANDS,
}
"""Commands by heading, in the order of the help page."""
BY_NAME = {one.name or "": one for some in COMMANDS.values() for one in some}
REMOVED = {
    "compare": "generate --compare",
    "methods": "info --methods",
    "prune": "distill --kind pruned",
    "ngram": "distill --kind ngram, info TABLE",
    "acceptance-head": "distill --kind acceptance",
}
"""Commands of earlier versions, and what does their work now."""
