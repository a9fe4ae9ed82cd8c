"""Small n-gram tables to test with."""

from __future__ import annotations

from typing import Any

import numpy as np

from foresay.drafters.ngram_table import TOKEN_BITS, Corpus, Level, NgramTable

MARK = "0123456789abcdef" * 4
OTHER = "f" * 64
UNKNOWN = -1


def level(contexts: dict[tuple[int, ...], int], vocab_size: int) -> Level:
    """A level from {context: successor}, packed by the definition."""
    packed = sorted(
        (context[-1], sum(t << TOKEN_BITS * j for j, t in enumerate(context[-2::-1])), successor)
        for context, successor in contexts.items()
    )
    last = [one[0] for one in packed]
    starts = [sum(t < i for t in last) for i in range(vocab_size + 1)]
    return Level(np.array(starts), *np.array(packed, dtype=np.int64).reshape(-1, 3).T[1:])


def small(**changes: Any) -> NgramTable:
    """Six tokens, order 4."""
    arguments: dict[str, Any] = {
        "successor": np.array([1, 2, UNKNOWN, 4, 0, UNKNOWN]),
        "counts": np.array([5, 3, 3, 1, 0, 8]),
        "levels": (level({(0, 1): 3, (5, 1): 4, (2, 3): 5}, 6), level({(2, 0, 1): 5, (4, 0, 1): 0}, 6)),
        "fingerprint": MARK,
        "corpus": Corpus(("a.txt", "b.txt.gz"), 20, 2, 1, (7, 5, 3), 4, 1),
    }
    return NgramTable(**{**arguments, **changes})
