"""`foresay profile`: durations of a model's forward passes on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from foresay.cli import options as opt
from foresay.cli.command import Given, command, option
from foresay.cli.common import load_target
from foresay.cli.options import batch_sizes, numbers
from foresay.cli.progress import advancing
from foresay.cli.tables import show_table
from foresay.lab.measure.profile import profile
from foresay.records.profile import Profile


@command(
    opt.WHICH,
    batch_sizes("1,2,4,8"),
    option(
        "--length N[,N...]", "Draft tokens scored per row; each row is scored for one token more.", "0,1,2,3,4,5,6,8"
    ),
    option("--context N[,N...]", "Tokens of a row; only the first with all draft lengths.", "128,512"),
    option("--repeats N", "Passes of each kind; the median is taken.", 7),
    option("--fresh", "Measure again what the cache contains."),
    opt.OUTPUT,
    opt.JSON,
    opt.BASIC_MACHINE,
    examples="""
        foresay profile Qwen/Qwen2.5-0.5B-Instruct -o profile.json
        foresay profile --batch-size 1,8 --context 512""",
)
def run(given: Given) -> int:
    """Time a model's forward passes on this machine.

    Prints the duration of a pass by batch size, draft length and context, next to the lower bound that memory bandwidth sets.
    The profile is cached; --output writes it to a file for foresay replay and simulate.
    """
    settings = {
        "batches": numbers(given.batch_size, "--batch-size"),
        "columns": [1 + count for count in numbers(given.length, "--length", 0)],
        "contexts": numbers(given.context, "--context"),
    }
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
