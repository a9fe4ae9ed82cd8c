"""A GGUF file for llama.cpp: its options, and whether its kernels work here.

Owns what is read of a file before llama.cpp loads it. Does not know where files are (catalog.py).
"""

from __future__ import annotations

from pathlib import Path

import torch

from foresay.errors import UnsupportedModelError
from foresay.models.gguf.values import checked_header
from foresay.models.llama_cpp import binding
from foresay.models.llama_cpp.model import LlamaCppModel
from foresay.models.llama_cpp.probe import extra_buffers_work, machine_mark
from foresay.models.sources.load_options import LoadOptions


def open_gguf(path: Path, options: LoadOptions) -> LlamaCppModel:
    """The file's model. Raises ConfigError where llama-cpp-python is missing, and as `binding.Weights` does."""
    binding.library()
    head = checked_header(path)
    if any(name.startswith("rope_factors") for name in head.tensors):
        raise UnsupportedModelError(
            f"{str(path)!r} turns positions by factors that depend on the size of llama.cpp's context, which grows with "
            "the rows; decode it without backend='llama.cpp'"
        )
    kinds = " ".join(sorted({one.kind for one in head.tensors.values()}))
    if options.progress is not None:
        options.progress("Trying llama.cpp's kernels (once for a machine and a kind of file)")
    extra = extra_buffers_work(path, kinds, f"llama-cpp-python {binding.version()}, {machine_mark()}")
    device = torch.device("cpu" if options.device == "cpu" else options.device or "cuda")
    if options.progress is not None:
        options.progress(f"Loading {path.name}")
    weights = binding.Weights(
        path,
        gpu_layers=0 if device.type == "cpu" else options.gpu_layers,
        main_gpu=device.index,
        extra_buffers=extra,
    )
    size = head.values.get(f"{head.architecture}.attention.key_length")
    return LlamaCppModel(weights, head_size=None if size is None else int(size))
