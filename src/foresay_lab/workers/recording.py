"""A recording distributed over workers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from foresay.decoding.sampling_params import SamplingParams
from foresay.records.recording import Recording
from foresay_lab.data.items import PromptItem
from foresay_lab.replay.record import OnProgress, write_recording
from foresay_lab.workers.messages import Plain, check_sendable
from foresay_lab.workers.pool import Pool


def setup(load: Plain, items: Sequence[PromptItem], params: SamplingParams, *, chat: bool) -> Plain:
    """Return the setup of each worker. load: arguments of `foresay.load`."""
    return {"kind": "record", "load": load, "params": check_sendable(params), "chat": chat, "items": list(items)}


def record(
    pool: Pool,
    items: Sequence[PromptItem],
    path: str | os.PathLike[str],
    *,
    on_progress: OnProgress = lambda progress: None,
) -> Recording:
    """Record the target's outputs for `items` in `path` and return the recording; existing outputs are kept.

    Raises ConfigError as `lab.replay.record` does.
    """
    return write_recording(
        path, pool.described, items, lambda tasks: (lines for _, lines in pool.run(tasks)), on_progress
    )
