"""The lengths of the greatest throughput, given what passes and drafting cost, how likely guesses hold, and what time is worth.

Owns the maximisation of E[tokens] - rate E[seconds] (see pace.py). Knows neither where costs nor chances come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foresay.lengths.costs import Curve, FloatArray


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step does before any of the drafts that are chosen here, and what its time is worth."""

    rate: float
    """Tokens per second that all rows write together, over many steps."""
    columns: float = 0.0
    """Draft tokens that it scores: of all rows where passes are ragged, else of the widest."""


def best_for_all(
    reached: FloatArray, wide: FloatArray, passes: Curve, drafting: FloatArray, ground: StepContext
) -> int:
    """The length of the greatest throughput where all rows have the same; 0 for none.

    reached: [K] draft tokens of all rows that hold at each place. wide: [K] the chance that a pass gets so wide. drafting: [K]
    seconds of drafting 1, 2, ... tokens.
    """
    widths = passes.at(np.maximum(np.arange(len(wide) + 1), ground.columns))
    seconds = (wide * np.diff(widths)).cumsum() + drafting
    gains = reached.cumsum() - ground.rate * seconds
    best = int(gains.argmax())
    return best + 1 if gains[best] > 0 else 0


def best_for_each(
    chances: FloatArray,
    drafted: FloatArray,
    passes: Curve,
    drafting: FloatArray,
    held: Sequence[int | None],
    ground: StepContext,
) -> list[int] | None:
    """Each row's length; None where none is best for all that may choose, or no row may.

    Under every bound on the length, the draft tokens of all rows are taken in the order of their chance to hold, as many as
    give the greatest throughput. chances, guessed: [B, K], falling along K. drafting: [K]. held: what rows must have.
    """
    batch, most = chances.shape
    index = np.arange(most)
    must = np.array([-1 if n is None else min(n, most) for n in held])
    fixed = index < must[:, None]
    columns = ground.columns + float((fixed * drafted).sum())
    weights = drafted.ravel()
    free = np.broadcast_to((must < 0)[:, None], chances.shape).ravel()
    if not free.any():
        return None
    order = np.argsort(-np.where(free, chances.ravel(), -1.0), kind="stable")[: int(free.sum())]
    places = order % most
    within = places <= index[:, None]  # [K, tokens]: under each bound
    cost = np.where(within, weights[order], 0.0).cumsum(1)
    gain = np.where(within, weights[order] * chances.ravel()[order], 0.0).cumsum(1)
    spent = float(drafting[int(must.max()) - 1]) if must.max() > 0 else 0.0
    seconds = passes.at(columns + cost) - passes.at(columns) + np.maximum(drafting, spent)[:, None] - spent
    gains = gain - ground.rate * seconds
    bound, last = divmod(int(gains.argmax()), gains.shape[1])
    if gains[bound, last] <= 0:
        return None
    chosen = order[: last + 1][within[bound, : last + 1]]
    counts = np.bincount(chosen // most, minlength=batch)
    return [int(counts[i]) if n is None else n for i, n in enumerate(held)]
