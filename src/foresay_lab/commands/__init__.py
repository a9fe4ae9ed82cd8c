"""The lab's commands: their options and help pages, which entry points name, and one file per command."""

from __future__ import annotations

from functools import partial

from foresay.cli import command as core

command = partial(core.command, package="foresay_lab.commands")
"""Return a command of this package; see `foresay.cli.command.command`."""
