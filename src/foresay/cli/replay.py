"""`foresay replay`: drafters on a recording, without the target."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.cli.common import changed, check_draft_weights, load_arguments, load_generator, use_threads
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import (
    BatchSizeOption,
    DraftersOption,
    JsonOption,
    LengthsOption,
    MachineOptions,
    MethodOptions,
    ModelOption,
    ModelOptions,
    OutputOption,
)
from foresay.cli.progress import advancing, loading
from foresay.cli.sharing import SharingOptions
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.method import Method, methods
from foresay.lab.data.requests import RequestBuilder
from foresay.lab.replay.grid import Cell, ReplaySettings, digest_of, open_grid, replay_method, token_only_resources
from foresay.lab.replay.recording_match import prompt_mismatch_warning
from foresay.lab.tune import DRAFTERS
from foresay.records.recording import Recording
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter
from foresay.text.formatting import percent

ProfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A profile of the target: adds predicted speeds; --length throughput needs it."),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        metavar="TABLE",
        help="Cost table of the standardized walltime improvement (SWI): model_parameters, previous_work or a JSON file.",
    ),
]
TargetCostOption = Annotated[str | None, typer.Option(metavar="NAME", help="The target's name in the cost table.")]


def run(
    recording: Annotated[
        list[Path], typer.Argument(help="Recordings; also logs of printed tensors, and CS-Drafting's caches.")
    ],
    *,
    drafter: DraftersOption = None,
    length: LengthsOption = None,
    batch_size: BatchSizeOption = 1,
    model: ModelOption = None,
    profile: ProfileOption = None,
    costs: CostsOption = None,
    target_cost: TargetCostOption = None,
    output: OutputOption = None,
    data: DataOptions,
    as_json: JsonOption = False,
    sharing: SharingOptions,
    machine: MachineOptions,
) -> int:
    """Measure drafters on a recording, without the model.

    Prints tokens per pass and acceptance of each drafter and length. The model is loaded only for a drafter that needs its
    tokenizer or layers. --output is extended: results that it contains are not computed again. --prompts are the prompts of a
    log of tensors.
    """
    if (costs is None) != (target_cost is None):
        raise ConfigError("--costs and --target-cost need each other; give both, or drop one")
    named = methods(drafter or DRAFTERS, length or ())
    check_draft_weights(machine, named)
    check_used(recording, named, data, machine)
    if profile is None:  # no length adapts without pass times
        named = [method.fixed for method in named]
    names = [str(path) for path in recording]
    measured: dict[str, Any] = {"batch_size": batch_size, "profile": None if profile is None else str(profile)}
    measured |= {"costs": costs, "target_cost": target_cost}
    digests = [digest_of(name) for name in names]
    cells = {i: Cell(i // len(named), named[i % len(named)]) for i in range(len(names) * len(named))}
    seen: list[Recording] = []
    with open_grid(output, _same(measured, model, machine, data if any(map(is_printed, recording)) else None)) as grid:
        found = {i: grid.there[key] for i, cell in cells.items() if (key := cell.key(digests)) in grid.there}
        missing = {i: cell for i, cell in cells.items() if i not in found}
        if sharing.wanted and missing:
            done = _shared(names, missing, measured, model, sharing, machine, seen)
        else:
            done = _alone(recording, missing, ReplaySettings.read(**measured), (model, data, machine), seen)
        for i, facts in done:
            found[i] = grid.add(names[cells[i].recording], cells[i].key(digests)[0], facts)
    lines = [found[i] for i in sorted(found)]
    if as_json:
        for line in lines:
            hidden = {"digest"} if len(names) > 1 else {"digest", "recording"}
            typer.echo(json.dumps({k: v for k, v in line.items() if k not in hidden}, ensure_ascii=False))
        return 0
    _show(lines, seen, several=len(names) > 1)
    return 0


def _same(
    measured: Mapping[str, Any], model: str | None, machine: MachineOptions, data: DataOptions | None
) -> dict[str, Any]:
    """Settings that all results in one file share; a file is identified by its digest. data: the prompts of a log of tensors."""
    named = {name: measured[name] for name in ("profile", "costs")}
    files = {name: digest_of(path) for name, path in named.items() if path and Path(path).is_file()}
    formats = ("dtype", "weights", "activations", "kv_cache_dtype", "draft_weights", "backend")
    kept = {name: getattr(machine, name) for name in formats}
    prompts = None if data is None else asdict(data)
    return {**measured, **files, "model": model, **kept, "prompts": prompts}


def _alone(
    recordings: Sequence[Path],
    cells: Mapping[int, Cell],
    measures: ReplaySettings,
    named: tuple[str | None, DataOptions, MachineOptions],
    seen: list[Recording],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Compute the cells one after the other in this process. seen: list that gets the recordings read."""
    use_threads(named[2].threads)
    for number, path in enumerate(recordings):
        some = {i: cell for i, cell in cells.items() if cell.recording == number}
        if not some:
            continue
        resources, recorded = open_recording(path, named[0], [cell.method for cell in some.values()], *named[1:])
        seen.append(recorded)
        for i, cell in some.items():
            with loading(f"Replaying {cell.method.name}"):
                facts = replay_method(cell.method, recorded, resources, measures)
            yield i, facts


def _shared(
    names: Sequence[str],
    cells: Mapping[int, Cell],
    measured: Mapping[str, Any],
    model: str | None,
    sharing: SharingOptions,
    machine: MachineOptions,
    seen: list[Recording],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Compute the cells by workers. seen: list that gets the recordings."""
    for name in names:
        if is_printed(Path(name)):
            raise ConfigError(f"{name!r} is a log of tensors, whose prompts workers do not have; drop --workers")
        seen.append(Recording.load(name))  # a bad file fails here, not in a worker
    load = load_arguments(ModelOptions(model or ""), "none", MethodOptions(), machine)
    if not model:
        del load["target"]  # the recordings name it
    setup = {"kind": "replay", "load": load, "recordings": [os.path.abspath(name) for name in names], **measured}
    paths = {name: measured[name] for name in ("profile", "costs")}
    setup |= {name: os.path.abspath(path) for name, path in paths.items() if path and Path(path).exists()}
    tasks = {i: {"recording": cell.recording, "method": asdict(cell.method)} for i, cell in cells.items()}
    with sharing.pool(setup, machine) as pool, advancing("Replaying") as advance:
        for done, (i, facts) in enumerate(pool.run(tasks), 1):
            advance(done, len(tasks))
            yield i, facts


def is_printed(path: Path) -> bool:
    """True if a file is a log of printed tensors. Raises ConfigError for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip().startswith(b"tensor(")
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None


def check_used(recordings: Sequence[Path], named: Sequence[Method], data: DataOptions, machine: MachineOptions) -> None:
    """Raise ConfigError for options of the prompts without a log of tensors, and of the model if it is not loaded."""
    printed = any(map(is_printed, recordings))
    if not printed and (unused := changed(data)):
        raise ConfigError(
            f"{unused[0]} applies to the prompts of a log of tensors, and a recording has its own; drop it"
        )
    loaded = printed or any(read_drafter(method.drafter).reads_target for method in named)
    if not loaded and (unused := changed(replace(machine, threads=None))):
        raise ConfigError(f"{unused[0]} applies to the model, which these drafters do not need; drop it")


def open_recording(
    path: Path, model: str | None, named: list[Method], data: DataOptions, machine: MachineOptions
) -> tuple[Resources, Recording]:
    """Return the recording, and the target's resources: a stand-in unless layers, tokenizer or a log's prompts are needed."""
    printed = is_printed(path)
    if not printed and not any(read_drafter(method.drafter).reads_target for method in named):
        recorded = Recording.load(path)
        return token_only_resources(recorded), recorded
    name = model if model is not None or printed else Recording.load(path).model or None
    generator = load_generator(ModelOptions(name), "none", MethodOptions(), machine, later=named)
    assert generator.resources is not None
    if not printed:
        return generator.resources, Recording.load(path)
    prompts = [one.token_ids for one in RequestBuilder(generator, chat=not data.raw).first(data.items())]
    recorded = Recording.load(path, prompts=prompts)
    if len(recorded.records) < len(prompts):
        _warn(f"{path}: {len(recorded.records)} outputs and {len(prompts)} prompts; the first prompts are used")
    if (why := prompt_mismatch_warning(recorded, generator)) is not None:
        _warn(f"{path}: {why}")
        recorded = replace(recorded, settings={**recorded.settings, "doubt": why})
    return generator.resources, recorded


def _warn(text: str) -> None:
    print(f"foresay: {text}", file=sys.stderr)  # noqa: T201


def _show(lines: list[dict[str, Any]], recordings: Sequence[Recording], *, several: bool) -> None:
    headings = ["recording"] * several + ["method", "per pass", "accepted", "used", "discard"]
    extra = [name for name in ("tokens_per_s", "speed_up", "swi") if name in lines[0]]
    titles = {"tokens_per_s": "tokens/s", "speed_up": "speed-up", "swi": "SWI"}
    shown = {"tokens_per_s": "{:.1f}", "speed_up": "{:.2f}x", "swi": "{:.2f}"}

    def row(line: dict[str, Any]) -> list[str]:
        value, low, high = line["tokens_per_pass"]
        rate = line["acceptance_rate"]
        between = f" {low:.2f}-{high:.2f}" if line["estimate"] and low is not None else ""
        tested = percent(None if rate is None else rate[0])
        cells = [Path(line["recording"]).name] * several
        cells += [line["method"], f"{value:.2f}{between}", tested, percent(line["draft_utilization"])]
        cells += [f"{line['discard_rate']:.2f}"]
        return cells + [shown[name].format(line[name]) for name in extra]

    show_table(headings + [titles[name] for name in extra], [row(line) for line in lines])
    estimated = any(line["estimate"] for line in lines)
    how = "an estimate, with 95% intervals" if estimated else "exact: live decoding takes the same steps"
    if any("doubt" in line for line in lines):
        how = "exact only if these prompts belong to these outputs, which is doubtful"
    took = sum(line["seconds"] for line in lines)
    described = [] if several else recordings
    sizes = "".join(f"{len(one.records)} outputs, {one.num_tokens} tokens of {one.model}, " for one in described)
    sys.stdout.write(f"{sizes}replayed in {took:.1f} s; {how}\n")
