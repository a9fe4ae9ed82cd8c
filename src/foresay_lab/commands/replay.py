"""`foresay replay`: drafters on a recording, without the target."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from foresay.cli import options as opt
from foresay.cli.command import Given
from foresay.cli.common import PLAIN, load_arguments, load_target, use_threads
from foresay.cli.progress import advancing, loading, note
from foresay.cli.tables import show_table
from foresay.decoding.rows import common_prefix
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.files import unreadable
from foresay.generation.generator import Generator
from foresay.generation.method import Method, methods
from foresay.records.recording import Recording
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter
from foresay.text.formatting import percent
from foresay_lab.commands import sharing
from foresay_lab.commands.options import items
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.grid import ReplaySettings, digest_of, open_grid, replay_method, token_only_resources
from foresay_lab.tune import DRAFTERS as COMPARED

Cell = tuple[int, Method]
"""The index of a recording, and a method that is replayed on it."""
FORMATS = tuple(one.name for one in opt.READING if one.name != "threads")
"""Options of the model, which has to be loaded for them to have an effect."""
_PROMPTS, _TOKENS = 4, 4
"""Prompts of a log of tensors that are decoded to see if they match, spread over the log, and tokens of each."""


def run(given: Given) -> int:
    """Run the command."""
    costs, _, target_cost = (given.costs or "").rpartition("=")
    if given.costs and not (costs and target_cost):
        raise ConfigError("must be TABLE=NAME, a cost table and the target's name", param="costs", value=given.costs)
    named = methods(given.drafter or COMPARED, given.length)
    check_used(given.recording, named, given)
    if given.profile is None:  # no length adapts without pass times
        named = [method.fixed for method in named]
    names = [str(path) for path in given.recording]
    measured: dict[str, Any] = {"batch_size": given.batch_size, "profile": given.profile and str(given.profile)}
    measured |= {"costs": costs or None, "target_cost": target_cost or None}
    files = {name: path for name in ("profile", "costs") if (path := measured[name]) and Path(path).is_file()}
    by = measured | {name: digest_of(path) for name, path in files.items()}  # what all results in one file share
    by |= {name: getattr(given, name) for name in (*FORMATS, "model")}
    by["prompts"] = [given.prompts, given.raw] if any(map(is_printed, given.recording)) else None
    digests = [digest_of(name) for name in names]
    cells = dict(enumerate(product(range(len(names)), named)))
    keys = {i: (digests[number], method.name) for i, (number, method) in cells.items()}
    seen: list[Recording] = []
    with open_grid(given.output, by) as (there, append):
        found = {i: there[key] for i, key in keys.items() if key in there}
        missing = {i: cell for i, cell in cells.items() if i not in found}
        if sharing.wanted(given) and missing:
            absolute = {name: os.path.abspath(path) for name, path in files.items()}
            done = _shared(names, missing, measured | absolute, given, seen)
        else:
            done = _alone(missing, ReplaySettings.read(**measured), given, seen)
        for i, facts in done:
            found[i] = {"recording": os.path.basename(names[cells[i][0]]), "digest": keys[i][0], **facts}
            append(found[i])
    lines = [found[i] for i in sorted(found)]
    if given.json:
        for line in lines:
            hidden = {"digest"} if len(names) > 1 else {"digest", "recording"}
            click.echo(json.dumps({k: v for k, v in line.items() if k not in hidden}, ensure_ascii=False))
    else:
        _show(lines, seen, several=len(names) > 1)
    return 0


def _alone(
    cells: Mapping[int, Cell], measures: ReplaySettings, given: Given, seen: list[Recording]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Compute the cells one after the other in this process. seen: list that gets the recordings read."""
    use_threads(given.threads)
    for number, path in enumerate(given.recording):
        some = {i: method for i, (recording, method) in cells.items() if recording == number}
        if not some:
            continue
        resources, recorded = open_recording(path, list(some.values()), given)
        seen.append(recorded)
        for i, method in some.items():
            with loading(f"Replaying {method.name}"):
                facts = replay_method(method, recorded, resources, measures)
            yield i, facts


def _shared(
    names: Sequence[str], cells: Mapping[int, Cell], measured: Mapping[str, Any], given: Given, seen: list[Recording]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Compute the cells by workers. seen: list that gets the recordings."""
    for name in names:
        if is_printed(Path(name)):
            raise ConfigError("is a log of tensors, without prompts for --workers; drop that", param="path", value=name)
        seen.append(Recording.load(name))  # a bad file fails here, not in a worker
    load = load_arguments(Given(**{**vars(given), "model": given.model or ""}), **PLAIN)
    if not given.model:
        del load["target"]  # the recordings name it
    setup = {"kind": "replay", "load": load, "recordings": [os.path.abspath(name) for name in names], **measured}
    tasks = {i: {"recording": number, "method": asdict(method)} for i, (number, method) in cells.items()}
    with sharing.pool(given, setup) as pool, advancing("Replaying") as advance:
        for done, (i, facts) in enumerate(pool.run(tasks), 1):
            advance(done, len(tasks))
            yield i, facts


def is_printed(path: Path) -> bool:
    """True if a file is a log of printed tensors. Raises ConfigError for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip().startswith(b"tensor(")
    except OSError as error:
        raise unreadable(path, error) from None


def check_used(recordings: Sequence[Path], named: Sequence[Method], given: Given) -> None:
    """Raise ConfigError for options of the prompts without a log of tensors, and of the model if it is not loaded."""
    printed = any(map(is_printed, recordings))
    loaded = printed or any(read_drafter(method.drafter).reads_target for method in named)
    for name in given.typed:
        if name in ("prompts", "raw") and not printed:
            raise ConfigError("is for a log of tensors, and a recording has its own prompts; drop it", param=name)
        if name in FORMATS and not loaded:
            raise ConfigError("applies to the model, which these drafters do not need; drop it", param=name)


def open_recording(path: Path, named: Sequence[Method], given: Given) -> tuple[Resources, Recording]:
    """Return the recording, and the target's resources: a stand-in unless layers, tokenizer or a log's prompts are needed."""
    printed = is_printed(path)
    if not printed and not any(read_drafter(method.drafter).reads_target for method in named):
        recorded = Recording.load(path)
        return token_only_resources(recorded), recorded
    own = None if printed or given.model is not None else Recording.load(path).model
    generator = load_target(Given(**{**vars(given), "model": given.model or own}), named)
    assert generator.resources is not None
    if not printed:
        return generator.resources, Recording.load(path)
    prompts = [one.token_ids for one in RequestBuilder(generator, chat=not given.raw).first(items(given))]
    recorded = Recording.load(path, prompts=prompts)
    if len(recorded.records) < len(prompts):
        note(f"foresay: {path}: {len(recorded.records)} outputs and {len(prompts)} prompts; the first prompts are used")
    if (why := _mismatch(recorded, generator)) is not None:
        note(f"foresay: {path}: {why}")
        recorded = replace(recorded, settings={**recorded.settings, "doubt": why})
    return generator.resources, recorded


def _mismatch(recording: Recording, generator: Generator) -> str | None:
    """Return a warning in one sentence if outputs and prompts of a log do not seem to match, or None if they match.

    generator: a model whose first tokens are compared with the log's. If another model generated the log, they differ too.
    """
    records, outputs = recording.records, [np.asarray(record.output) for record in recording.records]
    chosen = [i * len(records) // _PROMPTS for i in range(_PROMPTS)] if len(records) > _PROMPTS else range(len(records))
    params = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
    generations = generator.plain().generate([list(records[i].prompt) for i in chosen], params)
    shared = [[common_prefix(np.asarray(one.token_ids), output) for output in outputs] for one in generations]
    if 2 * sum(counts[i] > 0 for i, counts in zip(chosen, shared, strict=True)) >= len(shared):
        return None
    for i, counts in zip(chosen, shared, strict=True):
        best = counts.index(max(counts))
        if counts[best] >= max(2, counts[i] + 1):
            return (
                f"the output of {generator.target.name!r} for prompt {i + 1} begins like output {best + 1} of the log: "
                "the prompts are in another order"
            )
    return (
        f"the outputs of {generator.target.name!r} for {len(shared)} prompts differ from the log: another model generated it, "
        "or the prompts are in another order or format (--raw)"
    )


def _show(lines: list[dict[str, Any]], recordings: Sequence[Recording], *, several: bool) -> None:
    headings = ["recording"] * several + ["method", "per pass", "accepted", "used", "discard"]
    figures = {"tokens_per_s": ("tokens/s", "{:.1f}"), "speed_up": ("speed-up", "{:.2f}x"), "swi": ("SWI", "{:.2f}")}
    extra = {name: figure for name, figure in figures.items() if name in lines[0]}

    def row(line: dict[str, Any]) -> list[str]:
        value, low, high = line["tokens_per_pass"]
        rate = line["acceptance_rate"]
        between = f" {low:.2f}-{high:.2f}" if line["estimate"] and low is not None else ""
        tested = percent(None if rate is None else rate[0])
        cells = [Path(line["recording"]).name] * several
        cells += [line["method"], f"{value:.2f}{between}", tested, percent(line["draft_utilization"])]
        return [*cells, f"{line['discard_rate']:.2f}", *(form.format(line[name]) for name, (_, form) in extra.items())]

    show_table([*headings, *(title for title, _ in extra.values())], [row(line) for line in lines])
    estimated = any(line["estimate"] for line in lines)
    how = "an estimate, with 95% intervals" if estimated else "exact: live decoding takes the same steps"
    if any("doubt" in line for line in lines):
        how = "exact only if these prompts belong to these outputs, which is doubtful"
    took = sum(line["seconds"] for line in lines)
    described = [] if several else recordings
    sizes = "".join(f"{len(one.records)} outputs, {one.num_tokens} tokens of {one.model}, " for one in described)
    click.echo(f"{sizes}replayed in {took:.1f} s; {how}")
