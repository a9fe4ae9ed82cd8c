"""The description of a model, and of how its weights are read, before anything large is read.

Owns the choice of dtype. Knows no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foresay.models.families.table import FAMILIES
from foresay.models.sources.load_options import DTYPES, LoadOptions

OF_TRANSFORMERS = ("quantization_config", "device_map", "tp_plan")
"""Options that transformers alone carries out."""
_BF16 = ("bf16", "bfloat16", torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Description:
    """The configuration of a model, and how its weights are read."""

    config: Any
    """transformers' configuration of the language model."""
    dtype: torch.dtype
    weights: str
    """Format of the weights if any are products, see `LoadedModel.weights`."""
    is_ours: bool = False
    """True for a GGUF file that is read here; transformers reads other files."""
    in_blocks: bool = False
    """True if all of its weights that are stored in blocks are decoded in these."""
    gpu: torch.device | None = None
    """Device on which kernels multiply by its blocks."""
    is_part: bool = False
    """True for the language model of a checkpoint with other parts."""


def keeps_format(options: LoadOptions) -> bool:
    """Return True if weights may be decoded in the format in which they are stored."""
    return options.weights == "auto" and options.dtype in ("auto", *_BF16)


def rounded(options: LoadOptions) -> str:
    """Return the format that weights are rounded to; "" for none."""
    return "" if options.bits is None else options.weights


def dtype_of(options: LoadOptions, config: Any = None) -> torch.dtype:
    """Return the dtype of the options. "auto": the processor's native one, or bf16 if our kernels run whole passes.

    Kernels then read half the bytes. config: of a folder whose weights are decoded; None for other weights.
    """
    dtype, hardware = options.computes_in, options.hardware
    if dtype != "auto":
        return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]
    native = hardware.native_dtype
    is_split = any(getattr(options, name) is not None for name in OF_TRANSFORMERS)
    if config is None or is_split or native == torch.bfloat16 or not hardware.cpu_kernels:
        return native
    from foresay.models.cpu.layers import ACTIVATIONS

    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    is_foreign = getattr(config, "quantization_config", None) or (
        options.trust_remote_code and getattr(config, "auto_map", None)
    )
    is_fused = config.model_type in FAMILIES and str(activation) in ACTIVATIONS
    return torch.bfloat16 if is_fused and not is_foreign else native
