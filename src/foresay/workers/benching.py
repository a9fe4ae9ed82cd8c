"""A benchmark distributed over workers; each worker times its turns next to its own plain decoding.

Owns the grouping of turns into tasks. Times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.bench import Missing, Progress, write_results
from foresay.lab.bench.executor import BenchPlan, TurnResult
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
    """Return the setup message of each worker. load: arguments of `foresay.load`."""
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
    pool: Pool, path: str | os.PathLike[str], *, on_run: Callable[[Progress], None] = lambda progress: None
) -> Results:
    """Run the benchmark's missing turns on the workers. Return the results in the order of a run in one process."""
    plan = BenchPlan.from_plain(pool.described)

    def perform(missing: Missing) -> Iterator[TurnResult]:
        for _, result in pool.run(_tasks(missing, plan.between, pool.size)):
            for line, traces in result["results"]:
                yield _turn_result(line, traces)

    results = write_results(path, plan, perform, on_run=on_run)
    names = [PLAIN, *plan.runner_names]
    cells = [plan.cell(block, name) for block in range(len(plan.blocks)) for name in names]
    order = {cell: i for i, cell in enumerate(cells)}
    results.runs.sort(key=lambda run: order.get(run.cell, len(cells)))
    return results


def _tasks(missing: Missing, between: int, workers: int) -> dict[int, Plain]:
    """Group the consecutive turns of each block: `between` per task, or fewer if there are few turns per worker."""
    size = max(1, min(between, -(-sum(map(len, missing.values())) // workers)))
    parts = [
        {"block": block, "turns": list(turns[first : first + size])}
        for block, turns in missing.items()
        for first in range(0, len(turns), size)
    ]
    return dict(enumerate(parts))


def _turn_result(line: Plain, traces: Sequence[Plain]) -> TurnResult:
    result, shown = read_result(line), [read_result(one) for one in traces]
    assert isinstance(result, Run | Failure)
    return result, [one for one in shown if isinstance(one, Trace)]
