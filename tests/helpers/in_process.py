"""Workers in this process: the same jobs, results and errors, without starting processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from foresay_lab.workers import jobs


def done(value: Any) -> Future[Any]:
    """Return a future with this result, or with the error of a worker that died; workers return their own errors."""
    call: Future[Any] = Future()
    if isinstance(value, OSError):
        call.set_exception(value)
    else:
        call.set_result(value)
    return call


class InProcess:
    """A backend for `workers.pool`, in place of `Processes`."""

    def __init__(self, setup: dict[str, Any], count: int, *, threads: int | None = None) -> None:
        self._setup = {**setup, "threads": torch.get_num_threads()}

    def start(self, index: int) -> tuple[Any, Future[Any]]:
        """Begin the job; its worker is the job itself."""
        begun = jobs.begin(self._setup)
        return getattr(jobs, "_job", None), done(begun)

    def advance(self, worker: Any, tasks: Sequence[tuple[int, Any]]) -> Future[Any]:
        """Work on one job."""
        jobs._job = worker
        return done(jobs.advance(tasks))

    def close(self, worker: Any) -> None:
        """Nothing has to end."""
