"""Workers as processes on this machine, each with a share of the cores or its own GPU.

Owns starting the processes and exchanging messages with them; `jobs.py` owns their work.
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
from foresay.workers.messages import Plain, parse_reply, parse_setup_reply
from foresay.workers.pool import Worker, WorkerBackend, WorkerDiedError

COMMAND = [sys.executable, "-m", "foresay.workers.child"]


class LocalWorker(ChildProcess, Worker):
    """A worker process on this machine."""

    def __init__(self, name: str, setup: Plain, environment: dict[str, str]) -> None:
        """Start the process and wait for its setup. Raises the error of the setup, and ForesayError if the process ends."""
        super().__init__(name, COMMAND, os.environ | environment)
        self.name = name
        try:
            self.send(setup)
            while not (replies := self.read()):
                self.wait_ready()
            self.described, self.capacity = parse_setup_reply(replies[0])
        except BaseException:
            self.close()
            raise

    def give(self, number: int, task: Plain) -> None:
        """See Worker."""
        self.send({"take": number, "task": task})

    def close(self) -> None:
        """See Worker."""
        self.end("it was closed")


class Processes(WorkerBackend):
    """`count` processes with one setup."""

    def __init__(self, setup: Plain, count: int, *, threads: int | None = None) -> None:
        """threads: per process, by default an even share of the cores. Several GPUs are assigned in turn."""
        self._setup = setup
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = threads or max(1, cores // count)

    def start(self, index: int) -> LocalWorker:
        """Start worker `index`, on its GPU if there are several."""
        setup = {**self._setup, "threads": self._threads}
        gpus = torch.cuda.device_count()
        if "load" in setup and gpus > 1 and setup["load"].get("device") in (None, "cuda"):
            setup["load"] = {**setup["load"], "device": f"cuda:{index % gpus}"}
        return LocalWorker(f"worker {index + 1}", setup, {"OMP_NUM_THREADS": str(self._threads)})

    def poll(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        """Wait at most a second and yield the replies that have arrived."""
        with selectors.DefaultSelector() as ready:
            for worker in cast(Sequence[LocalWorker], workers):
                worker.register(ready)
            readable = [key.data for key, _ in ready.select(1.0)]
        # the pipe of a worker that exited stays open while a child process of the worker has it
        ended = [worker for worker in cast(Sequence[LocalWorker], workers) if worker.has_exited]
        for worker in dict.fromkeys([*readable, *ended]):
            try:
                lines = worker.read()
            except ForesayError as error:
                yield worker, -1, WorkerDiedError(str(error))
                continue
            for line in lines:
                yield worker, *parse_reply(line)
