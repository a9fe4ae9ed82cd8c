"""`foresay bench`: time methods and other engines on the same prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from foresay.cli.common import check_draft_weights, load_arguments, load_generator
from foresay.cli.lab_options import DataOptions, numbers
from foresay.cli.options import (
    BatchSizesOption,
    DraftersOption,
    LengthsOption,
    MachineOptions,
    MethodOptions,
    ModelOption,
    ModelOptions,
    RuleOption,
    SamplingOptions,
)
from foresay.cli.progress import advancing, loading
from foresay.cli.sharing import SharingOptions
from foresay.cli.tables import gain, show_table
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.files import atomic_write
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, methods
from foresay.lab.bench.bench import Progress, bench
from foresay.lab.bench.settings import BenchSettings
from foresay.lab.bench.specdec import specdec_records
from foresay.lab.bench.transformers import TransformersRunner
from foresay.lab.data.requests import PromptRequest, RequestBuilder
from foresay.lab.tune import DRAFTERS
from foresay.models.sources.reading import native_dtype
from foresay.records.results import Results, Run, median_and_spread, merged
from foresay.text.formatting import percent
from foresay.workers import benching

AgainstOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ENGINE",
        help="Another engine, may be repeated: transformers, or with cache=static, assistant=MODEL or lookup=N.",
    ),
]
AlsoOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE", help="Further prompts, may be repeated: FILE, or FORMAT@FILE such as gsm8k@test.jsonl."
    ),
]
SpecdecOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write SpecDec++'s result record: one method with a draft model, batch size 1."),
]


def run(
    output: Annotated[Path, typer.Argument(help="The results file to write; one that exists is continued.")],
    *,
    model: ModelOption = None,
    drafter: DraftersOption = None,
    length: LengthsOption = None,
    rule: RuleOption = None,
    against: AgainstOption = None,
    data: DataOptions,
    also: AlsoOption = None,
    sampled: Annotated[list[float] | None, typer.Option(help="Also run at this temperature; may be repeated.")] = None,
    batch_size: BatchSizesOption = "1",
    repeats: Annotated[int, typer.Option(help="Runs of each method, in turns; the median is shown.")] = 3,
    specdec: SpecdecOption = None,
    sampling: SamplingOptions,
    sharing: SharingOptions,
    machine: MachineOptions,
) -> int:
    """Time methods against plain decoding and other engines.

    Every run is written to the results file (see foresay report). Exit code 1 if an exact method's output differs from plain
    decoding's, or if nothing could be run.
    """
    params = sampling.params()
    sizes = numbers(batch_size, "--batch-size")
    named = methods(drafter or DRAFTERS, length or (), rule or "speculative")
    sets = {one.name: one.items() for one in [data, *(_further(data, name) for name in also or [])]}
    every = [params, *(SamplingParams.of(params, temperature=t) for t in sampled or [])]
    loaded = (ModelOptions(model), "none", MethodOptions(), machine)
    if specdec is not None:
        _check_specdec(named, sets, every, sizes, shared=sharing.wanted)
    if sharing.wanted:
        if against:
            raise ConfigError("--against and --workers contradict: another engine needs the whole machine; drop one")
        check_draft_weights(machine, named)
        load = load_arguments(*loaded, max_batch_size=max(sizes))
        chat = not data.raw
        setup = benching.setup(load, sets, every, named, chat=chat, batch_sizes=sizes, repeats=repeats)
        return show(_shared(setup, output, sharing, machine))
    target = load_generator(*loaded, later=named, max_batch_size=max(sizes))
    engines = _opened(against or [], target, machine)
    with loading("Preparing the prompts"):
        builder = RequestBuilder(target, chat=not data.raw)
        requests = {name: builder.all(items, params) for name, items in sets.items()}
    settings = BenchSettings(methods=named, datasets=requests, params=every, batch_sizes=sizes, repeats=repeats)
    with _running() as report:
        results = bench(target, settings, output, engines, on_run=report)
    if specdec is not None:
        _write_specdec(specdec, named[0].generator(target, 1), next(iter(requests.values())), params)
    return show(results)


def _check_specdec(named: Sized, sets: Sized, params: Sized, sizes: Sequence[int], *, shared: bool) -> None:
    """Raise ConfigError unless one method runs one prompt at a time, in this process."""
    if shared or list(sizes) != [1] or {len(named), len(sets), len(params)} != {1}:
        raise ConfigError(
            "--specdec records one method on one set of prompts at batch size 1: give one --drafter and one --length, and "
            "neither --also, --sampled, --batch-size nor --workers"
        )


def _write_specdec(path: Path, generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams) -> None:
    """Run the method and write its record as one JSON list."""
    found = []
    with advancing("Recording") as advance:
        for record in specdec_records(generator, requests, params):
            found.append(record)
            advance(len(found), len(requests))
    with atomic_write(path) as whole:
        whole.write_text(json.dumps(found, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _opened(names: Sequence[str], target: Generator, machine: MachineOptions) -> list[TransformersRunner]:
    """Load other engines with the target's weights."""
    own = target.target.generation.described().get("generation config")
    if names and own:
        raise ConfigError(
            f"--against: other engines do not apply the model's generation config ({own}); remove it there"
        )
    native = ("", str(native_dtype(target.target.model.device)).removeprefix("torch."))
    chosen_by_us = (machine.dtype, machine.weights, target.target.weights) == ("auto", "auto", "")
    if names and chosen_by_us and target.target.dtype not in native:
        print(  # noqa: T201
            f"foresay: {target.target.name} is decoded in {target.target.dtype}, which other engines emulate on this processor; "
            "--dtype fp32 is their fastest",
            file=sys.stderr,
        )
    with loading("Loading other engines"):
        return [TransformersRunner(name, target) for name in names]


def _shared(setup: dict[str, Any], output: Path, sharing: SharingOptions, machine: MachineOptions) -> Results:
    """Run the benchmark by workers."""
    gpus = torch.cuda.device_count() if machine.device in (None, "cuda") else 1
    if not sharing.ray and (sharing.workers or 0) > max(1, gpus):
        print("foresay: workers on one machine slow each other; compare only ratios of this run", file=sys.stderr)  # noqa: T201
    with sharing.pool(setup, machine) as pool, _running() as report:
        return benching.bench(pool, output, on_run=report)


@contextlib.contextmanager
def _running() -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar with the last run."""
    with advancing("Running") as advance:

        def report(progress: Progress) -> None:
            last = progress.last
            note = f"{last.speed_up or 0:.2f}x" if isinstance(last, Run) else "failed"
            advance(progress.done, progress.total, f"{last.cell}: {note}")

        yield report


def _further(data: DataOptions, name: str) -> DataOptions:
    """The same choice of prompts from another source."""
    format_, at, source = name.rpartition("@")
    return dataclasses.replace(data, prompts=source if at else name, format=format_ or None, field=None, category=None)


def show(results: Results) -> int:
    """Print the table. Return 1 if an exact method's output differs from plain decoding's, or if nothing could be run."""
    lines = []
    wrong = []
    for cell, runs in results.by_cell().items():
        rates = median_and_spread(run.tokens_per_s for run in runs)
        gains = [run.speed_up for run in runs if run.speed_up is not None]
        speed = "" if not gains else gain(*median_and_spread(gains))
        stats = merged(run.stats for run in runs if run.stats)
        efficiency = "" if not stats.num_passes else f"{stats.block_efficiency:.2f}"
        different = [run for run in runs if run.identical is False]
        same = (
            "" if runs[0].identical is None else "yes" if not different else different[0].note.partition(" outputs")[0]
        )
        if different and runs[0].stats and runs[0].exact:
            wrong.append(cell)
        speed = "1x" if cell.method == PLAIN else speed
        used = percent(stats.draft_utilization)
        lines.append(
            [
                cell.method,
                cell.dataset,
                str(cell.batch_size),
                cell.sampling,
                f"{rates[0]:.1f}",
                speed,
                efficiency,
                used,
                same,
            ]
        )
    headings = ["method", "prompts", "batch", "sampling", "tokens/s", "speed-up", "per pass", "used", "identical"]
    show_table(headings, lines, drop=("prompts", "batch", "sampling"))
    for failure in {(one.cell, one.error) for one in results.failures}:
        sys.stdout.write(f"failed: {failure[0]}: {failure[1]}\n")
    for cell in wrong:
        sys.stdout.write(f"DIFFERENT OUTPUT: {cell}; an exact method must not do this, please report it\n")
    return 1 if wrong or not any(cell.method != PLAIN for cell in results.by_cell()) else 0
