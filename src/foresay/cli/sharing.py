"""Options that share a command's work out to workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from foresay.cli.common import check_threads
from foresay.cli.options import MachineOptions
from foresay.cli.progress import loading
from foresay.errors import ConfigError
from foresay.workers.local import Processes
from foresay.workers.pool import Place, Pool, check_workers


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """Who does the work."""

    workers: Annotated[
        int | None, typer.Option(help="Processes that share the work, each with the model and its share of the cores.")
    ] = None
    ray: Annotated[bool, typer.Option("--ray", help="Workers are actors of a Ray cluster (extra ray).")] = False

    @property
    def wanted(self) -> bool:
        """Whether somebody else does it."""
        if self.ray and self.workers is None:
            raise ConfigError("--ray needs --workers: how many actors")
        return self.workers is not None

    def pool(self, setup: dict[str, Any], machine: MachineOptions) -> Pool:
        """The workers, ready."""
        assert self.workers is not None
        count = check_workers(self.workers)
        place: Place
        check_threads(machine.threads)
        if self.ray:
            from foresay.workers.ray import Actors

            place = Actors(setup, count, threads=machine.threads)
        else:
            place = Processes(setup, count, threads=machine.threads)
        with loading(f"Starting {count} workers") as progress:
            return Pool(place, count, on_start=lambda ready: progress(f"{ready} of {count} workers are ready"))
