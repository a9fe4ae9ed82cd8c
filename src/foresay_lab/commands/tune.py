"""`foresay tune`: find the fastest exact configuration and write it to foresay.toml.

The model's own default drafter and length are always run live; unless drafters are named, so is the best draft on this machine.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import click
from rich.progress import ProgressColumn, Task
from rich.text import Text

from foresay.checks import check_float
from foresay.cli.command import INTERRUPTED, Given
from foresay.cli.common import check_output, load_target, loaded_values, model_expression, own_methods
from foresay.cli.options import numbers
from foresay.cli.progress import advancing
from foresay.cli.tables import gain, show_table
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.files import cache_dir
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, methods
from foresay.models.sources.load_options import LLAMA_CPP, WEIGHTS
from foresay.records.provenance import provenance
from foresay.records.recording import Recording
from foresay.spec.settings_file import FILE, Settings, is_settings, read_settings, write_settings
from foresay.text.formatting import NOISE, REASON, is_noise, percent
from foresay_lab.candidates import Tuning, is_rough, pick, with_draft
from foresay_lab.commands.options import DATA, items, source_name
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.record import header, record_until
from foresay_lab.tune import BUSY, Tuner
from foresay_lab.tune import DRAFTERS as COMPARED
from foresay_lab.tune import LENGTHS as TRIED

FINALISTS = 3
"""Predicted candidates that are run live in the end."""
_RECORDED, _RECORDED_TOGETHER = 0.2, 8
"""Share of the time after which no further output is recorded, and outputs that are recorded at once."""


def run(given: Given) -> int:
    """Run the command."""
    sizes, latency, draft = numbers(given.batch_size, "--batch-size"), given.latency, given.draft
    if len(sizes) > 1 and latency is None:
        raise ConfigError("without --latency must be one number", param="batch_size", value=given.batch_size)
    if latency is not None:
        check_float("latency", latency, 0.0, math.inf, open_low=True)
    params = SamplingParams(max_new_tokens=given.max_new_tokens)
    check_output(given.output, force=given.force)
    began, seconds = monotonic(), 60 * check_float("minutes", given.minutes, 0.0, math.inf, open_low=True)
    named = methods(given.drafter or COMPARED, given.length or TRIED)
    named += [] if draft is None else with_draft(model_expression(draft) if "(" not in draft else draft)
    of_prompts = [given.typed[one.name] for one in DATA if one.name in given.typed]
    of_prompts += [given.typed["max_new_tokens"]] if "max_new_tokens" in given.typed else []
    if given.recording is not None and of_prompts:
        text = f"and {of_prompts[0]} contradict: a recording has its own prompts and outputs; drop one"
        raise ConfigError(text, param="recording", value=given.recording)
    recorded = None if given.recording is None else Recording.load(given.recording)
    kept: Path | None = None
    prompts = items(given) if recorded is None else []
    target = load_target(given, named, max_batch_size=max(_RECORDED_TOGETHER, *sizes))
    own = own_methods(target, best=not given.drafter)
    end = began + seconds
    with advancing("Tuning", _Seconds()) as advance:

        def report(text: str) -> None:
            advance(min(seconds, monotonic() - began), seconds, text)

        if recorded is None:
            report("recording outputs")
            until = monotonic() + _RECORDED * (end - monotonic())
            recorded, kept = _recorded(RequestBuilder(target, chat=not given.raw), prompts, params, until, report)
        tuner = Tuner(target, recorded, end=end, on_progress=report)
        tuner.search(named, sizes, own)
        size, interrupted = _finish(tuner, latency)
    _show(tuner.tuning)
    if interrupted and not tuner.tuning.confirmed:
        click.echo("interrupted before any candidate ended a live run: nothing was written")
        return INTERRUPTED
    name = source_name(given, given.prompts) if given.recording is None else given.recording.name
    _answer(tuner.tuning, size, target, name, given)
    if kept is not None and not interrupted:
        kept.unlink(missing_ok=True)
    return INTERRUPTED if interrupted else 0


class _Seconds(ProgressColumn):
    """The time that is used, of the time for all."""

    def render(self, task: Task) -> Text:
        """Return the times of a task."""
        return Text("" if task.total is None else f"{task.completed:.0f} of at most {task.total:.0f} s")


def _recorded(
    builder: RequestBuilder, prompts: list[PromptItem], params: SamplingParams, end: float, show: Callable[[str], None]
) -> tuple[Recording, Path]:
    """Record outputs until `end`, and return the recording and its file, which an interrupted run leaves for the next one."""
    target, chat = builder.generator, builder.chat
    begun = header(target, builder.first(prompts), params, chat)
    same = json.dumps({**begun, "provenance": _files(Path(target.target.name).expanduser())}, sort_keys=True)
    path = cache_dir() / "tune" / f"{sha256(same.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    step, count = target.max_batch_size, lambda found: show(f"recording outputs: {found.done}")
    return record_until(target, prompts, path, params, chat=chat, step=step, end=end, on_progress=count), path


def _files(model: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of a local model's files, so that outputs of another model of this name are not used."""
    found = sorted(model.iterdir()) if model.is_dir() else [model] if model.is_file() else []
    return [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in found]


def _finish(tuner: Tuner, latency: float | None) -> tuple[int, bool]:
    """Run the best candidates live. Return the batch size of the fastest, and True if the user interrupted the runs."""
    best, plain = pick(tuner.tuning.candidates, count=FINALISTS, latency_s=None if latency is None else latency / 1e3)
    if plain is None and not best:
        fastest = min((one.expected or one.plain).latency_s for one in tuner.tuning.candidates)
        text = f"cannot be met: the fastest candidate takes {1e3 * fastest:.1f} ms per token"
        raise ConfigError(text, param="latency", value=latency)
    interrupted = False
    if best:
        try:
            tuner.confirm(best)
        except KeyboardInterrupt:
            interrupted = True
    found = tuner.tuning.best
    return (found.candidate if found else plain or best[0]).batch_size, interrupted


def _show(tuning: Tuning) -> None:
    live = {(one.candidate.method.name, one.candidate.batch_size): one for one in tuning.confirmed}
    drafting = [c for c in tuning.candidates if c.method.name != PLAIN]
    shown = [c for c in drafting if c.is_own] + [c for c in drafting if not c.is_own][:10]
    lines = []
    for one in shown:
        found = live.get((one.method.name, one.batch_size))
        per_pass = None if one.expected is None else one.expected.tokens_per_pass
        measured = "" if found is None else gain(found.speed_up, found.low, found.high)
        measured = NOISE * bool(found and is_noise(found.speed_up, tuning.plain_spread, per_pass)) + measured
        predicted = one.speed_up if found is None else found.predicted
        rough = " (rough)" if found and predicted and is_rough(found.speed_up, predicted) else ""
        count = "" if per_pass is None else f"{per_pass:.2f}"
        shown_gain = f"{predicted:.2f}x{rough}" if predicted else ""
        lines.append([one.method.name, str(one.batch_size), count, shown_gain, measured])
    show_table(["candidate", "batch", "per pass", "predicted", "measured"], lines, drop=("batch",))
    if len(shown) < len(drafting):
        click.echo(f"and {len(drafting) - len(shown)} more")
    if live:
        if any(line[-1].startswith(NOISE) for line in lines):
            click.echo(REASON)
        click.echo("Predictions of measured rows are for the prompts that were run live, others for all outputs.")
        click.echo(f"Two runs of plain decoding differ by {percent(tuning.plain_spread)}: less is no gain.")
        if tuning.plain_spread > BUSY:
            click.echo("The machine is busy: live runs ended after two rounds. Run this again when it is quiet.")
    if tuning.skipped:
        click.echo(f"not tried: {tuning.skipped} candidates, for lack of time; --minutes gives more")
    for name, problem in tuning.failed.items():
        click.echo(f"not tried: {name}: {problem}")
    took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in tuning.seconds.items())
    click.echo(f"took: {took}")


def _answer(tuning: Tuning, batch_size: int, target: Generator, prompts: str, given: Given) -> None:
    """Print the answer; write the settings file if it is not the default, or if it was named.

    An earlier file is replaced in any case, and options for loading are kept in one: the model's name alone would lose them.
    """
    best, model = tuning.best, shlex.quote(target.target.name)
    if best is None:
        click.echo("Plain decoding is fastest: no drafter gains anything here.")
    elif best.speed_up > 1 + tuning.plain_spread:
        click.echo(f"{best.candidate.method.name}: {best.speed_up:.2f}x plain decoding at batch {batch_size}.")
    else:
        click.echo(f"Nothing gains here, and the default costs nothing ({best.speed_up:.2f}x).")
    typed = {"output", *loaded_values(given)} & given.typed.keys()
    is_wanted = given.latency is not None or given.output.exists() or typed
    if best is not None and best.candidate.is_default and not is_wanted:
        click.echo(f"Keep the default: foresay serve {model} (it needs no settings file; --output FILE writes one)")
        return
    _write(tuning, batch_size, target, prompts, given)
    click.echo(f"wrote {given.output}; use it: foresay serve {shlex.quote(str(given.output))}")


def _write(tuning: Tuning, batch_size: int, target: Generator, prompts: str, given: Given) -> None:
    best, origin, name = tuning.best, provenance(), target.target.name
    if Path(name).exists() and not Path(name).is_absolute():
        name = os.path.relpath(name, given.output.parent)  # a path is relative to the settings file
    measured: dict[str, Any] = {"prompts": prompts, "processor": origin["machine"]["processor"], "time": origin["time"]}
    measured |= {"threads": origin["machine"]["threads"], "foresay": origin["versions"].get("foresay", "")}
    weights, source = target.target.weights, given.model or FILE
    stored = read_settings(source) if is_settings(source) and Path(source).is_file() else None
    chosen: dict[str, Any] = {
        "target": name,
        "max_batch_size": batch_size,
        "dtype": target.target.dtype or None,
        "weights": weights if weights in WEIGHTS else None,
        "backend": weights if weights == LLAMA_CPP else None,
        "activations": stored and stored.activations,
        "kv_cache_dtype": stored and stored.kv_cache_dtype,
    }
    if best is None:
        settings = Settings(drafter="none", **chosen)
    else:
        method = best.candidate.method
        length: Any = method.length or None
        length = int(length) if length is not None and length.isdecimal() else length
        settings = Settings(drafter=method.drafter, length=length, **chosen)
        measured |= {"speed_up": round(best.speed_up, 3), "tokens_per_s": round(best.tokens_per_s, 1)}
    write_settings(given.output, settings, measured)
