"""Whether llama.cpp's own layouts of weights work here: found out in a process of its own, once for a machine and kind of file.

Kernels that crash take their process along; on one machine with AMX those over 4-bit weights did, until weights stayed as the
file has them. Owns the trial and where its result is kept. Run as a script, it is the trial.
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
_TRIED = (48, 1, 8)
"""Tokens of each pass of the trial."""


def extra_buffers_work(path: Path, kinds: str, versions: str) -> bool:
    """Whether weights may be laid out anew. kinds: of the file's tensors. versions: of what else decides.

    Raises ModelLoadError where the file cannot be decoded either way.
    """
    from foresay.errors import ConfigError, ModelLoadError
    from foresay.files import atomic_write, cache_dir

    key = hashlib.sha256(f"{kinds} {versions}".encode()).hexdigest()[:16]
    kept = cache_dir() / "llama.cpp" / f"{key}.json"
    try:
        return bool(json.loads(kept.read_text(encoding="utf-8"))["extra_buffers"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    works, why = _tried(path, extra_buffers=True)
    if not works:
        crashed = why.startswith(_BY_SIGNAL) and not why.endswith(f" {int(signal.SIGKILL)}")
        plain, also = _tried(path, extra_buffers=False)
        if not plain:
            raise ModelLoadError(f"llama.cpp cannot decode {str(path)!r} on this machine: {also}")
        logger.warning(
            "llama.cpp's repacked kernels do not work on this machine (%s); weights stay as the file has them", why
        )
        if not crashed:  # out of time or memory: another time may go well
            return False
    try:
        with atomic_write(kept, parents=True) as whole:
            whole.write_text(json.dumps({"extra_buffers": works, "versions": versions, "why": why}), encoding="utf-8")
    except ConfigError as error:
        logger.info("whether llama.cpp's kernels work is not kept: %s", error)
    return works


def machine_mark() -> str:
    """What decides which kernels run: the processor and what it can, and the library as it was built."""
    import llama_cpp

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        processor = [platform.processor(), platform.machine()]
    folder = Path(getattr(llama_cpp, "__file__", None) or ".").parent
    built = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in folder.glob("lib/*"))
    return hashlib.sha256(repr((processor, built)).encode()).hexdigest()[:16]


def _tried(path: Path, *, extra_buffers: bool) -> tuple[bool, str]:
    """(whether passes came out well, why not)."""
    # by its path: to import the package would load PyTorch into the trial
    command = [sys.executable, "-P", __file__, str(path), str(int(extra_buffers))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_LIMIT_S:.0f} s"
    if done.returncode < 0:
        return False, f"{_BY_SIGNAL} {-done.returncode}"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return done.returncode == 0, "" if done.returncode == 0 else (said[-1] if said else f"exit code {done.returncode}")


def _trial(path: str, *, extra_buffers: bool) -> None:
    """Decode a few tokens of one sequence; numbers that are none end it."""
    import ctypes
    import math

    import llama_cpp.llama_cpp as c

    c.llama_backend_init()
    params = c.llama_model_default_params()
    params.use_extra_bufts, params.n_gpu_layers = extra_buffers, 0
    model = c.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise SystemExit("the file cannot be loaded")
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 64, 64
    context = c.llama_init_from_model(model, settings)
    at = 0
    for count in _TRIED:
        batch = c.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = 5 + i, at + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if c.llama_decode(context, batch):
            raise SystemExit("a pass failed")
        scores = ctypes.cast(c.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        if not all(math.isfinite(scores[i]) for i in range(100)):
            raise SystemExit("its scores are no numbers")
        at += count


if __name__ == "__main__":
    _trial(sys.argv[1], extra_buffers=sys.argv[2] == "1")
