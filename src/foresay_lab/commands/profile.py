"""`foresay profile`: durations of a model's forward passes on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from foresay.cli.command import Given
from foresay.cli.common import check_output, load_target
from foresay.cli.options import numbers
from foresay.cli.progress import advancing
from foresay.cli.tables import show_table
from foresay.records.profile import Profile
from foresay_lab.measure.profile import profile


def run(given: Given) -> int:
    """Run the command."""
    settings = {
        "batches": numbers(given.batch_size, "--batch-size"),
        "columns": [1 + count for count in numbers(given.length, "--length", 0)],
        "contexts": numbers(given.context, "--context"),
    }
    if given.output is not None:
        check_output(given.output, force=True)
    generator = load_target(given)
    with advancing("Timing") as advance:
        made = profile(generator, fresh=given.fresh, repeats=given.repeats, on_progress=advance, **settings)
    if given.output is not None:
        made.save(given.output)
    if given.json:
        click.echo(json.dumps(asdict(made)))
    else:
        _show(made)
    return 0


def _show(made: Profile) -> None:
    lines = []
    bound = made.floor
    for t in sorted(made.timings, key=lambda t: (t.context, t.batch, t.columns)):
        floor = "" if bound is None else f"{1e3 * bound.seconds(t.batch, t.context):.1f}"
        spread = f"{1e3 * t.low:.1f} to {1e3 * t.high:.1f}"
        rate = f"{t.batch * t.columns / t.seconds:.0f}"
        lines.append([str(t.context), str(t.batch), str(t.columns - 1), f"{1e3 * t.seconds:.1f}", spread, floor, rate])
    show_table(["context", "batch", "draft", "ms", "quartiles", "floor ms", "tokens scored/s"], lines)
    fills = ", ".join(f"{tokens} in {1e3 * seconds:.0f} ms" for tokens, seconds in made.fills)
    click.echo(f"prefill, in tokens: {fills}")
    if bound is not None:
        click.echo(
            f"the floor: {bound.weight_bytes / 1e6:.0f} MB of weights and {bound.kv_bytes / 1e3:.0f} kB of keys and values "
            f"per token at {bound.bytes_per_s / 1e9:.0f} GB/s"
        )
