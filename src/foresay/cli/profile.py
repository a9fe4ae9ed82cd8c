"""`foresay profile`: durations of a model's forward passes on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from foresay.cli.common import load_generator
from foresay.cli.lab_options import numbers
from foresay.cli.options import (
    BatchSizesOption,
    JsonOption,
    MachineOptions,
    MethodOptions,
    ModelChoice,
    ModelOptions,
    OutputOption,
)
from foresay.cli.progress import advancing
from foresay.cli.tables import show_table
from foresay.lab.measure.profile import profile
from foresay.records.profile import Profile


def run(
    *,
    which: ModelChoice,
    batch_size: BatchSizesOption = "1,2,4,8",
    num_draft_tokens: Annotated[
        str,
        typer.Option(metavar="N[,N...]", help="Draft tokens scored per row; each row is scored for one token more."),
    ] = "0,1,2,3,4,5,6,8",
    contexts: Annotated[
        str,
        typer.Option("--context", metavar="N[,N...]", help="Tokens of a row; only the first with all draft lengths."),
    ] = "128,512",
    repeats: Annotated[int, typer.Option(help="Passes of each kind; the median is taken.")] = 7,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the cache contains.")] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
    machine: MachineOptions,
) -> int:
    """Time a model's forward passes on this machine.

    Prints the duration of a pass by batch size, draft length and context, next to the lower bound that memory bandwidth sets.
    The profile is cached; --output writes it to a file for foresay replay and simulate.
    """
    settings = {
        "batches": numbers(batch_size, "--batch-size"),
        "columns": [1 + count for count in numbers(num_draft_tokens, "--num-draft-tokens", 0)],
        "contexts": numbers(contexts, "--context"),
    }
    generator = load_generator(ModelOptions(which.name), "none", MethodOptions(), machine)
    with advancing("Timing") as advance:
        made = profile(
            generator, fresh=fresh, repeats=repeats, on_progress=lambda done, total: advance(done, total), **settings
        )
    if output is not None:
        made.save(output)
    if as_json:
        typer.echo(json.dumps(asdict(made)))
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
    sys.stdout.write(f"prefill, in tokens: {fills}\n")
    if bound is not None:
        sys.stdout.write(
            f"the floor: {bound.weight_bytes / 1e6:.0f} MB of weights and {bound.kv_bytes / 1e3:.0f} kB of keys and values "
            f"per token at {bound.bytes_per_s / 1e9:.0f} GB/s\n"
        )
