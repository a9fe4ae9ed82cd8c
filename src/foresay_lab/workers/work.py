"""Recordings and benchmarks distributed over workers; each worker times its turns next to its own plain decoding.

Owns the setups of both, and the grouping of turns into tasks. Times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import PLAIN
from foresay.records.recording import Recording
from foresay.records.results import Results
from foresay_lab.bench.bench import BenchPlan, Missing, OnRun, Turn, TurnResult, write_results
from foresay_lab.data.items import PromptItem
from foresay_lab.replay.record import OnProgress, write_recording
from foresay_lab.workers.pool import Plain, Pool

Path_ = str | os.PathLike[str]


def record_setup(load: Plain, items: Sequence[PromptItem], params: SamplingParams, *, chat: bool) -> Plain:
    """Return the setup of workers that record. load: arguments of `foresay.load`."""
    return {"kind": "record", "load": load, "params": params, "chat": chat, "items": list(items)}


def record(
    pool: Pool, items: Sequence[PromptItem], path: Path_, *, on_progress: OnProgress = lambda progress: None
) -> Recording:
    """Record the target's outputs for `items` in `path`, and return the recording. Raises ConfigError as `replay.record` does."""
    made = lambda tasks: (lines for _, lines in pool.run(tasks))  # noqa: E731
    return write_recording(path, pool.described, items, made, on_progress)


def bench_setup(load: Plain, sets: Mapping[str, Sequence[PromptItem]], *, chat: bool, **settings: Any) -> Plain:
    """Return the setup of workers that bench. settings: of BenchSettings, without `datasets`."""
    return {"kind": "bench", "load": load, "chat": chat, "sets": dict(sets), "settings": settings}


def bench(pool: Pool, path: Path_, *, on_run: OnRun = lambda progress: None) -> Results:
    """Run the benchmark's missing turns on the workers. Return the results in the order of a run in one process."""
    plan: BenchPlan = pool.described["plan"]

    def perform(missing: Missing) -> Iterator[TurnResult]:
        for _, results in pool.run(dict(enumerate(bench_tasks(missing, plan.between, pool.size)))):
            yield from results

    results = write_results(path, plan, perform, on_run=on_run)
    cells = [plan.cell(block, name) for block in range(len(plan.blocks)) for name in (PLAIN, *plan.runner_names)]
    order = {cell: i for i, cell in enumerate(cells)}
    results.runs.sort(key=lambda run: order.get(run.cell, len(cells)))
    return results


def bench_tasks(missing: Missing, between: int, workers: int) -> list[tuple[int, Sequence[Turn]]]:
    """Group the consecutive turns of each block: `between` per task, or fewer if there are few turns per worker."""
    size = max(1, min(between, -(-sum(map(len, missing.values())) // workers)))
    return [
        (block, turns[first : first + size]) for block, turns in missing.items() for first in range(0, len(turns), size)
    ]
