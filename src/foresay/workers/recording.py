"""A recording distributed over workers.

Owns the choice of unfinished items and ensures that each output is in the file once. Decodes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from foresay.decoding.sampling_params import SamplingParams
from foresay.lab.data.items import PromptItem
from foresay.lab.replay.record import Progress, check_unique
from foresay.records.recording import Recording, recording_writer
from foresay.workers.messages import Plain, check_sendable
from foresay.workers.pool import Pool


def setup(load: Plain, items: Sequence[PromptItem], params: SamplingParams, *, chat: bool) -> Plain:
    """Return the setup of each worker. load: arguments of `foresay.load`."""
    return {"kind": "record", "load": load, "params": check_sendable(params), "chat": chat, "items": list(items)}


def record(
    pool: Pool,
    items: Sequence[PromptItem],
    path: str | os.PathLike[str],
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Recording:
    """Record the target's outputs for `items` in `path` and return the recording; existing outputs are kept.

    Raises ConfigError as `lab.replay.record` does.
    """
    check_unique([item.id for item in items])
    with recording_writer(path, pool.described) as writer:
        existing = {str(line["id"]): line["output"] for line in writer.lines}
        tasks = {}
        for number, item in enumerate(items):
            turns = [item.id, *(f"{item.id}/{turn + 2}" for turn in range(len(item.followups)))]
            known = {turn: existing[turn] for turn in turns if turn in existing}
            if len(known) < len(turns):
                tasks[number] = (number, known)
        total = sum(1 + len(item.followups) for item in items)
        progress = Progress(len(existing), total, len(existing), 0)
        on_progress(progress)
        for _, lines in pool.run(tasks):
            for line in lines:
                writer.append(line)
                progress = Progress(progress.done + 1, total, progress.resumed, progress.tokens + len(line["output"]))
            on_progress(progress)
    return Recording.load(path)
