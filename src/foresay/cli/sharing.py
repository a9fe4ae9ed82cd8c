"""Workers that a command's work is distributed over."""

from __future__ import annotations

from typing import Any

from foresay.cli.command import Given
from foresay.cli.common import check_threads
from foresay.cli.progress import loading
from foresay.errors import ConfigError
from foresay.workers.pool import Backend, Pool, check_workers


def wanted(given: Given) -> bool:
    """Return True if --workers is given. Raises ConfigError for --ray without it."""
    if given.ray and given.workers is None:
        raise ConfigError("needs --workers, the number of actors", param="ray")
    return given.workers is not None


def pool(given: Given, setup: dict[str, Any]) -> Pool:
    """Start the workers."""
    count = check_workers(given.workers)
    check_threads(given.threads)
    backend: Backend
    if given.ray:
        from foresay.workers.ray import Actors

        backend = Actors(setup, count, threads=given.threads)
    else:
        from foresay.workers.processes import Processes

        backend = Processes(setup, count, threads=given.threads)
    with loading(f"Starting {count} workers") as progress:
        return Pool(backend, count, on_start=lambda ready: progress(f"{ready} of {count} workers are ready"))
