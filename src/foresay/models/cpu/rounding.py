"""Weights rounded to 8 and 4 bits: what the levels and their scales are. Knows nothing of kernels, nor of models."""

from __future__ import annotations

import torch

GROUP = 32
"""Weights of a row that share one scale, in 4 bits."""
Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""4-bit weights: levels [out, in] of 0 to 15 in uint8; scales and least weights [out, in / 32]; w = scale * level + least."""
_AT_ONCE = 1 << 17
"""Weights that are rounded at a time: what a core's cache holds."""
_SHARES = (1.0, 0.97, 0.94, 0.91, 0.87, 0.83)
"""Of a group's range, which ends are tried."""


def rounded_int8(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels [out, in] of -127 to 127 in int8, and the scales [out] of their rows in a dtype, for the weights [out, in]."""
    scales = (weight.float().abs().amax(1).clamp(min=1e-30) / 127).to(dtype)
    # rounded against the scale as it is kept
    return (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def rounded_int4(weight: torch.Tensor, dtype: torch.dtype) -> Groups:
    """Levels [out, in] of 0 to 15, scales and least weights [out, in / 32] in a dtype, for the weights [out, in].

    The range of a group is what is between its least and greatest weight, narrowed by what makes the squared error least:
    weights near the ends are rare, and cutting them off a little makes all others finer. Levels are chosen for the scales as
    they are kept.
    """
    at_once = max(1, _AT_ONCE // weight.shape[1])
    parts = [_rounded_rows(rows.float().view(len(rows), -1, GROUP), dtype) for rows in torch.split(weight, at_once)]
    levels, scales, least = (torch.cat(column) for column in zip(*parts, strict=True))
    return levels, scales, least


def restored(groups: Groups) -> torch.Tensor:
    """The weights that groups stand for, [out, in] float32."""
    levels, scales, least = groups
    wide = levels.float().view(len(levels), -1, GROUP)
    return wide.mul_(scales[..., None].float()).add_(least[..., None].float()).flatten(1)


def _rounded_rows(groups: torch.Tensor, dtype: torch.dtype) -> Groups:
    """`rounded_int4` of some rows, [out, in / 32, 32] float32."""
    low, high = groups.amin(2), groups.amax(2)
    middle, half = (high + low) / 2, (high - low) / 2
    best = torch.full_like(low, torch.inf)
    kept, buffer = torch.ones_like(low), torch.empty_like(groups)
    for share in _SHARES:
        scales, least = _range(middle, half * share, dtype)
        _levels(groups, scales, least, buffer)
        error = buffer.mul_(scales[..., None]).add_(least[..., None]).sub_(groups).square_().sum(2)
        kept = torch.where(error < best, share, kept)
        best = torch.minimum(best, error)
    scales, least = _range(middle, half * kept, dtype)
    return _levels(groups, scales, least, buffer).flatten(1).to(torch.uint8), scales.to(dtype), least.to(dtype)


def _range(middle: torch.Tensor, half: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the least of 16 levels from middle - half to middle + half, as `dtype` holds them, in float32."""
    scales = (2 * half / 15).to(dtype).float()
    return scales, (middle - 7.5 * scales).to(dtype).float()


def _levels(groups: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    divisors = scales.clamp(min=torch.finfo(torch.float32).tiny)  # a group of equal weights has the scale 0
    return torch.sub(groups, least[..., None], out=out).div_(divisors[..., None]).round_().clamp_(0, 15)
