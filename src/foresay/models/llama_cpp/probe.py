"""Tests in a child process whether llama.cpp's repacked kernels work, once for each machine and kind of file.

A crashing kernel ends its process; on one machine with AMX, the kernels for repacked 4-bit weights crashed, and those for the
file's layout did not. Owns the trial and its stored result. Run as a script, this module is the trial.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger("foresay")

_LIMIT_S = 600.0
_BY_SIGNAL = "ended by signal"
_TRIAL_TOKENS = (48, 1, 8)
"""Number of tokens of each pass of the trial."""


def extra_buffers_work(path: Path, kinds: str, versions: str) -> bool:
    """Return True if weights may be repacked.

    kinds: tensor types of the file. versions: of the package and the machine; with `kinds`, the key of the stored result. Raises
    ModelLoadError if the file can be decoded neither with nor without repacking.
    """
    from foresay.errors import ConfigError, ModelLoadError
    from foresay.files import atomic_write, cache_dir

    key = hashlib.sha256(f"{kinds} {versions}".encode()).hexdigest()[:16]
    result_path = cache_dir() / "llama.cpp" / f"{key}.json"
    try:
        return bool(json.loads(result_path.read_text(encoding="utf-8"))["extra_buffers"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    works, reason = _run_trial(path, extra_buffers=True)
    if not works:
        crashed = reason.startswith(_BY_SIGNAL) and not reason.endswith(f" {int(signal.SIGKILL)}")
        plain, plain_reason = _run_trial(path, extra_buffers=False)
        if not plain:
            raise ModelLoadError(f"llama.cpp cannot decode {str(path)!r} on this machine: {plain_reason}")
        logger.warning(
            "llama.cpp's repacked kernels do not work on this machine (%s); using the file's weight layout, which may be slower",
            reason,
        )
        if not crashed:  # out of time or memory: try again at the next load
            return False
    try:
        with atomic_write(result_path, parents=True) as temporary:
            temporary.write_text(
                json.dumps({"extra_buffers": works, "versions": versions, "why": reason}), encoding="utf-8"
            )
    except ConfigError as error:
        logger.info("the result of testing llama.cpp's kernels cannot be stored: %s", error)
    return works


def machine_mark() -> str:
    """Return a digest of everything that selects kernels: the processor with its instruction sets, and the library's files."""
    import llama_cpp

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        processor = [platform.processor(), platform.machine()]
    folder = Path(getattr(llama_cpp, "__file__", None) or ".").parent
    library_files = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in folder.glob("lib/*"))
    return hashlib.sha256(repr((processor, library_files)).encode()).hexdigest()[:16]


def _run_trial(path: Path, *, extra_buffers: bool) -> tuple[bool, str]:
    """Run the trial in a child process. Return (True, "") if it succeeds, else (False, reason)."""
    # run by path: importing the package would load PyTorch into the trial
    command = [sys.executable, "-P", __file__, str(path), str(int(extra_buffers))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_LIMIT_S:.0f} s"
    if done.returncode < 0:
        return False, f"{_BY_SIGNAL} {-done.returncode}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return done.returncode == 0, "" if done.returncode == 0 else (
        lines[-1] if lines else f"exit code {done.returncode}"
    )


def _trial(path: str, *, extra_buffers: bool) -> None:
    """Decode a few tokens of one sequence. Raises SystemExit if that fails or gives logits that are not finite."""
    import ctypes
    import math

    import llama_cpp.llama_cpp as c

    c.llama_backend_init()
    params = c.llama_model_default_params()
    params.use_extra_bufts, params.n_gpu_layers = extra_buffers, 0
    model = c.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise SystemExit("llama.cpp cannot load the file")
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 64, 64
    context = c.llama_init_from_model(model, settings)
    position = 0
    for count in _TRIAL_TOKENS:
        batch = c.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = 5 + i, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if c.llama_decode(context, batch):
            raise SystemExit("a forward pass failed")
        scores = ctypes.cast(c.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        if not all(math.isfinite(scores[i]) for i in range(100)):
            raise SystemExit("its logits are not finite")
        position += count


if __name__ == "__main__":
    _trial(sys.argv[1], extra_buffers=sys.argv[2] == "1")
