"""Workers as processes on this machine, each with its share of the cores or a GPU of its own.

Owns how they are started and heard. What they do is `jobs.py`'s.
"""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from foresay.child_process import ChildProcess
from foresay.errors import ForesayError
from foresay.workers.messages import Plain, begun, heard
from foresay.workers.pool import Place, Worker, WorkerDiedError

COMMAND = [sys.executable, "-m", "foresay.workers.child"]


class LocalWorker(ChildProcess, Worker):
    """A process of ours."""

    def __init__(self, name: str, setup: Plain, environment: dict[str, str]) -> None:
        """Raises the error that the setup ends with, and ForesayError where the process ends."""
        super().__init__(name, COMMAND, os.environ | environment)
        self.name = name
        try:
            self.send(setup)
            while not (said := self.read()):
                self.wait_ready()
            self.described, self.room = begun(said[0])
        except BaseException:
            self.close()
            raise

    def give(self, number: int, task: Plain) -> None:
        """See Worker."""
        self.send({"take": number, "task": task})

    def close(self) -> None:
        """See Worker."""
        self.end("it was closed")


class Processes(Place):
    """`count` processes with one setup."""

    def __init__(self, setup: Plain, count: int, *, threads: int | None = None) -> None:
        """threads: of each; an even share of the cores unless told. Several GPUs are given out in turn."""
        self._setup = setup
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = threads or max(1, cores // count)

    def start(self, index: int) -> LocalWorker:
        """See Place."""
        setup = {**self._setup, "threads": self._threads}
        gpus = torch.cuda.device_count()
        if "load" in setup and gpus > 1 and setup["load"].get("device") in (None, "cuda"):
            setup["load"] = {**setup["load"], "device": f"cuda:{index % gpus}"}
        return LocalWorker(f"worker {index + 1}", setup, {"OMP_NUM_THREADS": str(self._threads)})

    def heard(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        """See Place."""
        with selectors.DefaultSelector() as ready:
            for worker in cast(Sequence[LocalWorker], workers):
                worker.register(ready)
            told = [key.data for key, _ in ready.select(1.0)]
        ended = [
            worker for worker in cast(Sequence[LocalWorker], workers) if worker.has_exited
        ]  # a child of its may hold its pipe
        for worker in dict.fromkeys([*told, *ended]):
            try:
                lines = worker.read()
            except ForesayError as error:
                yield worker, -1, WorkerDiedError(str(error))
                continue
            for line in lines:
                yield worker, *heard(line)
