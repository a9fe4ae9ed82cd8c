"""Quantization of weights to 8 and 4 bits: levels, scales and offsets, and blocks of GGUF's types of them.

Knows nothing of kernels or models.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

GROUP = 32
"""Number of consecutive weights in a row that share one 4-bit scale."""
Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""4-bit weights: levels [out, in] in [0, 15], uint8; scales and offsets [out, in / 32]; w = scale * level + offset."""
_AT_ONCE = 1 << 17
"""Number of weights quantized at once, which fit in a core's cache."""
_SHARES = (1.0, 0.97, 0.94, 0.91, 0.87, 0.83)
"""Shares of a group's range that are tried as the range of the levels."""


def quantize_int4(weight: torch.Tensor, dtype: torch.dtype) -> Groups:
    """Quantize weights [out, in] to levels [out, in] in [0, 15], and scales and offsets [out, in / 32] in `dtype`.

    The range of a group's levels is that of its weights, narrowed by the share that minimizes the squared error: weights near the
    ends are rare, and clipping them slightly makes the steps of all others smaller. Levels are rounded for the stored scales and
    offsets.
    """
    rows_per_piece = max(1, _AT_ONCE // weight.shape[1])
    parts = [
        _quantize_rows(rows.float().view(len(rows), -1, GROUP), dtype) for rows in torch.split(weight, rows_per_piece)
    ]
    levels, scales, offsets = (torch.cat(column) for column in zip(*parts, strict=True))
    return levels, scales, offsets


def q4_1_blocks(weight: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Quantize weights [out, in] to Q4_1 blocks, [out, in / 32 * 20]: scale, offset, and 16 bytes of two levels each."""
    levels, scales, offsets = quantize_int4(weight, torch.float16)
    grouped = levels.view(len(levels), -1, GROUP)
    two = grouped[..., :16] | grouped[..., 16:] << 4
    parts = [one[..., None].contiguous().view(torch.uint8) for one in (scales, offsets)]
    return torch.cat([*parts, two], -1).flatten(1).numpy()


def q8_0_blocks(weight: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Quantize weights [out, in] to Q8_0 blocks, [out, ceil(in / 32) * 34]: a scale and 32 levels in [-127, 127]."""
    pieces = []
    for rows in torch.split(weight, max(1, _AT_ONCE // weight.shape[1])):
        groups = F.pad(rows.float(), (0, -weight.shape[1] % GROUP)).view(len(rows), -1, GROUP)
        scales = (groups.abs().amax(2) / 127).to(torch.float16)
        divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        levels = (groups / divisors[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        pieces.append(torch.cat([scales[..., None].view(torch.uint8), levels.view(torch.uint8)], -1).flatten(1))
    return torch.cat(pieces).numpy()


def _quantize_rows(groups: torch.Tensor, dtype: torch.dtype) -> Groups:
    """Quantize rows [out, in / 32, 32] float32 to 4 bits; see `quantize_int4`."""
    low, high = groups.amin(2), groups.amax(2)
    middle, half = (high + low) / 2, (high - low) / 2
    best_error = torch.full_like(low, torch.inf)
    best_share, buffer = torch.ones_like(low), torch.empty_like(groups)
    for share in _SHARES:
        scales, offsets = _range(middle, half * share, dtype)
        _levels(groups, scales, offsets, buffer)
        error = buffer.mul_(scales[..., None]).add_(offsets[..., None]).sub_(groups).square_().sum(2)
        best_share = torch.where(error < best_error, share, best_share)
        best_error = torch.minimum(best_error, error)
    scales, offsets = _range(middle, half * best_share, dtype)
    return _levels(groups, scales, offsets, buffer).flatten(1).to(torch.uint8), scales.to(dtype), offsets.to(dtype)


def _range(middle: torch.Tensor, half: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset of 16 levels from middle - half to middle + half, rounded to `dtype`, in float32."""
    scales = (2 * half / 15).to(dtype).float()
    return scales, (middle - 7.5 * scales).to(dtype).float()


def _levels(groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    divisors = scales.clamp(min=torch.finfo(torch.float32).tiny)  # a group of equal weights has scale 0
    return torch.sub(groups, offsets[..., None], out=out).div_(divisors[..., None]).round_().clamp_(0, 15)
