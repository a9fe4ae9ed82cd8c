"""Draft lengths of the highest throughput, given costs, acceptance probabilities and the value of time.

Maximises E[tokens] - rate E[seconds] (see token_rate.py). Does not know how costs and probabilities are estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foresay.lengths.costs import Curve, FloatArray


@dataclass(frozen=True, slots=True)
class StepContext:
    """The value of a step's time, and the draft tokens that the step scores besides those to be chosen."""

    rate: float
    """Tokens per second of all rows together, averaged over many steps."""
    base_tokens: float = 0.0
    """Draft tokens that the step scores anyway: the sum over all rows in ragged passes, else the longest draft."""


def best_shared_length(
    accepted: FloatArray, widths: FloatArray, passes: Curve, drafting: FloatArray, context: StepContext
) -> int:
    """Return the draft length of the highest throughput where all rows share one length; 0 if no draft pays.

    accepted: [K] expected accepted tokens of all rows at draft position k. widths: [K] probability that the longest draft of
    the batch has at least k tokens. drafting: [K] seconds of drafting k tokens. passes: seconds by draft tokens per row.
    """
    pass_s = passes.at(np.maximum(np.arange(len(widths) + 1), context.base_tokens))
    seconds = (widths * np.diff(pass_s)).cumsum() + drafting
    gains = accepted.cumsum() - context.rate * seconds
    best = int(gains.argmax())
    return best + 1 if gains[best] > 0 else 0


def best_row_lengths(
    accept_probs: FloatArray,
    draft_probs: FloatArray,
    passes: Curve,
    drafting: FloatArray,
    fixed: Sequence[int | None],
    context: StepContext,
) -> list[int] | None:
    """Return each row's draft length; None if no draft pays or all lengths are fixed.

    For every bound on the length (which sets the drafting time), draft tokens of all rows are added in the order of their
    acceptance probability as long as that raises the throughput; the best bound wins.
    accept_probs: [B, K] P(k tokens accepted | k drafted). draft_probs: [B, K] P(k tokens drafted | k requested). Both fall
    along K. drafting: [K] seconds of drafting k tokens. fixed: each row's fixed length, None for lengths to choose.
    """
    batch, most = accept_probs.shape
    index = np.arange(most)
    fixed_lengths = np.array([-1 if n is None else min(n, most) for n in fixed])
    is_fixed = index < fixed_lengths[:, None]
    base = context.base_tokens + float((is_fixed * draft_probs).sum())
    weights = draft_probs.ravel()
    free = np.broadcast_to((fixed_lengths < 0)[:, None], accept_probs.shape).ravel()
    if not free.any():
        return None
    order = np.argsort(-np.where(free, accept_probs.ravel(), -1.0), kind="stable")[: int(free.sum())]
    positions = order % most
    within = positions <= index[:, None]  # [K, tokens]: the tokens under each bound
    cost = np.where(within, weights[order], 0.0).cumsum(1)
    gain = np.where(within, weights[order] * accept_probs.ravel()[order], 0.0).cumsum(1)
    fixed_s = float(drafting[int(fixed_lengths.max()) - 1]) if fixed_lengths.max() > 0 else 0.0
    seconds = passes.at(base + cost) - passes.at(base) + np.maximum(drafting, fixed_s)[:, None] - fixed_s
    gains = gain - context.rate * seconds
    bound, last = divmod(int(gains.argmax()), gains.shape[1])
    if gains[bound, last] <= 0:
        return None
    chosen = order[: last + 1][within[bound, : last + 1]]
    counts = np.bincount(chosen // most, minlength=batch)
    return [int(counts[i]) if n is None else n for i, n in enumerate(fixed)]
