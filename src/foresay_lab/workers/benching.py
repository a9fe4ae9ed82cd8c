"""A benchmark distributed over workers; each worker times its turns next to its own plain decoding.

Owns the grouping of turns into tasks. Times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import PLAIN, Method
from foresay.records.results import Results
from foresay_lab.bench.bench import Missing, OnRun, write_results
from foresay_lab.bench.executor import BenchPlan, Turn, TurnResult
from foresay_lab.data.items import PromptItem
from foresay_lab.workers.messages import Plain, check_sendable
from foresay_lab.workers.pool import Pool


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
    """Return the setup of each worker. load: arguments of `foresay.load`. The other arguments: see BenchSettings."""
    settings = {"methods": methods, "params": params, "batch_sizes": batch_sizes, "repeats": repeats}
    for one in params:
        check_sendable(one)
    return {"kind": "bench", "load": load, "chat": chat, "sets": dict(sets), "settings": settings}


def bench(pool: Pool, path: str | os.PathLike[str], *, on_run: OnRun = lambda progress: None) -> Results:
    """Run the benchmark's missing turns on the workers. Return the results in the order of a run in one process."""
    plan: BenchPlan = pool.described["plan"]

    def perform(missing: Missing) -> Iterator[TurnResult]:
        for _, results in pool.run(dict(enumerate(tasks(missing, plan.between, pool.size)))):
            yield from results

    results = write_results(path, plan, perform, on_run=on_run)
    cells = [plan.cell(block, name) for block in range(len(plan.blocks)) for name in (PLAIN, *plan.runner_names)]
    order = {cell: i for i, cell in enumerate(cells)}
    results.runs.sort(key=lambda run: order.get(run.cell, len(cells)))
    return results


def tasks(missing: Missing, between: int, workers: int) -> list[tuple[int, Sequence[Turn]]]:
    """Group the consecutive turns of each block: `between` per task, or fewer if there are few turns per worker."""
    size = max(1, min(between, -(-sum(map(len, missing.values())) // workers)))
    return [
        (block, turns[first : first + size]) for block, turns in missing.items() for first in range(0, len(turns), size)
    ]
