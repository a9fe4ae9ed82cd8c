"""`foresay record`: write a target's outputs for many prompts to one file."""

from __future__ import annotations

import click

from foresay.cli.command import Given
from foresay.cli.common import PLAIN, load_arguments, load_target, sampling_params
from foresay.cli.progress import advancing
from foresay_lab.commands import sharing
from foresay_lab.commands.options import items
from foresay_lab.replay.record import Progress, record
from foresay_lab.workers import work


def run(given: Given) -> int:
    """Run the command."""
    params, prompts, resumed = sampling_params(given), items(given), 0
    with advancing("Recording") as advance:

        def report(progress: Progress) -> None:
            nonlocal resumed
            resumed = progress.resumed
            advance(progress.done, progress.total, f"{progress.tokens} tokens")

        if sharing.wanted(given):
            load = load_arguments(given, **PLAIN, max_batch_size=given.batch_size)
            with sharing.pool(given, work.record_setup(load, prompts, params, chat=not given.raw)) as pool:
                made = work.record(pool, prompts, given.output, on_progress=report)
        else:
            generator = load_target(given, max_batch_size=given.batch_size)
            made = record(generator, prompts, given.output, params, chat=not given.raw, on_progress=report)
    before = f", {resumed} of them from an earlier run" if resumed else ""
    click.echo(f"{given.output}: {len(made.records)} outputs, {made.num_tokens} tokens{before}")
    return 0
