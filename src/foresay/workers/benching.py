"""A benchmark that workers share: each times its turns beside plain decoding of its own.

Owns which turns go together. Times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.bench import Missing, Progress, keep
from foresay.lab.bench.stage import Outline, Told
from foresay.lab.data.items import PromptItem
from foresay.records.results import Failure, Results, Run, Trace, read_result
from foresay.workers.messages import Plain, plain_params
from foresay.workers.pool import Pool


def setup(
    load: Plain,
    sets: Mapping[str, Sequence[PromptItem]],
    params: Sequence[SamplingParams],
    methods: Sequence[Method],
    *,
    chat: bool,
    batch_sizes: Sequence[int],
    repeats: int,
) -> Plain:
    """What each worker begins with. load: arguments of `foresay.load`."""
    return {
        "kind": "bench",
        "load": load,
        "chat": chat,
        "sets": {name: [asdict(item) for item in items] for name, items in sets.items()},
        "params": [plain_params(one) for one in params],
        "methods": [asdict(one) for one in methods],
        "batch_sizes": list(batch_sizes),
        "repeats": repeats,
    }


def bench(
    pool: Pool, path: str | os.PathLike[str], *, on_run: Callable[[Progress], None] = lambda told: None
) -> Results:
    """Have the workers run what the file does not hold yet; results in the order in which one process runs them."""
    outline = Outline.read(pool.described)

    def perform(missing: Missing) -> Iterator[Told]:
        for _, result in pool.run(_tasks(missing, outline.between, pool.size)):
            for line, traces in result["told"]:
                yield _told(line, traces)

    results = keep(path, outline, perform, on_run=on_run)
    names = [PLAIN, *outline.contenders]
    cells = [outline.cell(block, name) for block in range(len(outline.blocks)) for name in names]
    place = {cell: i for i, cell in enumerate(cells)}
    results.runs.sort(key=lambda run: place.get(run.cell, len(cells)))
    return results


def _tasks(missing: Missing, between: int, workers: int) -> dict[int, Plain]:
    """Neighbours in time of one block, as many as have plain decoding around them, or fewer where there is little to do."""
    size = max(1, min(between, -(-sum(map(len, missing.values())) // workers)))
    parts = [
        {"block": block, "turns": list(turns[first : first + size])}
        for block, turns in missing.items()
        for first in range(0, len(turns), size)
    ]
    return dict(enumerate(parts))


def _told(line: Plain, traces: Sequence[Plain]) -> Told:
    result, shown = read_result(line), [read_result(one) for one in traces]
    assert isinstance(result, Run | Failure)
    return result, [one for one in shown if isinstance(one, Trace)]
