"""Distributions to tokens: the only module that draws from them."""

from __future__ import annotations

import torch

from foresay.decoding import devices, kernels
from foresay.decoding.distributions import Distributions
from foresay.decoding.randomness import Purpose, Streams

_BLOCK = 128
_NOISE_BLOCK = 1 << 18
"""Gumbel noise values that are computed at once."""


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Draw by inverting the cumulative distribution in two levels: a block of the vocabulary, then a token in it.

    probs: [N, V], non-negative, any positive total (normalised here). uniform: [M] float64 in (0, 1). rows: [M] int64, the rows
    of probs to draw from; None draws from each in order. Returns [M] int64. A token of probability zero is never drawn.
    """
    if rows is not None and 2 * len(rows) < len(probs):
        probs, rows = probs[rows], None
    count, vocab = probs.shape
    if kernels.uses_kernels(probs.device):
        from foresay.decoding import sampling_kernels  # Triton

        every = torch.arange(count, device=probs.device) if rows is None else rows
        return sampling_kernels.inverse_cdf(probs.contiguous(), uniform.contiguous(), every)
    if vocab % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab % _BLOCK))
    blocks = probs.view(count, probs.shape[1] // _BLOCK, _BLOCK)
    sums = blocks.sum(-1).double()
    if rows is None:
        rows = torch.arange(count, device=probs.device)
    else:
        sums = sums[rows]
    ends = sums.cumsum(-1)
    goal = uniform[:, None] * ends[:, -1:]
    block = torch.minimum((ends <= goal).sum(-1), _last_positive(sums))
    chosen = blocks[rows, block].double()
    inner = chosen.cumsum(-1)
    before = ends.gather(1, block[:, None]) - sums.gather(1, block[:, None])
    rest = (goal - before)[:, 0]
    index = torch.minimum((inner <= rest[:, None]).sum(-1), _last_positive(chosen))
    # rounding may leave `rest` slightly below zero: then the first positive entry is drawn
    index = torch.maximum(index, (chosen > 0).to(torch.int8).argmax(-1))
    return block * _BLOCK + index


def _last_positive(values: torch.Tensor) -> torch.Tensor:
    reverse = (values > 0).flip(-1).to(torch.int8).argmax(-1)
    return values.shape[-1] - 1 - reverse


def draw(
    distributions: Distributions,
    streams: Streams,
    purpose: Purpose,
    first: int = 0,
    *,
    depths: torch.Tensor | None = None,
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token from each distribution, [B, T] int64.

    Position t uses the uniform at offset `first + t`, or at depths [B, T]; Purpose.TARGET takes the uniforms of absolute
    positions. Under shared noise the token is argmax(log p + Gumbel noise of its position), for every purpose. wanted: [B, T]
    bool, where to draw; None draws everywhere.
    """
    if distributions.probs is None or distributions.probs_row is None:
        return distributions.greedy_ids
    here = distributions.probs_row >= 0 if wanted is None else (distributions.probs_row >= 0) & wanted
    if devices.is_remote(here.device) and not streams.shares_noise:
        return _drawn_everywhere(distributions, streams, purpose, first, depths, here)
    where, column = torch.nonzero(here, as_tuple=True)
    if not len(where):
        return distributions.greedy_ids
    rows = distributions.probs_row[where, column]
    offsets = torch.arange(first, first + distributions.probs_row.shape[1], device=where.device)
    if depths is not None:
        offsets = depths
    if streams.shares_noise:
        tokens = _coupled(
            distributions.probs, rows, streams, where, offsets.expand(distributions.probs_row.shape)[where, column]
        )
    else:
        uniforms = streams.position_uniform(offsets) if purpose is Purpose.TARGET else streams.uniform(purpose, offsets)
        tokens = inverse_cdf(distributions.probs, uniforms[where, column], rows)
    out = distributions.greedy_ids.clone()
    out[where, column] = tokens
    return out


def _drawn_everywhere(
    distributions: Distributions,
    streams: Streams,
    purpose: Purpose,
    first: int,
    depths: torch.Tensor | None,
    here: torch.Tensor,
) -> torch.Tensor:
    """Draw at all positions and keep the tokens `here`, [B, T] bool: selecting positions would wait for the device."""
    assert distributions.probs is not None and distributions.probs_row is not None
    batch, width = here.shape
    offsets = torch.arange(first, first + width, device=here.device) if depths is None else depths
    uniforms = streams.position_uniform(offsets) if purpose is Purpose.TARGET else streams.uniform(purpose, offsets)
    rows = distributions.probs_row.clamp(min=0).reshape(-1)
    tokens = inverse_cdf(distributions.probs, uniforms.reshape(-1), rows).view(batch, width)
    return torch.where(here, tokens, distributions.greedy_ids)


def _coupled(
    probs: torch.Tensor, rows: torch.Tensor, streams: Streams, where: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """argmax(log p + Gumbel noise), [M]. Noise is computed only for tokens of positive probability, in blocks of positions."""
    vocab = probs.shape[1]
    at_once = max(1, _NOISE_BLOCK // vocab)
    out = [rows.new_empty(0)]
    for first in range(0, len(rows), at_once):
        block = slice(first, first + at_once)
        p = probs[rows[block]]
        index, token = torch.nonzero(p, as_tuple=True)
        noise = streams.gumbel(where[block][index], offsets[block][index], token)
        noisy = torch.full_like(p, -torch.inf)
        noisy[index, token] = noise.add_(p[index, token].log())
        out.append(noisy.argmax(-1))
    return torch.cat(out)
