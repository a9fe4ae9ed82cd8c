"""Workers as actors of a Ray cluster, each with the cores and the GPU that it requests. Needs the extra `ray`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from foresay.errors import ConfigError
from foresay_lab.workers import jobs
from foresay_lab.workers.pool import Begun, Plain, Result


class WorkerActor:
    """The class that runs in a Ray actor."""

    begin = staticmethod(jobs.begin)
    advance = staticmethod(jobs.advance)


class Actors:
    """`count` actors with one setup; see `pool.Backend`."""

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
        on_gpu = device is None or str(device).startswith("cuda")
        if count * each > cores:
            raise ConfigError(
                f"{count} workers with {each} cores each need more than the cluster's {cores} cores; use fewer"
            )
        if device is not None and on_gpu and gpus < count:
            raise ConfigError(f"{count} workers with a GPU each need more than the cluster's {gpus} GPUs; use fewer")
        if takes_gpu := on_gpu and gpus >= count:  # Ray makes only its own GPU visible to each actor
            setup = {**setup, "load": {**setup["load"], "device": "cuda"}}
        self._setup, self._kill = {**setup, "threads": each}, ray.kill
        self._actor = ray.remote(num_cpus=each, num_gpus=float(takes_gpu), max_restarts=0)(WorkerActor)

    def start(self, index: int) -> tuple[Any, Future[Begun]]:
        """See Backend."""
        actor = self._actor.remote()
        return actor, actor.begin.remote(self._setup).future()

    def advance(self, worker: Any, tasks: Sequence[tuple[int, Any]]) -> Future[list[Result]]:
        """See Backend."""
        call: Future[list[Result]] = worker.advance.remote(tasks).future()
        return call

    def close(self, worker: Any) -> None:
        """See Backend."""
        self._kill(worker)
