"""`foresay profile`: how long passes take on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from foresay.cli.common import load_generator, use_threads
from foresay.cli.lab_options import numbers
from foresay.cli.options import DeviceOption, MachineOptions, MethodOptions, ModelOption, ModelOptions, ThreadsOption
from foresay.cli.progress import advancing
from foresay.cli.tables import show_table
from foresay.lab.measure.depth_study import depth_share, study
from foresay.lab.measure.profile import profile
from foresay.records.profile import Profile


def model(
    context: typer.Context,
    *,
    model: ModelOption = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8",
    columns: Annotated[str, typer.Option(help="Tokens scored per row: 1 + the draft.")] = "1,2,3,4,5,6,7,9",
    contexts: Annotated[
        str, typer.Option("--context", help="Tokens of a row; the first with all columns.")
    ] = "128,512",
    repeats: Annotated[int, typer.Option(help="Passes of each kind; the median counts.")] = 7,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is kept from before.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile here too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    machine: MachineOptions,
) -> int:
    """Time a model's passes over batch, columns and context, with the floor that memory sets."""
    if context.invoked_subcommand is not None:
        return 0
    settings = {
        "batches": numbers(batch, "--batch"),
        "columns": numbers(columns, "--columns"),
        "contexts": numbers(contexts, "--context"),
    }
    generator = load_generator(ModelOptions(model), "none", MethodOptions(), machine)
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
        lines.append([str(t.context), str(t.batch), str(t.columns), f"{1e3 * t.seconds:.1f}", spread, floor, rate])
    show_table(["context", "batch", "columns", "ms", "quartiles", "floor ms", "tokens scored/s"], lines)
    fills = ", ".join(f"{tokens} in {1e3 * seconds:.0f} ms" for tokens, seconds in made.fills)
    sys.stdout.write(f"filling a prompt's tokens: {fills}\n")
    if bound is not None:
        sys.stdout.write(
            f"the floor: {bound.weight_bytes / 1e6:.0f} MB of weights and {bound.kv_bytes / 1e3:.0f} kB of keys and values "
            f"per token at {bound.bytes_per_s / 1e9:.0f} GB/s\n"
        )


def shapes(
    parameters: Annotated[float, typer.Option(help="Of each model, embeddings not counted.")] = 1e8,
    depths: Annotated[str, typer.Option(help="Layers of each.")] = "48,24,12,6,3",
    repeats: Annotated[int, typer.Option(help="Passes of each; the median counts.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> int:
    """Time draft models of equal size from deep to wide, with random weights."""
    use_threads(threads)
    with advancing("Timing") as advance:
        timed = study(
            parameters,
            depths=numbers(depths, "--depths"),
            device=device or "cpu",
            repeats=repeats,
            on_progress=lambda done, total: advance(done, total),
        )
    share = depth_share(timed) if len(timed) > 2 else None
    if as_json:
        typer.echo(json.dumps({"shapes": [asdict(shape) for shape in timed], "depth_share": share}))
        return 0
    best = min(shape.seconds for shape in timed)
    lines = [
        [
            str(shape.layers),
            str(shape.hidden),
            f"{shape.parameters / 1e6:.0f} M",
            f"{1e3 * shape.seconds:.2f}",
            f"{shape.seconds / best:.2f}x",
        ]
        for shape in timed
    ]
    show_table(["layers", "width", "parameters", "ms per token", "of the fastest"], lines)
    if share is not None:
        sys.stdout.write(f"depth explains {100 * share:.0f}% of the differences\n")
    return 0
