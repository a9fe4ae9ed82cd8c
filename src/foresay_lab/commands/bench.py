"""`foresay bench`: time methods and other engines on the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from foresay.cli.command import Given
from foresay.cli.common import (
    PLAIN,
    check_draft_weights,
    check_folder,
    load_arguments,
    load_target,
    own_methods,
    sampling_params,
)
from foresay.cli.options import numbers
from foresay.cli.progress import Advance, advancing, loading, note
from foresay.cli.tables import gain, show_table
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.files import atomic_write
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN as BASELINE
from foresay.generation.method import distinct, methods
from foresay.models.hardware import Hardware
from foresay.records.results import Results, Run
from foresay.text.formatting import NOISE, REASON, percent
from foresay_lab.bench.bench import BenchSettings, Progress, bench
from foresay_lab.bench.specdec import specdec_records
from foresay_lab.bench.transformers import TransformersRunner
from foresay_lab.commands import sharing
from foresay_lab.commands.options import items, source_name
from foresay_lab.data.datasets import SHIPPED
from foresay_lab.data.requests import PromptRequest, RequestBuilder
from foresay_lab.report.figures import check_matplotlib
from foresay_lab.report.report import PAGE, read_report, write
from foresay_lab.report.table import COLUMNS, rows
from foresay_lab.tune import DRAFTERS as COMPARED
from foresay_lab.workers import work


def run(given: Given) -> int:
    """Run the command."""
    temperatures, given.temperature = given.temperature or (0.0,), max(given.temperature or (0.0,))
    params = sampling_params(given)
    every = [SamplingParams.of(params, temperature=one) for one in temperatures]
    sizes = numbers(given.batch_size, "--batch-size")
    named = methods(given.drafter or COMPARED, given.length, given.rule or "speculative")
    sets = {source_name(given, one): items(given, one) for one in given.prompts or (SHIPPED,)}
    shared = sharing.wanted(given)
    if given.report is not None:
        check_matplotlib()
        check_folder(given.report, (PAGE,))
    if given.specdec is not None and (shared or sizes != [1] or {len(named), len(sets), len(every)} != {1}):
        text = "takes one --drafter and --length, at most one --prompts and --temperature, and no --batch-size or --workers"
        raise ConfigError(text, param="specdec")
    if shared:
        if given.against:
            raise ConfigError("and --workers contradict: an engine needs the whole machine; drop one", param="against")
        check_draft_weights(given, named)
        load = load_arguments(given, **PLAIN, max_batch_size=max(sizes))
        runs = {"params": every, "methods": named, "batch_sizes": sizes, "repeats": given.repeats}
        setup = work.bench_setup(load, sets, chat=not given.raw, **runs)
        return _finish(_shared(setup, given), given)
    target = load_target(given, named, max_batch_size=max(sizes))
    named = distinct([*named, *([] if given.drafter else own_methods(target, rule=named[0].rule))])
    engines = _opened(target, given)
    with loading("Preparing the prompts"):
        builder = RequestBuilder(target, chat=not given.raw)
        requests = {name: builder.all(some, every[0]) for name, some in sets.items()}
    settings = BenchSettings(methods=named, datasets=requests, params=every, batch_sizes=sizes, repeats=given.repeats)
    with advancing("Running") as advance:
        results = bench(target, settings, given.output, engines, on_run=partial(_show_run, advance))
    if given.specdec is not None:
        _write_specdec(given.specdec, named[0].generator(target, 1), next(iter(requests.values())), every[0])
    return _finish(results, given)


def _finish(results: Results, given: Given) -> int:
    """Show the results, and write their report if it is wanted."""
    code = show(results)
    if given.report is not None and results.runs:
        click.echo(f"wrote {write(read_report([given.output]), given.report)}")
    return code


def _write_specdec(path: Path, generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams) -> None:
    """Run the method and write its record as one JSON list."""
    found = []
    with advancing("Recording") as advance:
        for record in specdec_records(generator, requests, params):
            found.append(record)
            advance(len(found), len(requests))
    with atomic_write(path) as whole:
        whole.write_text(json.dumps(found, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _opened(target: Generator, given: Given) -> list[TransformersRunner]:
    """Load other engines with the target's weights."""
    own = target.target.generation.described().get("generation config")
    if given.against and own:
        raise ConfigError(f": other engines lack the model's generation config ({own}); remove it", param="against")
    native = ("", str(Hardware(target.target.model.device).native_dtype).removeprefix("torch."))
    chosen_by_us = (given.dtype, given.weights, target.target.weights) == ("auto", "auto", "")
    if given.against and chosen_by_us and target.target.dtype not in native:
        note(
            f"foresay: {target.target.name} is decoded in {target.target.dtype}, which other engines emulate on this processor; "
            "--dtype fp32 is their fastest"
        )
    with loading("Loading other engines"):
        return [TransformersRunner(name, target) for name in given.against]


def _shared(setup: dict[str, Any], given: Given) -> Results:
    """Run the benchmark by workers."""
    gpus = torch.cuda.device_count() if given.device in (None, "cuda") else 1
    if not given.ray and given.workers > max(1, gpus):
        note("foresay: workers on one machine slow each other; compare only ratios of this run")
    with sharing.pool(given, setup) as pool, advancing("Running") as advance:
        return work.bench(pool, given.output, on_run=partial(_show_run, advance))


def _show_run(advance: Advance, progress: Progress) -> None:
    """Show the last run next to a progress bar."""
    last = progress.last
    note = f"{last.speed_up or 0:.2f}x" if isinstance(last, Run) else "failed"
    advance(progress.done, progress.total, f"{last.cell}: {note}")


def show(results: Results) -> int:
    """Print the table. Return 1 if an exact method's output differs from plain decoding's, or if nothing could be run."""
    lines, wrong, table = [], [], {row.cell: row for row in rows(results)}
    for cell, runs in results.by_cell().items():
        row, stats = table[cell], table[cell].stats
        different = [run for run in runs if run.identical is False]
        if different and stats and row.exact:
            wrong.append(cell)
        speed_up = NOISE * row.is_noise + gain(*row.speed_up) if row.speed_up else ""
        lines.append(
            [
                *(COLUMNS[name](row) for name in ("method", "data set", "batch", "sampling", "tokens/s")),
                "1x" if cell.method == BASELINE else speed_up,
                f"{stats.block_efficiency:.2f}" if stats and stats.num_passes else "",
                percent(stats.draft_utilization if stats else None),
                "" if row.identical is None else different[0].note.partition(" outputs")[0] if different else "yes",
            ]
        )
    headings = ["method", "prompts", "batch", "sampling", "tokens/s", "speed-up", "per pass", "used", "identical"]
    show_table(headings, lines, drop=("prompts", "batch", "sampling"))
    if any(row.is_noise for row in table.values()):
        click.echo(REASON)
    for failure in {(one.cell, one.error) for one in results.failures}:
        click.echo(f"failed: {failure[0]}: {failure[1]}")
    for cell in wrong:
        click.echo(f"DIFFERENT OUTPUT: {cell}; an exact method must not do this, please report it")
    return 1 if wrong or not any(cell.method != BASELINE for cell in results.by_cell()) else 0
