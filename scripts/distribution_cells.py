"""Write `tests/distribution/cells.json`: cells that together cover every pair of values of two axes.

Run it when an axis of tests/helpers/distribution_cells.py has changed.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np

from helpers.distribution_cells import Cell, product


def pairwise() -> list[Cell]:
    """Cells that together cover every pair of values of two axes, chosen greedily, those stored first."""
    rng = np.random.default_rng(0)
    cells = product()
    order = rng.permutation(len(cells))
    missing = {(i, c[i], j, c[j]) for c in cells for i, j in itertools.combinations(range(5), 2)}
    chosen: list[Cell] = []
    while missing:
        gains = [
            sum((i, cells[k][i], j, cells[k][j]) in missing for i, j in itertools.combinations(range(5), 2))
            for k in order
        ]
        best = cells[order[int(np.argmax(gains))]]
        chosen.append(best)
        missing -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(range(5), 2)}
    return chosen


if __name__ == "__main__":
    cells = pairwise()
    (ROOT / "tests" / "distribution" / "cells.json").write_text("[\n" + ",\n".join(map(json.dumps, cells)) + "\n]\n")
    print(f"{len(cells)} cells")
