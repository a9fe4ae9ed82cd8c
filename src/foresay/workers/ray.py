"""Workers as actors of a Ray cluster, each with the cores and the GPU that it requests.

Owns the actors. Each receives a batch of tasks and replies when all of them are done. Needs the extra `ray`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from foresay.errors import ConfigError, ForesayError
from foresay.workers.jobs import Job, open_job
from foresay.workers.messages import Plain, error_fields, parse_reply, parse_setup_reply, reply
from foresay.workers.pool import Worker, WorkerBackend, WorkerDiedError


class WorkerActor:
    """The class that runs in a Ray actor: one job, with tasks in batches."""

    def __init__(self, setup: Plain) -> None:
        self._setup = setup
        self._job: Job | None = None

    def begin(self) -> Plain:
        """Open the job. Return its description or the error."""
        try:
            self._job = open_job(self._setup)
        except ForesayError as error:
            return error_fields(error)
        return {"ready": self._job.describe(), "room": self._job.capacity}

    def do(self, tasks: list[tuple[int, Plain]]) -> list[Plain]:
        """Perform all tasks. Return replies of the same form as a worker process sends."""
        job, out = self._job, []
        assert job is not None
        for number, task in tasks:
            try:
                job.take(number, task)
            except ForesayError as error:
                out.append(reply(number, error))
        while job.has_work:
            out += [reply(number, result) for number, result in job.step()]
        return out


class RayWorker(Worker):
    """A worker in a Ray actor."""

    def __init__(self, name: str, actor: Any) -> None:
        import ray

        self.name, self._actor = name, actor
        try:
            message = ray.get(actor.begin.remote())
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(f"{name}: {error}") from error
        if "error" in message:
            ray.kill(actor)
        self.described, self.capacity = parse_setup_reply(message)
        self._tasks: list[tuple[int, Plain]] = []
        self.running: Any = None
        """The Ray reference to the current batch of tasks, or None."""

    def give(self, number: int, task: Plain) -> None:
        """See Worker. The task starts with the next `start_batch`."""
        self._tasks.append((number, task))

    def start_batch(self) -> None:
        """Start the assigned tasks if the actor is idle."""
        if self.running is None and self._tasks:
            self.running, self._tasks = self._actor.do.remote(self._tasks), []

    def close(self) -> None:
        """See Worker."""
        import ray

        ray.kill(self._actor)


class Actors(WorkerBackend):
    """`count` actors with one setup."""

    def __init__(self, setup: Plain, count: int, *, threads: int | None = None) -> None:
        """threads: cores per actor, by default an even share. Each actor gets a GPU if the cluster has enough GPUs.

        Joins a running cluster. Raises ConfigError if Ray is not installed, and for more cores or GPUs than the cluster has.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray ({error}): pip install 'foresay[ray]'") from None
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=False)
        resources = ray.cluster_resources()
        cores, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        each = threads or max(1, cores // count)
        device = setup["load"].get("device") if "load" in setup else "cpu"
        if count * each > cores:
            raise ConfigError(
                f"{count} workers with {each} cores each need more than the cluster's {cores} cores; use fewer"
            )
        if device is not None and str(device).startswith("cuda") and gpus < count:
            raise ConfigError(f"{count} workers with a GPU each need more than the cluster's {gpus} GPUs; use fewer")
        takes_gpu = gpus >= count and (device is None or str(device).startswith("cuda"))
        if takes_gpu:  # Ray makes only its own GPU visible to each actor
            setup = {**setup, "load": {**setup["load"], "device": "cuda"}}
        self._setup = {**setup, "threads": each}
        self._actor = ray.remote(num_cpus=each, num_gpus=float(takes_gpu), max_restarts=0)(WorkerActor)

    def start(self, index: int) -> RayWorker:
        """Start the actor of worker `index`."""
        return RayWorker(f"worker {index + 1}", self._actor.remote(self._setup))

    def poll(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        """Start idle actors, wait at most a second for one, and yield its replies."""
        import ray

        busy = {}
        for worker in cast(Sequence[RayWorker], workers):
            worker.start_batch()
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
                yield worker, *parse_reply(line)
