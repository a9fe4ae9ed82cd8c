"""Options that distribute a command's work over workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from foresay.cli.common import check_threads
from foresay.cli.options import MachineOptions
from foresay.cli.progress import loading
from foresay.errors import ConfigError
from foresay.workers.pool import Backend, Pool, check_workers


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """Number and kind of workers."""

    PANEL: ClassVar[str] = "Workers"
    workers: Annotated[
        int | None,
        typer.Option(help="Distribute the work over N processes, each with the model and a share of the cores."),
    ] = None
    ray: Annotated[bool, typer.Option("--ray", help="Workers are actors of a Ray cluster (extra ray).")] = False

    @property
    def wanted(self) -> bool:
        """True if workers do the work."""
        if self.ray and self.workers is None:
            raise ConfigError("--ray needs --workers, the number of actors")
        return self.workers is not None

    def pool(self, setup: dict[str, Any], machine: MachineOptions) -> Pool:
        """Start the workers."""
        assert self.workers is not None
        count = check_workers(self.workers)
        place: Backend
        check_threads(machine.threads)
        if self.ray:
            from foresay.workers.ray import Actors

            place = Actors(setup, count, threads=machine.threads)
        else:
            from foresay.workers.processes import Processes

            place = Processes(setup, count, threads=machine.threads)
        with loading(f"Starting {count} workers") as progress:
            return Pool(place, count, on_start=lambda ready: progress(f"{ready} of {count} workers are ready"))
