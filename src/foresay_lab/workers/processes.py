"""Workers as processes on this machine, each with a share of the cores or its own GPU.

Each is a `ProcessPoolExecutor` of one process, so that the death of one is noticed as its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from foresay_lab.workers.jobs import advance, begin
from foresay_lab.workers.pool import Begun, Plain, Result


class LocalWorker(NamedTuple):
    """A worker process and the executor that calls functions in it."""

    executor: ProcessPoolExecutor
    process: BaseProcess


class Processes:
    """`count` processes with one setup; see `pool.Backend`."""

    def __init__(self, setup: Plain, count: int, *, threads: int | None = None) -> None:
        """threads: per process, by default an even share of the cores. Several GPUs are assigned in turn."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._setup = {**setup, "threads": threads or max(1, cores // count)}

    def start(self, index: int) -> tuple[LocalWorker, Future[Begun]]:
        """Start worker `index`, on its GPU if there are several."""
        setup, gpus = dict(self._setup), torch.cuda.device_count()
        if "load" in setup and gpus > 1 and setup["load"].get("device") in (None, "cuda"):
            setup["load"] = {**setup["load"], "device": f"cuda:{index % gpus}"}
        executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _initialise)
        others = set(multiprocessing.active_children())
        is_main = threading.current_thread() is threading.main_thread()
        # the process inherits this: Ctrl-C in a terminal reaches all processes, and the parent ends the workers
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
        try:
            begun = executor.submit(begin, setup)
        finally:
            if handler is not None:
                signal.signal(signal.SIGINT, handler)
        [process] = set(multiprocessing.active_children()) - others
        return LocalWorker(executor, process), begun

    def advance(self, worker: LocalWorker, tasks: Sequence[tuple[int, Any]]) -> Future[list[Result]]:
        """See Backend. The future of a dead process is returned too."""
        try:
            return worker.executor.submit(advance, tasks)
        except RuntimeError as error:  # it died before this call
            call: Future[list[Result]] = Future()
            call.set_exception(error)
            return call

    def close(self, worker: LocalWorker) -> None:
        """See Backend."""
        worker.process.kill()
        worker.executor.shutdown(cancel_futures=True)


def _initialise() -> None:
    """Keep standard output for the parent, and end with it."""
    os.dup2(2, 1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
