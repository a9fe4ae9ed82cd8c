"""`foresay record`: write a target's outputs for many prompts to one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from foresay.cli.common import load_arguments, load_generator
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import (
    MachineOptions,
    MaxBatchOption,
    MethodOptions,
    ModelOption,
    ModelOptions,
    SamplingOptions,
)
from foresay.cli.progress import advancing
from foresay.cli.sharing import SharingOptions
from foresay.lab.replay.record import Progress, record
from foresay.workers import recording


def run(
    output: Annotated[Path, typer.Argument(help="The recording to write; one that exists is continued.")],
    *,
    model: ModelOption = None,
    data: DataOptions,
    batch_size: MaxBatchOption = None,
    sampling: SamplingOptions,
    logprobs: Annotated[
        int | None, typer.Option(help="Record log-probabilities, and those of the N most likely tokens.")
    ] = None,
    sharing: SharingOptions,
    machine: MachineOptions,
) -> int:
    """Record a model's outputs, for replaying drafters.

    `foresay replay`, `simulate`, `tune` and `distill` read the recording.
    """
    params = sampling.params(logprobs=logprobs)
    items = data.items()
    resumed = 0
    named = ModelOptions(model), "none", MethodOptions(), machine
    with advancing("Recording") as advance:

        def report(progress: Progress) -> None:
            nonlocal resumed
            resumed = progress.resumed
            advance(progress.done, progress.total, f"{progress.tokens} tokens")

        if sharing.wanted:
            load = load_arguments(*named, max_batch_size=batch_size)
            setup = recording.setup(load, items, params, chat=not data.raw)
            with sharing.pool(setup, machine) as pool:
                made = recording.record(pool, items, output, on_progress=report)
        else:
            generator = load_generator(*named, max_batch_size=batch_size)
            made = record(generator, items, output, params, chat=not data.raw, on_progress=report)
    before = f", {resumed} of them from an earlier run" if resumed else ""
    sys.stdout.write(f"{output}: {len(made.records)} outputs, {made.num_tokens} tokens{before}\n")
    return 0
