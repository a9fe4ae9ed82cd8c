"""`foresay tune`: find the fastest exact configuration and write it to foresay.toml."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.checks import check_float, check_int
from foresay.cli.common import changed, check_output, load_generator, model_expression
from foresay.cli.lab_options import DataOptions, numbers
from foresay.cli.options import (
    BatchSizesOption,
    DraftersOption,
    ForceOption,
    LengthsOption,
    MachineOptions,
    MethodOptions,
    ModelChoice,
    ModelOptions,
)
from foresay.cli.progress import advancing, loading
from foresay.cli.tables import gain, show_table
from foresay.cli.tune_estimate import Estimate, estimate
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.files import work_folder
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, methods
from foresay.lab.replay.record import record
from foresay.lab.tune import DRAFTERS, LENGTHS, Tuner, Tuning, pick, with_draft
from foresay.models.sources.load_options import LLAMA_CPP, WEIGHTS
from foresay.records.provenance import provenance
from foresay.records.recording import Recording
from foresay.spec.settings_file import Settings, write_settings

DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        rich_help_panel="Drafting",
        help="Also try a draft model: lengths, confidence thresholds, and cascades with max_gram.",
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(help="Latency target: milliseconds between two tokens of a request. Also chooses the batch size."),
]
RecordingOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A recording of this model, in place of --prompts.")
]
EstimateOption = Annotated[bool, typer.Option("--estimate", help="Print how long the run would take, and end.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Start a run of more than a minute without confirmation.")]


def run(
    *,
    which: ModelChoice,
    drafter: DraftersOption = None,
    length: LengthsOption = None,
    draft: DraftOption = None,
    batch_size: BatchSizesOption = "1",
    latency: LatencyOption = None,
    recording: RecordingOption = None,
    data: DataOptions,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens recorded of each output.")] = 96,
    finalists: Annotated[int, typer.Option(help="Candidates that are run live in the end.")] = 3,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The settings file to write.")] = Path(
        "foresay.toml"
    ),
    force: ForceOption = False,
    estimate_only: EstimateOption = False,
    yes: YesOption = False,
    machine: MachineOptions,
) -> int:
    """Find the fastest settings here; write foresay.toml.

    Records outputs, times forward passes, replays every candidate on them, and runs the best candidates live. Other commands
    read foresay.toml in their folder. How long the run takes is printed first.
    """
    sizes = numbers(batch_size, "--batch-size")
    if len(sizes) > 1 and latency is None:
        raise ConfigError(f"--batch-size {batch_size} has several sizes, and without --latency it takes one")
    if latency is not None:
        check_float("latency", latency, 0.0, math.inf, open_low=True)
    check_int("finalists", finalists, 1, 100)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    if not estimate_only:
        check_output(output, force=force)
    named = methods(drafter or DRAFTERS, length or LENGTHS)
    named += [] if draft is None else with_draft(model_expression(draft) if "(" not in draft else draft)
    if recording is not None and (unused := [*changed(data), *(["--max-new-tokens"] if max_new_tokens != 96 else [])]):
        raise ConfigError(
            f"--recording and {unused[0]} contradict: a recording has its own prompts and outputs; drop one"
        )
    recorded = None if recording is None else Recording.load(recording)
    items = data.items() if recorded is None else []
    size = max(16, *sizes)
    model = ModelOptions(which.name)
    target = load_generator(model, "none", MethodOptions(), machine, later=named, max_batch_size=size)
    tuner = None if recorded is None else Tuner(target, recorded)
    given: dict[str, Any] = {"methods": named, "params": params, "sizes": sizes, "rows": size, "finalists": finalists}
    with loading("Estimating the duration"):
        expected = estimate(target, items, recorded, chat=not data.raw, **given)
    if estimate_only:
        sys.stdout.write(f"{expected}\n")
        return 0
    _agree(expected, yes=yes)
    tuner = tuner or Tuner(target, _recorded(target, items, params, data))
    with loading("Timing passes, replaying candidates"):
        tuner.search(named, sizes)
    size = _finish(tuner, latency, finalists)
    _show(tuner.tuning)
    prompts = data.name if recording is None else recording.name
    return _write(tuner.tuning, size, target, output, prompts, machine)


def _agree(expected: Estimate, *, yes: bool) -> None:
    """Print the estimate on stderr. On a terminal, require confirmation of a long run; raise typer.Abort without it."""
    typer.echo(f"foresay: {expected}", err=True)
    if expected.total_s > 60 and not yes and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm("Start?", default=True, abort=True, err=True)


def _recorded(target: Generator, items: Any, params: SamplingParams, data: DataOptions) -> Recording:
    with work_folder("foresay-tune") as folder, advancing("Recording") as advance:
        return record(
            target,
            items,
            folder / "recording.jsonl",
            params,
            chat=not data.raw,
            on_progress=lambda progress: advance(progress.done, progress.total, f"{progress.tokens} tokens"),
        )


def _finish(tuner: Tuner, latency: float | None, count: int) -> int:
    """Run the best candidates live. Return the batch size of the fastest."""
    best, plain = pick(tuner.tuning.candidates, count=count, latency_s=None if latency is None else latency / 1e3)
    if plain is None and not best:
        fastest = min(one.expected.latency_s for one in tuner.tuning.candidates)
        raise ConfigError(
            f"--latency {latency:g} cannot be met: the fastest candidate takes {1e3 * fastest:.1f} ms per token"
        )
    if best:
        with loading(f"Running {len(best)} live"):
            tuner.confirm(best)
    found = tuner.tuning.best
    return (found.candidate if found else plain or best[0]).batch_size


def _show(tuning: Tuning) -> None:
    live = {(one.candidate.method.name, one.candidate.batch_size): one for one in tuning.confirmed}
    lines = []
    for one in [c for c in tuning.candidates if c.method.name != PLAIN][:10]:
        found = live.get((one.method.name, one.batch_size))
        measured = "" if found is None else gain(found.speed_up, found.low, found.high)
        rate = f"{one.expected.tokens_per_s:.1f}"
        speed = f"{one.speed_up:.2f}x"
        lines.append(
            [one.method.name, str(one.batch_size), f"{one.expected.tokens_per_pass:.2f}", rate, speed, measured]
        )
    show_table(["candidate", "batch", "per pass", "tokens/s", "predicted", "measured"], lines, drop=("batch",))
    hidden = sum(c.method.name != PLAIN for c in tuning.candidates) - len(lines)
    if hidden > 0:
        sys.stdout.write(f"and {hidden} more\n")
    for name, problem in tuning.failed.items():
        sys.stdout.write(f"not tried: {name}: {problem}\n")
    took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in tuning.seconds.items())
    sys.stdout.write(f"took: {took}\n")


def _relative_name(output: Path, name: str) -> str:
    """The target's name in a settings file: a path relative to the file, if it is one."""
    return os.path.relpath(name, output.parent) if Path(name).exists() and not Path(name).is_absolute() else name


def _write(
    tuning: Tuning, batch_size: int, target: Generator, output: Path, prompts: str, machine: MachineOptions
) -> int:
    best = tuning.best
    origin = provenance()
    measured: dict[str, Any] = {"prompts": prompts, "processor": origin["machine"]["processor"], "time": origin["time"]}
    measured |= {"threads": origin["machine"]["threads"], "foresay": origin["versions"].get("foresay", "")}
    dtype = target.target.dtype or None
    chosen: dict[str, Any] = {
        "target": _relative_name(output, target.target.name),
        "max_batch_size": batch_size,
        "dtype": dtype,
        "weights": target.target.weights if target.target.weights in WEIGHTS else None,
        **{
            name: None if getattr(machine, name) == "auto" else getattr(machine, name)
            for name in ("activations", "kv_cache_dtype")
        },
        "backend": target.target.weights if target.target.weights == LLAMA_CPP else None,
    }
    if best is None:
        settings = Settings(drafter="none", **chosen)
        sys.stdout.write("Plain decoding is fastest: no drafter gains anything here.\n")
    else:
        method = best.candidate.method
        length: Any = method.length or None
        length = int(length) if length is not None and length.isdecimal() else length
        settings = Settings(drafter=method.drafter, length=length, **chosen)
        measured |= {"speed_up": round(best.speed_up, 3), "tokens_per_s": round(best.tokens_per_s, 1)}
        sys.stdout.write(f"{method.name}: {best.speed_up:.2f}x plain decoding at batch {best.candidate.batch_size}.\n")
    write_settings(output, settings, measured)
    sys.stdout.write(f"wrote {output}\n")
    return 0
