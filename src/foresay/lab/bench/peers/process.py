"""The host's side of a peer in another interpreter: starts `worker.py` there, sends it jobs, and ends it.

Owns what is sent and the time limits; `child_process.py` owns the process. The child stays between runs, so that repeats can be
interleaved with ours; idle, it waits for a line and takes no processor time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foresay.checks import check_int
from foresay.child_process import ChildProcess
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.lab.bench.peers.base import (
    PASSED_ON,
    PeerRun,
    PeerSpec,
    check_length,
    check_run,
    context_of,
    count_setting,
    gguf_file,
    model_folder,
    torch_dtype,
)

WORKER = Path(__file__).with_name("worker.py")
LOAD_LIMIT_S = 600.0
RUN_LIMIT_S = 3600.0
CONTEXT = 8192
"""The longest context an engine is loaded with, or the model's where that is shorter: each keeps memory for all of it."""
MAX_BATCH = 128
"""The most sequences that vLLM is loaded for."""


class WorkerPeer:
    """A peer that runs in a worker process."""

    def __init__(self, name: str, worker: ChildProcess, job: Mapping[str, Any], about: Mapping[str, str]) -> None:
        self.name = name
        self._worker = worker
        self._single = job["engine"] in ("llama.cpp", "economize")
        self._context: int = job["context"]
        self._about = about

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._worker.pid

    def describe(self) -> dict[str, str]:
        """Versions, dtype and settings, as the worker reported them after loading."""
        return dict(self._about)

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int) -> PeerRun:
        """Decode the prompts; timed in the worker, so that inter-process communication does not count.

        Raises ConfigError for what this peer cannot do, and ForesayError when the worker fails.
        """
        check_run(self.name, prompts, params, batch_size)
        if self._single and batch_size > 1:
            raise ConfigError(f"{self.name} is run one prompt at a time, not {batch_size}; use batch size 1")
        if batch_size > MAX_BATCH:
            raise ConfigError(
                f"{self.name} is loaded for {MAX_BATCH} prompts at a time, not {batch_size}; use a smaller batch"
            )
        check_length(self.name, prompts, params.max_new_tokens, self._context, " it was loaded with")
        job = {"op": "run", "batch_size": batch_size, **{name: getattr(params, name) for name in PASSED_ON}}
        ids = [[int(token) for token in prompt] for prompt in prompts]
        reply = self._worker.request({**job, "prompts": ids}, RUN_LIMIT_S)
        return PeerRun(reply["outputs"], reply["seconds"], reply.get("passes"))

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def open_worker(
    spec: PeerSpec, *, model: str, dtype: str, threads: int | None, script: Path = WORKER, limit_s: float = LOAD_LIMIT_S
) -> WorkerPeer:
    """Start a worker in the interpreter that the expression names, and load the model there.

    limit_s: seconds that loading may take. Raises ConfigError, ModelNotFoundError or ForesayError when the interpreter or the
    model cannot be used; the worker is then ended.
    """
    count = torch.get_num_threads() if threads is None else check_int("threads", threads, 1)
    files = {"arguments": Path(spec.settings["arguments"]).stem} if "arguments" in spec.settings else {}
    name = "+".join([spec.kind, *(files.get(key, key) for key in spec.settings)])
    python = interpreter(spec)
    job = load_job(spec, model, dtype, count)
    worker = ChildProcess(name, [python, str(script)], environment(spec.kind, count))
    try:
        about = worker.request({"op": "load", **job}, limit_s)["about"]
    except BaseException:
        worker.close()
        raise
    kept = {key: str(job[key]) for key in ("model", "dtype", "threads")}
    return WorkerPeer(name, worker, job, {**about, **kept, "interpreter": python})


def interpreter(spec: PeerSpec) -> str:
    """The path of the interpreter that an expression names. Raises ConfigError where it cannot be run."""
    given = os.path.expanduser(spec.python or "")
    if found := shutil.which(given):
        return os.path.abspath(found)
    if os.path.isdir(given):
        raise ConfigError(f"{spec.kind}: {given!r} is a folder; name the interpreter, such as {given}/bin/python")
    there = "cannot be executed" if os.path.exists(given) else "does not exist"
    raise ConfigError(
        f"{spec.kind}: the interpreter {given!r} {there}; name the one it is installed in (docs/peers.md)"
    )


def load_job(spec: PeerSpec, model: str, dtype: str, threads: int) -> dict[str, Any]:
    """The load message for the worker. Raises ConfigError or ModelNotFoundError for a model that it cannot read."""
    job: dict[str, Any] = {"engine": spec.kind, "threads": threads}
    if spec.kind == "llama.cpp":
        torch_dtype(dtype)
        job |= {"model": gguf_file(model), "dtype": "the GGUF file's", "context": CONTEXT}
        return {**job, "lookup": count_setting(spec, "lookup")}
    folder = model_folder(model)
    context = min(CONTEXT, context_of(folder) or CONTEXT)
    job |= {"model": folder, "dtype": str(torch_dtype(dtype)).removeprefix("torch."), "context": context}
    if spec.kind == "economize":
        return {**job, "lookup": count_setting(spec, "lookup")}
    return {**job, "max_batch": MAX_BATCH, "ngram": count_setting(spec, "ngram"), "arguments": _arguments(spec)}


def _arguments(spec: PeerSpec) -> dict[str, Any]:
    """Further arguments of vLLM's LLM, out of a file such as `foresay vllm-config --json` prints."""
    if "arguments" not in spec.settings:
        return {}
    path = spec.settings["arguments"]
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{spec.kind}: arguments={path!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{spec.kind}: arguments={path!r} must hold a JSON object")
    return {key: value for key, value in found.items() if key != "model"}


def environment(kind: str, threads: int) -> dict[str, str]:
    """The worker's environment: ours without what would mislead another interpreter, with its threads and no network."""
    out = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    out |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if kind == "vllm":
        out |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": _cores(threads)}
        for key, value in (
            ("VLLM_CPU_KVCACHE_SPACE", "2"),
            ("VLLM_LOGGING_LEVEL", "WARNING"),
            (
                "VLLM_ENABLE_V1_MULTIPROCESSING",
                "0",
            ),  # the engine in the worker itself: 1.5 times faster on two cores
        ):
            out.setdefault(key, value)
    return out


def _cores(threads: int) -> str:
    """The processors that vLLM's own processes, if it is set to start any, bind their threads to.

    Left to itself it takes one of two siblings only.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return ",".join(map(str, usable[:threads]))
