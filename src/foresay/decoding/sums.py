"""Sums over the vocabulary whose rounding depends on neither the number of rows nor the number of threads.

PyTorch divides the sum of a single long row among its threads and adds the parts, and sums each of several rows in one go.
"""

from __future__ import annotations

import torch

_BLOCK = 4096
"""Terms that are added in one go: PyTorch divides no sum of fewer than 32,768."""


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last dimension, [..., V] -> [...], of blocks of fixed size and then of these."""
    size = values.shape[-1]
    if size <= _BLOCK:
        return values.sum(-1)
    whole = size - size % _BLOCK
    blocks = values[..., :whole].reshape(*values.shape[:-1], whole // _BLOCK, _BLOCK)
    return blocks.sum(-1).sum(-1) + values[..., whole:].sum(-1)
