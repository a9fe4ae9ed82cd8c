"""RoPE scaling of GGUF files: applies the supported kinds and rejects the others.

transformers ignores these values without a warning; the model then generates well at first and degrades as the text grows. Owns
llama.cpp's names of the kinds. Llama 3's and linear scaling divide the rotary frequencies; YaRN is part of the configuration.
"""

from __future__ import annotations

from typing import Any

import torch

from foresay.errors import ModelLoadError
from foresay.models.families.positions import YARN
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import invalid_tensor, invalid_value

DIVISORS = "rope_freqs.weight"
"""Tensor [D / 2] of divisors, one for each frequency (Llama 3.1 and later)."""
_ENDLESS = 1e20
"""Divisors from this on make a frequency zero: no position turns it by a visible angle."""
_BETAS = {"fast": 32.0, "slow": 1.0}
"""Turns within the original length between which YaRN passes from unscaled to scaled frequencies, for files without them."""
_RANGE = (1e-3, 1e6)
"""Smallest and largest divisor that is accepted."""


def refuse_unread(header: GgufHeader, *, ours: bool) -> None:
    """Raise ModelLoadError for an unsupported kind of scaling.

    ours: whether the file is read here; otherwise transformers dequantizes it and supports no scaling.
    """
    unread = [name for name in header.tensors if name.startswith(("rope_freqs", "rope_factors"))]
    kind, factor = _scaling(header)
    if kind not in ("none", "") or factor != 1.0:
        unread.append(f"{header.architecture}.rope.scaling.type")
    if ours:
        one = header.family
        read = [DIVISORS] if one.scaled_by_tensor or one.proportional else []
        is_linear = kind in ("linear", "none", "") and one.scaled_linearly is not None
        if is_linear or (kind == YARN and one.yarn is not None):
            read.append(f"{header.architecture}.rope.scaling.type")
        unread = [name for name in unread if name not in read]
    if unread:
        where = "for its architecture" if ours else "when transformers loads the file"
        raise ModelLoadError(
            f"{str(header.path)!r} scales its rotary positions ({', '.join(unread)}), which is not supported {where}; "
            "load the model's transformers folder instead"
        )


def scale_positions(model: Any, header: GgufHeader) -> None:
    """Divide a model's unscaled frequencies as the file specifies. Raises ModelLoadError for invalid divisors."""
    (kind, factor), one = _scaling(header), header.family
    if factor != 1.0 and kind != YARN:
        _divide(model, one.scaled_linearly or "", torch.tensor(factor))
    if not one.proportional and (factors := scaling_divisors(header)) is not None:
        _divide(model, "", factors)


def scaling_divisors(header: GgufHeader) -> torch.Tensor | None:
    """Return the divisors of scaled frequencies, [D / 2] float32; None without them. Raises ModelLoadError for invalid ones."""
    factors, (low, high) = _divisors(header), _RANGE
    for one in () if factors is None else factors.tolist():
        if not low <= one <= high:
            raise invalid_tensor(header, DIVISORS, f"contains {one}; its numbers must be from {low:g} to {high:g}")
    return factors


def rotated_share(header: GgufHeader) -> float:
    """Return the share of a head's frequencies that are used: those whose divisor is 1, before those that a divisor makes zero.

    Raises ModelLoadError for other divisors.
    """
    factors = _divisors(header)
    if factors is None:
        return 1.0
    used = int((factors == 1.0).sum())
    if not bool((factors[:used] == 1.0).all() and (factors[used:] >= _ENDLESS).all()):
        raise invalid_tensor(header, DIVISORS, f"must contain ones, followed by numbers of at least {_ENDLESS:g}")
    return used / len(factors)


def _divisors(header: GgufHeader) -> torch.Tensor | None:
    """Return the divisors of rotary frequencies, [D / 2] float32; None without them."""
    stored = header.tensors.get(DIVISORS)
    if stored is None:
        return None
    if stored.kind != "F32":
        raise invalid_tensor(header, DIVISORS, f"is of type {stored.kind}; it must be F32")
    return torch.frombuffer(bytearray(stored.data.tobytes()), dtype=torch.float32)


def rope_parameters(header: GgufHeader, theta: float) -> dict[str, object]:
    """Return transformers' parameters of rotary positions for a family with YaRN. Raises ModelLoadError if a value is missing."""
    if _scaling(header)[0] != YARN:
        return {"rope_type": "default", "rope_theta": theta}
    prefix, found = f"{header.architecture}.rope.scaling", {}
    if theta <= 1.0:
        raise invalid_value(header, f"{header.architecture}.rope.freq_base", "a number above 1, with YaRN")
    for name, field in (("factor", "factor"), ("original_context_length", "original_max_position_embeddings")):
        if (key := f"{prefix}.{name}") not in header.values:
            raise invalid_value(header, key, "a number; it has no default")
        found[field] = header.values[key]
    betas = {f"beta_{name}": header.values.get(f"{prefix}.yarn_beta_{name}", usual) for name, usual in _BETAS.items()}
    return {"rope_type": YARN, "rope_theta": theta, **found, **betas, **(header.family.yarn or {})}


def _scaling(header: GgufHeader) -> tuple[str, float]:
    """Return the kind of scaling and the divisor; older files store only the divisor."""
    prefix = f"{header.architecture}.rope"
    older = header.values.get(f"{prefix}.scale_linear", 1.0)
    kind = str(header.values.get(f"{prefix}.scaling.type", "linear" if older != 1.0 else ""))
    return kind, 1.0 if kind == "none" else float(header.values.get(f"{prefix}.scaling.factor", older))


def _divide(model: Any, prefix: str, factors: torch.Tensor) -> None:
    rotary = model.base_model.rotary_emb
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        plain = getattr(rotary, name)
        if factors.dim() and factors.shape != plain.shape:
            raise ModelLoadError(
                f"the GGUF file scales {len(factors)} rotary frequencies, but its model has {len(plain)}"
            )
        setattr(rotary, name, plain / factors)
