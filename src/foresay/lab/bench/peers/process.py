"""The host's side of a peer in another interpreter: starts `worker.py` there, sends it jobs, and ends it.

Owns the child process with its whole process group, from its start to its end, and the time limits. The child stays
between runs, so that repeats can be interleaved with ours; idle, it waits for a line and takes no processor time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from foresay.checks import check_int
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError
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
GRACE_S = 5.0
"""How long a worker may take to end by itself."""
CONTEXT = 8192
"""The longest context an engine is loaded with, or the model's where that is shorter: each keeps memory for all of it."""
MAX_BATCH = 128
"""The most sequences that vLLM is loaded for."""
_CHUNK = 65536


class Worker:
    """A child process that answers a line of JSON with a line of JSON."""

    def __init__(self, label: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._label = label
        self._ended: str | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        try:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=dict(environment),
                start_new_session=True,  # a group of its own: it is ended with its children, and Ctrl-C is ours to handle
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise ConfigError(
                f"{label}: {command[0]!r} cannot be run ({error.strerror or error}); name a Python"
            ) from error
        self._buffer = b""
        os.set_blocking(self._pipe(self._child.stdin), False)
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """The child's process id, which is its process group's too."""
        return self._child.pid

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a message and wait for its reply.

        Raises ConfigError for a job that the worker refuses; it keeps running. Raises ForesayError when the worker has ended,
        does not reply within `limit_s` seconds or replies with anything but the protocol; it is then ended.
        """
        if self._ended is not None:
            raise ForesayError(f"{self._label}: the worker is gone ({self._ended}); open the peer again")
        try:
            reply = self._reply(self._exchange(json.dumps(message).encode() + b"\n", limit_s))
        except BaseException as error:
            self._end(str(error) if isinstance(error, ForesayError) else type(error).__name__)
            raise
        if reply["ok"]:
            return reply
        raise ConfigError(f"{self._label}: {reply.get('error')}")

    def close(self) -> None:
        """Request the worker to end, and end it with all of its children; harmless when repeated."""
        if self._ended is None:
            with contextlib.suppress(OSError, ForesayError):
                self._exchange(b'{"op": "close"}\n', GRACE_S)
                self._wait(GRACE_S)
            self._end("it was closed")

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("ok"), bool):
            shown = line[:80].decode(errors="replace").strip()
            raise ForesayError(f"{self._label}: the worker answered {shown!r}; is {self._child.args[0]!r} a Python?")  # type: ignore[index]
        return reply

    def _exchange(self, data: bytes, limit_s: float) -> bytes:
        """Write a line and read one, whichever the pipes are ready for, until the limit."""
        until = monotonic() + limit_s
        stdin, stdout = self._pipe(self._child.stdin), self._pipe(self._child.stdout)
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            ready.register(stdin, selectors.EVENT_WRITE)
            while b"\n" not in self._buffer:
                left = until - monotonic()
                if left <= 0:
                    raise ForesayError(
                        f"{self._label}: no answer within {limit_s:g} s, so it was ended{self._last_words()}"
                    )
                events = ready.select(min(left, 1.0))
                for key, _ in events:
                    if key.fd == stdout:
                        self._read(stdout)
                    else:
                        data = self._write(stdin, data)
                        if not data:
                            ready.unregister(stdin)
                if not events and self._exited():
                    raise self._death()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _read(self, fd: int) -> None:
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            raise self._death()
        self._buffer += chunk

    def _write(self, fd: int, data: bytes) -> bytes:
        """Write some of the data; returns what is left to write."""
        try:
            return data[os.write(fd, data[:_CHUNK]) :]
        except BrokenPipeError:
            raise self._death() from None

    def _death(self) -> ForesayError:
        self._wait(GRACE_S)
        self._signal(signal.SIGKILL)
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ForesayError(f"{self._label}: the worker {how}{self._last_words()}")

    def _last_words(self) -> str:
        """The last line of the child's standard error, for a message."""
        fd = self._stderr.fileno()
        tail = os.pread(fd, 4096, max(0, os.fstat(fd).st_size - 4096)).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        return f"; its last words: {lines[-1][-300:]}" if lines else ""

    def _end(self, reason: str) -> None:
        """End the child and its whole group, and let go of everything. The child is waited for last, so its id stays ours."""
        atexit.unregister(self.close)
        self._ended = reason
        if self._child.returncode is None:
            self._signal(signal.SIGTERM)
            self._wait(GRACE_S)
            self._signal(signal.SIGKILL)
            self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of zombies
            os.killpg(self._child.pid, number)

    def _exited(self) -> bool:
        """Whether the child has ended, without reaping it: until that its id, and its group's, is nobody else's."""
        if not hasattr(os, "waitid"):
            return False
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _wait(self, limit_s: float) -> None:
        until = monotonic() + limit_s
        while self._child.returncode is None and monotonic() < until and not self._exited():
            sleep(0.01)

    @staticmethod
    def _pipe(stream: Any) -> int:
        assert stream is not None
        fd: int = stream.fileno()
        return fd


class WorkerPeer:
    """A peer that runs in a worker process."""

    def __init__(self, name: str, worker: Worker, job: Mapping[str, Any], about: Mapping[str, str]) -> None:
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
        reply = self._worker.ask({**job, "prompts": ids}, RUN_LIMIT_S)
        return PeerRun(reply["outputs"], reply["seconds"])

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
    name = spec.kind if not spec.settings else f"{spec.kind}+{'+'.join(spec.settings)}"
    python = interpreter(spec)
    job = load_job(spec, model, dtype, count)
    worker = Worker(name, [python, str(script)], environment(spec.kind, count))
    try:
        about = worker.ask({"op": "load", **job}, limit_s)["about"]
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
    return {**job, "max_batch": MAX_BATCH, "ngram": count_setting(spec, "ngram")}


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
