"""`foresay tune`: the fastest exact configuration, into foresay.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.cli.common import load_generator, model_expression
from foresay.cli.lab_options import DataOptions, numbers
from foresay.cli.options import MachineOptions, MethodOptions, ModelOption, ModelOptions
from foresay.cli.progress import advancing, loading
from foresay.cli.tables import gain, show_table
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


def run(
    *,
    model: ModelOption = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="A candidate; may be repeated. Default: all look-ups.")
    ] = None,
    length: Annotated[
        list[str] | None, typer.Option("--length", help="A length or policy to try; may be repeated.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A draft model to try too: lengths, thresholds, and cascades with Max-Gram.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch size; with --latency, those to choose from.")] = "1",
    latency: Annotated[
        float | None, typer.Option(help="Most milliseconds between two tokens of a request; picks the batch size too.")
    ] = None,
    recording: Annotated[Path | None, typer.Option(help="Outputs of this model; else --prompts are recorded.")] = None,
    data: DataOptions,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens recorded of each output.")] = 96,
    confirm: Annotated[int, typer.Option(help="Candidates that are run live.")] = 3,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the settings.")] = Path("foresay.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    machine: MachineOptions,
) -> int:
    """Find what decodes fastest here, by replay and profile, and confirm the best live."""
    sizes = numbers(batch, "--batch")
    if len(sizes) > 1 and latency is None:
        raise ConfigError("--batch takes one number, unless --latency chooses between several")
    if output.exists() and not force:
        raise ConfigError(f"{str(output)!r} exists; --force replaces it, --output names another file")
    named = methods(drafter or DRAFTERS, length or LENGTHS)
    named += [] if draft is None else with_draft(model_expression(draft) if "(" not in draft else draft)
    items = data.items()
    size = max(16, *sizes)
    target = load_generator(ModelOptions(model), "none", MethodOptions(), machine, later=named, max_batch_size=size)
    recorded = _recorded(target, recording, items, max_new_tokens, data)
    with loading("Timing passes, replaying candidates"):
        tuner = Tuner(target, recorded)
        tuner.search(named, sizes)
    size = _finish(tuner, latency, confirm)
    _show(tuner.tuning)
    return _write(tuner.tuning, size, target, output, data.name if recording is None else recording.name)


def _recorded(target: Generator, path: Path | None, items: Any, tokens: int, data: DataOptions) -> Recording:
    if path is not None:
        return Recording.load(path)
    with work_folder("foresay-tune") as folder, advancing("Recording") as advance:
        return record(
            target,
            items,
            folder / "recording.jsonl",
            SamplingParams(max_new_tokens=tokens),
            chat=not data.no_template,
            on_progress=lambda progress: advance(progress.done, progress.total, f"{progress.tokens} tokens"),
        )


def _finish(tuner: Tuner, latency: float | None, count: int) -> int:
    """Run the best few live; the batch size to write down."""
    best, plain = pick(tuner.tuning.candidates, count=count, latency_s=None if latency is None else latency / 1e3)
    if plain is None and not best:
        fastest = min(one.expected.latency_s for one in tuner.tuning.candidates)
        raise ConfigError(f"--latency {latency:g} cannot be met: the quickest takes {1e3 * fastest:.1f} ms per token")
    if best:
        with loading(f"Confirming {len(best)} live"):
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
        sys.stdout.write(f"left out: {name}: {problem}\n")
    took = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in tuning.seconds.items())
    sys.stdout.write(f"took: {took}\n")


def _seen_from(output: Path, name: str) -> str:
    """A target's name in a settings file: a folder or file as it is found from there."""
    return os.path.relpath(name, output.parent) if Path(name).exists() and not Path(name).is_absolute() else name


def _write(tuning: Tuning, batch_size: int, target: Generator, output: Path, prompts: str) -> int:
    best = tuning.best
    origin = provenance()
    measured: dict[str, Any] = {"prompts": prompts, "processor": origin["machine"]["processor"], "time": origin["time"]}
    measured |= {"threads": origin["machine"]["threads"], "foresay": origin["versions"].get("foresay", "")}
    dtype = target.target.dtype or None
    chosen: dict[str, Any] = {
        "target": _seen_from(output, target.target.name),
        "max_batch_size": batch_size,
        "dtype": dtype,
        "weights": target.target.weights if target.target.weights in WEIGHTS else None,
        "backend": target.target.weights if target.target.weights == LLAMA_CPP else None,
    }
    if best is None:
        settings = Settings(drafter="none", **chosen)
        sys.stdout.write("No draft pays here: plain decoding is fastest.\n")
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
