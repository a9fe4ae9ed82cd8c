"""Sequential comparisons: outputs are drawn and compared in parts, so that a clear answer needs few of them.

Each look spends a share of the bound (SPENT): it fails where its p-value is below that. By the union bound the odds that correct
code fails are at most the bound, as with one look at all outputs. A look at half or more of the outputs passes where its p-value
is above its number in PASSES and the cells that it pools hold at most POOLED of the probability. That adds no false alarm; a
defect that one look at all outputs shows with odds of 99.9% is shown with odds of 99.8% (3 to 63 degrees of freedom, bound 1e-6,
by simulation), and correct code takes 59% of the outputs on average. Earlier looks pass nothing: the first requests of a batch
may be written otherwise than later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foresay.decoding.sampling_params import SamplingParams
from helpers.reference import LEAST, p_value
from helpers.support import Loop

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Outputs at each look."""
SPENT = (0.02, 0.03, 0.05, 0.1, 0.8)
PASSES = (1.0, 1.0, 0.3, 0.05, 0.0)
POOLED = 0.25


def decided(look: Callable[[range], float], samples: int, probs: np.ndarray, bound: float = 1e-6) -> float:
    """Return a p-value, to be compared with the bound, of at most `samples` outputs.

    look: draws outputs for the seeds that it gets, which follow those before, and returns the p-value of all drawn so far.
    probs: what they are compared with.
    """
    begin, found = 0, 1.0
    for share, spent, passes in zip(SHARES, SPENT, PASSES, strict=True):
        end = round(share * samples)
        value = look(range(begin, end))
        begin, found = end, min(1.0, value / spent)
        if found < bound or (value > passes and probs[probs * end < LEAST].sum() <= POOLED):
            break
    return found


def value_of(
    loop: Loop,
    prompt: Sequence[int],
    params: SamplingParams | Callable[[int], SamplingParams],
    probs: np.ndarray,
    samples: int,
    *,
    counted: Callable[[range, list[list[int]]], list[list[int]]] = lambda seeds, outputs: outputs,
    **options: Any,
) -> float:
    """Return the p-value, see `decided`, of what a loop writes against `probs`, [V ** length]; no draft may fail.

    params: of every request, or a function of its seed. counted: of seeds and their outputs those that are compared.
    options: of Loop.outputs.
    """
    size = loop.engine.target.vocab_size
    length = round(np.log(len(probs)) / np.log(size))
    written: list[list[int]] = []

    def look(seeds: range) -> float:
        each = [params(seed) if callable(params) else SamplingParams.of(params, seed=seed) for seed in seeds]
        written.extend(one[:length] for one in counted(seeds, loop.outputs([prompt] * len(each), each, **options)))
        return p_value(written, probs, size)

    found = decided(look, samples, probs)
    assert loop.engine.draft_failures == 0, loop.engine.drafter and loop.engine.drafter.last_error
    return found
