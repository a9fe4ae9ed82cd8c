"""llama.cpp's C interface, as declared by llama-cpp-python, and weights in memory.

Owns the import, its error messages, llama.cpp's log and the lifetime of weights. Knows no rows, caches or distributions.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from foresay.errors import ConfigError, ModelLoadError, UnsupportedModelError

logger = logging.getLogger("foresay")

_INSTALL_HINT = "pip install 'foresay[llamacpp]' compiles it for this machine, in about 8 minutes"
_ERROR = 4
"""ggml's level of errors."""
_NEWEST_FUNCTION = "llama_model_is_hybrid"
"""The newest of the functions and fields that are used here."""


@cache
def library() -> Any:
    """Return the functions of llama.h. Raises ConfigError if llama-cpp-python is missing, broken or too old."""
    try:
        import llama_cpp.llama_cpp as found
    except (ImportError, OSError, RuntimeError) as error:  # it is missing, or its shared library cannot be opened
        text = f"needs llama-cpp-python, which cannot be loaded ({error}): {_INSTALL_HINT}"
        raise ConfigError(text, param="backend", value="llama.cpp") from error
    if not hasattr(found, _NEWEST_FUNCTION):
        raise ConfigError(f"is too old (it lacks {_NEWEST_FUNCTION}); {_INSTALL_HINT}", param="llama-cpp-python")
    _callbacks.append(found.llama_log_callback(_log))
    found.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))
    found.llama_backend_init()
    return found


_last_errors: list[str] = []
"""The last four error lines of llama.cpp."""


_callbacks: list[Any] = []
"""Callbacks registered with llama.cpp, referenced here so that they live as long as the library."""


def _log(level: int, text: bytes, _: Any) -> None:
    """Send llama.cpp's messages to the log; by default it prints thousands of lines to stderr."""
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        _last_errors[:] = [*_last_errors[-3:], line]
    if line:
        logger.log(logging.INFO if level == _ERROR else logging.DEBUG, "llama.cpp: %s", line)


def last_error() -> str:
    """Return llama.cpp's last error messages."""
    return "; ".join(_last_errors) or "llama.cpp reported no reason"


def version() -> str:
    """Return the version of llama-cpp-python."""
    import llama_cpp

    return str(llama_cpp.__version__)


class Weights:
    """A GGUF file loaded by llama.cpp; freed with the last reference to this object.

    gpu_layers: number of layers on GPUs; None for all if there is a GPU. main_gpu: index of the only GPU to use; None splits the
    layers over all GPUs. Raises ModelLoadError if llama.cpp cannot load the file, and UnsupportedModelError for an encoder, a
    diffusion model, or a model whose state cannot be rewound.
    """

    def __init__(self, path: str | os.PathLike[str], *, gpu_layers: int | None, main_gpu: int | None) -> None:
        c = library()
        params = c.llama_model_default_params()
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = self.repacked = not _has_amx()
        if main_gpu is not None:
            params.main_gpu, params.split_mode = main_gpu, c.LLAMA_SPLIT_MODE_NONE
        self.offloaded = gpu_layers != 0 and bool(c.llama_supports_gpu_offload())
        """True if layers may be on GPUs."""
        self.pointer: int = c.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelLoadError(f"llama.cpp ({version()}) cannot load {os.fspath(path)!r}: {last_error()}")
        weakref.finalize(self, c.llama_model_free, self.pointer)
        self.vocab = c.llama_model_get_vocab(self.pointer)
        refused = {
            "it has an encoder": c.llama_model_has_encoder,
            "it is a diffusion model, which does not generate from left to right": c.llama_model_is_diffusion,
            "its recurrent state cannot be rewound to before a rejected token": lambda model: (
                c.llama_model_is_recurrent(model) or c.llama_model_is_hybrid(model)
            ),
        }
        for why, applies in refused.items():
            if applies(self.pointer):
                raise UnsupportedModelError(f"{os.fspath(path)!r} is not supported with backend='llama.cpp': {why}")

    @property
    def description(self) -> str:
        """Family, size and format as llama.cpp describes them, such as "llama 135M Q4_1"."""
        text = ctypes.create_string_buffer(256)
        library().llama_model_desc(self.pointer, text, len(text))
        return text.value.decode(errors="replace")

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return int(library().llama_model_size(self.pointer))


def _has_amx() -> bool:
    """True on a processor with AMX, where llama.cpp's kernels for repacked 4-bit weights crash (signal 11)."""
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
