"""A GGUF file for llama.cpp, with its options.

Owns the checks before llama.cpp loads a file. Does not know where files are (location.py).
"""

from __future__ import annotations

import torch

from foresay.errors import UnsupportedModelError
from foresay.models.gguf.header import GgufHeader
from foresay.models.hardware import Hardware
from foresay.models.llama_cpp import binding
from foresay.models.llama_cpp.model import LlamaCppModel
from foresay.models.sources.load_options import LoadOptions


def open_gguf(header: GgufHeader, options: LoadOptions) -> LlamaCppModel:
    """Return the file's model. Raises ConfigError if llama-cpp-python is missing, and as `binding.Weights` does."""
    binding.library()
    path = header.path
    if any(name.startswith("rope_factors") for name in header.tensors):
        raise UnsupportedModelError(
            f"{str(path)!r} scales rotary positions by factors that depend on the size of llama.cpp's context, which grows with "
            "the rows; decode it without backend='llama.cpp'"
        )
    device = torch.device("cpu" if options.device == "cpu" else options.device or "cuda")
    if options.progress is not None:
        options.progress(f"Loading {path.name}")
    weights = binding.Weights(
        path, gpu_layers=0 if Hardware(device).on_cpu else options.gpu_layers, main_gpu=device.index
    )
    size = header.values.get(f"{header.architecture}.attention.key_length")
    return LlamaCppModel(weights, head_size=None if size is None else int(size))
