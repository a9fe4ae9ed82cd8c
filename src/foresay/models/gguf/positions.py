"""How a GGUF file scales rotary positions: what is read here, and what is refused.

transformers reads none of it, and nothing would notice: such a model writes well at first, and worse the longer the text. Owns
llama.cpp's names for the ways of scaling. A scaled frequency is all there is to those that are read.
"""

from __future__ import annotations

from typing import Any

import torch

from foresay.errors import ModelLoadError
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import refused_tensor

_FACTORS = "rope_freqs.weight"
"""What each frequency is divided by, [D / 2] (Llama 3.1 and later)."""
_RANGE = (1e-3, 1e6)
"""The least and the greatest of them that are read."""
_LINEAR = {"llama": "", "qwen2": "", "qwen3": "", "gemma3": "full_attention_"}
"""Architectures whose frequencies may be divided by one number, and which of them: of Gemma 3, those of layers that see all."""


def refuse_unread(head: GgufHeader, *, in_blocks: bool) -> None:
    """Raise ModelLoadError for positions scaled in a way that is not read.

    in_blocks: whether the file's weights are kept in its blocks; transformers, which dequantises the others, reads none.
    """
    left = [name for name in head.tensors if name.startswith(("rope_freqs", "rope_factors"))]
    kind, factor = _scaling(head)
    if kind not in ("none", "") or factor != 1.0:
        left.append(f"{head.architecture}.rope.scaling.type")
    if in_blocks:
        read = [_FACTORS] if head.architecture == "llama" else []
        if kind in ("linear", "none", "") and head.architecture in _LINEAR:
            read.append(f"{head.architecture}.rope.scaling.type")
        left = [name for name in left if name not in read]
    if left:
        raise ModelLoadError(
            f"the GGUF file scales its rotary positions ({', '.join(left)}), which is not read from such files"
            f"{'' if in_blocks else ' as they are loaded here'}; load the model's transformers folder instead"
        )


def scale_positions(model: Any, head: GgufHeader) -> None:
    """Give a model the frequencies of the file. model: with the plain ones. Raises ModelLoadError for factors of another size."""
    _, factor = _scaling(head)
    if factor != 1.0:
        _divide(model, _LINEAR[head.architecture], torch.tensor(factor))
    stored = head.tensors.get(_FACTORS)
    if stored is None:
        return
    if stored.kind != "F32":
        raise refused_tensor(head, _FACTORS, f"is of type {stored.kind}; F32 is read")
    factors = torch.frombuffer(bytearray(stored.data.tobytes()), dtype=torch.float32)
    least, greatest = _RANGE
    for one in factors.tolist():
        if not least <= one <= greatest:
            raise refused_tensor(head, _FACTORS, f"has {one}; allowed is {least:g} to {greatest:g}")
    _divide(model, "", factors)


def _scaling(head: GgufHeader) -> tuple[str, float]:
    """The kind, and what positions are divided by; older files name no kind."""
    prefix = f"{head.architecture}.rope"
    older = head.values.get(f"{prefix}.scale_linear", 1.0)
    kind = str(head.values.get(f"{prefix}.scaling.type", "linear" if older != 1.0 else ""))
    return kind, 1.0 if kind == "none" else float(head.values.get(f"{prefix}.scaling.factor", older))


def _divide(model: Any, prefix: str, factors: torch.Tensor) -> None:
    rotary = model.base_model.rotary_emb
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        plain = getattr(rotary, name)
        if factors.dim() and factors.shape != plain.shape:
            raise ModelLoadError(f"the GGUF file scales {len(factors)} frequencies of {len(plain)}")
        setattr(rotary, name, plain / factors)
