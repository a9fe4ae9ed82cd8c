"""llama.cpp's C interface, as llama-cpp-python declares it: weights in memory, and nothing of rows.

Owns the import, what is said where it fails, and how long weights live. Knows no cache and no laws.
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

_HOW = "pip install 'foresay[llamacpp]' compiles it for this machine, in about 8 minutes"
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.DEBUG, 4: logging.INFO}
"""ggml's levels: debug, info, warnings and errors; what goes on after one has the level before it."""
_ERROR = 4
_NEEDED = (
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_state_seq_get_data",
    "llama_decode",
    "llama_get_memory",
    "llama_model_is_hybrid",
    "llama_model_is_diffusion",
    "llama_model_n_head_kv",
    "llama_supports_gpu_offload",
)
_FIELDS = {"llama_context_params": {"kv_unified", "swa_full", "n_seq_max"}, "llama_model_params": {"use_extra_bufts"}}


@cache
def library() -> Any:
    """The functions of llama.h. Raises ConfigError where llama-cpp-python is missing, broken or too old."""
    try:
        import llama_cpp.llama_cpp as found
    except ModuleNotFoundError as error:
        raise ConfigError(f"backend='llama.cpp' needs llama-cpp-python ({error}): {_HOW}") from None
    except (ImportError, OSError, RuntimeError) as error:  # its library cannot be opened here
        raise ConfigError(f"llama-cpp-python is installed and cannot be used: {error}; {_HOW}") from error
    absent = [name for name in _NEEDED if not hasattr(found, name)]
    for kind, names in _FIELDS.items():  # ctypes takes fields that are none without a word
        absent += sorted(names - {field[0] for field in getattr(getattr(found, kind, None), "_fields_", ())})
    if absent:
        raise ConfigError(f"this llama-cpp-python is too old (it lacks {', '.join(absent)}); {_HOW}")
    _listen(found)
    found.llama_backend_init()
    return found


_said: list[str] = []
"""llama.cpp's last errors."""


def _listen(found: Any) -> None:
    """Have what llama.cpp says go to the log; unasked it writes thousands of lines to stderr."""

    def hear(level: int, text: bytes, _: Any) -> None:
        line = text.decode(errors="replace").strip()
        if level == _ERROR and line:
            _said[:] = [*_said[-3:], line]
        if line and logger.isEnabledFor(_LEVELS.get(level, logging.DEBUG)):
            logger.log(_LEVELS.get(level, logging.DEBUG), "llama.cpp: %s", line)

    called = found.llama_log_callback(hear)
    _heard.append(called)
    found.llama_log_set(called, ctypes.c_void_p(0))


_heard: list[Any] = []
"""Callbacks that llama.cpp holds, which must live as long as it does."""


def reason() -> str:
    """What llama.cpp said last of what went wrong."""
    return "; ".join(_said) or "it gives no reason"


def version() -> str:
    """Of llama-cpp-python."""
    import llama_cpp

    return str(llama_cpp.__version__)


class Weights:
    """A GGUF file as llama.cpp loads it; freed when nobody holds it any more.

    gpu_layers: layers that go to GPUs, all where None and a GPU is there. main_gpu: the one that takes them; None shares them
    out. extra_buffers: whether kernels may lay weights out anew. Raises ModelLoadError for a file that llama.cpp does not read,
    and UnsupportedModelError for a model whose rows cannot be rewound.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, gpu_layers: int | None, main_gpu: int | None, extra_buffers: bool
    ) -> None:
        c = library()
        params = c.llama_model_default_params()
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = extra_buffers
        if main_gpu is not None:  # that one alone
            params.main_gpu, params.split_mode = main_gpu, c.LLAMA_SPLIT_MODE_NONE
        self.path, self.extra_buffers = Path(path), extra_buffers
        self.offloaded = gpu_layers != 0 and bool(c.llama_supports_gpu_offload())
        """Whether layers may be on GPUs."""
        self.pointer: int = c.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelLoadError(f"llama.cpp ({version()}) cannot load {os.fspath(path)!r}: {reason()}")
        weakref.finalize(self, c.llama_model_free, self.pointer)
        self.vocab = c.llama_model_get_vocab(self.pointer)
        why = self._why_not()
        if why is not None:
            raise UnsupportedModelError(f"{os.fspath(path)!r} cannot be decoded through llama.cpp: {why}")

    def _why_not(self) -> str | None:
        c = library()
        if c.llama_model_has_encoder(self.pointer):
            return "it has an encoder"
        if c.llama_model_is_diffusion(self.pointer):
            return "it does not write from left to right"
        if c.llama_model_is_recurrent(self.pointer) or c.llama_model_is_hybrid(self.pointer):
            return "its recurrent state cannot be rewound to before a rejected token"
        return None

    @property
    def description(self) -> str:
        """Family, size and format in llama.cpp's words, as "llama 135M Q4_1"."""
        text = ctypes.create_string_buffer(256)
        library().llama_model_desc(self.pointer, text, len(text))
        return text.value.decode(errors="replace")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return int(library().llama_model_size(self.pointer))

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text and a turn."""
        c = library()
        return frozenset(one for one in (c.llama_vocab_eos(self.vocab), c.llama_vocab_eot(self.vocab)) if one >= 0)
