"""Workers as actors of a Ray cluster, each with as many cores or GPUs as it asks for.

Owns the actors. Each is given as many tasks as it holds at a time, and answers when all of them are done. Needs the extra `ray`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from foresay.errors import ConfigError, ForesayError
from foresay.workers.jobs import Job, open_job
from foresay.workers.messages import Plain, begun, heard, refusal, told
from foresay.workers.pool import Place, Worker, WorkerDiedError


class WorkerActor:
    """What runs in an actor: a job, and tasks in batches."""

    def __init__(self, setup: Plain) -> None:
        self._setup = setup
        self._job: Job | None = None

    def begin(self) -> Plain:
        """Open the job; its description, or why not."""
        try:
            self._job = open_job(self._setup)
        except ForesayError as error:
            return refusal(error)
        return {"ready": self._job.describe(), "room": self._job.room}

    def do(self, tasks: list[tuple[int, Plain]]) -> list[Plain]:
        """All of these, as a worker process would say them."""
        job, out = self._job, []
        assert job is not None
        for number, task in tasks:
            try:
                job.take(number, task)
            except ForesayError as error:
                out.append(told(number, error))
        while job.has_work:
            out += [told(number, result) for number, result in job.step()]
        return out


class RayWorker(Worker):
    """An actor."""

    def __init__(self, name: str, actor: Any) -> None:
        import ray

        self.name, self._actor = name, actor
        try:
            said = ray.get(actor.begin.remote())
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(f"{name}: {error}") from error
        if "error" in said:
            ray.kill(actor)
        self.described, self.room = begun(said)
        self._tasks: list[tuple[int, Plain]] = []
        self.running: Any = None
        """What it is doing, for ray.wait."""

    def give(self, number: int, task: Plain) -> None:
        """See Worker; it begins with the next `go_on`."""
        self._tasks.append((number, task))

    def go_on(self) -> None:
        """Begin what was given, if it is idle."""
        if self.running is None and self._tasks:
            self.running, self._tasks = self._actor.do.remote(self._tasks), []

    def close(self) -> None:
        """End it."""
        import ray

        ray.kill(self._actor)


class Actors(Place):
    """`count` actors with one setup."""

    def __init__(self, setup: Plain, count: int, *, threads: int | None = None) -> None:
        """threads: cores of each, an even share unless told. Each has a GPU where the cluster has one for each.

        A cluster that runs is joined. Raises ConfigError without Ray, and for more than the cluster has.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray ({error}): pip install 'foresay[ray]'") from None
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=False)
        there = ray.cluster_resources()
        cores, gpus = int(there.get("CPU", 1)), int(there.get("GPU", 0))
        each = threads or max(1, cores // count)
        device = setup["load"].get("device") if "load" in setup else "cpu"
        if count * each > cores:
            raise ConfigError(f"{count} workers of {each} cores are more than the cluster's {cores}; ask for fewer")
        if device is not None and str(device).startswith("cuda") and gpus < count:
            raise ConfigError(f"{count} workers with a GPU each are more than the cluster's {gpus}; ask for fewer")
        takes_gpu = gpus >= count and (device is None or str(device).startswith("cuda"))
        if takes_gpu:  # Ray shows each the one that it has
            setup = {**setup, "load": {**setup["load"], "device": "cuda"}}
        self._setup = {**setup, "threads": each}
        self._actor = ray.remote(num_cpus=each, num_gpus=float(takes_gpu), max_restarts=0)(WorkerActor)

    def start(self, index: int) -> RayWorker:
        """See Place."""
        return RayWorker(f"worker {index + 1}", self._actor.remote(self._setup))

    def heard(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        """See Place."""
        import ray

        busy = {}
        for worker in cast(Sequence[RayWorker], workers):
            worker.go_on()
            if worker.running is not None:
                busy[worker.running] = worker
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=1.0)
        for one in ready:
            worker = busy[one]
            worker.running = None
            try:
                lines = ray.get(one)
            except ray.exceptions.RayError as error:
                yield worker, -1, WorkerDiedError(f"{worker.name}: {error}")
                continue
            for line in lines:
                yield worker, *heard(line)
