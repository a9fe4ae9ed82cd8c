"""The host's side of a peer in another interpreter: starts `worker.py` there, sends it jobs, and ends it.

Owns the messages and the time limits; `child_process.py` owns the process. The child lives on between runs, so that repeats can
be interleaved with foresay's runs; while idle it uses no processor time.
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
"""Maximum context length of an engine, limited further by the model: engines allocate memory for the whole context."""
MAX_BATCH = 128
"""Maximum number of concurrent sequences in vLLM."""


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
        """Return versions, dtype and settings, as the worker reported them after loading."""
        return dict(self._about)

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int) -> PeerRun:
        """Decode the prompts. The worker measures the time, so that inter-process communication does not count.

        Raises ConfigError for settings that the peer does not support, and ForesayError if the worker fails.
        """
        check_run(self.name, prompts, params, batch_size)
        if self._single and batch_size > 1:
            raise ConfigError(f"{self.name} runs one prompt at a time, not {batch_size}; use batch size 1")
        if batch_size > MAX_BATCH:
            raise ConfigError(
                f"{self.name} is loaded for {MAX_BATCH} prompts at a time, not {batch_size}; use a smaller batch"
            )
        check_length(self.name, prompts, params.max_new_tokens, self._context, " that it was loaded with")
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

    limit_s: time limit of loading, in seconds. Raises ConfigError, ModelNotFoundError or ForesayError if the interpreter or the
    model cannot be used, after ending the worker.
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
    reported = {key: str(job[key]) for key in ("model", "dtype", "threads")}
    return WorkerPeer(name, worker, job, {**about, **reported, "interpreter": python})


def interpreter(spec: PeerSpec) -> str:
    """Return the path of the interpreter in an expression. Raises ConfigError if it cannot be run."""
    given = os.path.expanduser(spec.python or "")
    if found := shutil.which(given):
        return os.path.abspath(found)
    if os.path.isdir(given):
        raise ConfigError(f"{spec.kind}: {given!r} is a folder; name the interpreter, such as {given}/bin/python")
    reason = "cannot be executed" if os.path.exists(given) else "does not exist"
    raise ConfigError(
        f"{spec.kind}: the interpreter {given!r} {reason}; name the interpreter that it is installed in "
        "(see docs/how-to/other-engines.md)"
    )


def load_job(spec: PeerSpec, model: str, dtype: str, threads: int) -> dict[str, Any]:
    """Return the load message for the worker. Raises ConfigError or ModelNotFoundError for a model that it cannot read."""
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
    """Return additional arguments of vLLM's LLM from a file in the format of `foresay vllm-config --json`."""
    if "arguments" not in spec.settings:
        return {}
    path = spec.settings["arguments"]
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{spec.kind}: arguments={path!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{spec.kind}: arguments={path!r} must contain a JSON object")
    return {key: value for key, value in found.items() if key != "model"}


def environment(kind: str, threads: int) -> dict[str, str]:
    """Return the worker's environment: ours without the variables of this interpreter, with its threads and no network."""
    out = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    out |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if kind == "vllm":
        out |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": _cores(threads)}
        for key, value in (
            ("VLLM_CPU_KVCACHE_SPACE", "2"),
            ("VLLM_LOGGING_LEVEL", "WARNING"),
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),  # engine within the worker: 1.5 times faster on two cores
        ):
            out.setdefault(key, value)
    return out


def _cores(threads: int) -> str:
    """Return the processors that the threads of vLLM's own processes, if it starts any, are bound to.

    By default vLLM uses only one of two sibling processors.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return ",".join(map(str, usable[:threads]))
