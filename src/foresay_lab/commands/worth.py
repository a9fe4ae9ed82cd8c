"""`foresay worth`: whether speculation pays for a model on this machine, in a sentence and a command."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import click

from foresay.checks import check_float
from foresay.cli.command import Given
from foresay.cli.common import load_target, model_expression, own_methods, shown_loading
from foresay.cli.progress import advancing, loading
from foresay.cli.tables import show_table
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import Method
from foresay_lab import worth
from foresay_lab.candidates import advice
from foresay_lab.commands.options import items
from foresay_lab.replay.record import record_until
from foresay_lab.worth import Gain

_TOKENS = 48
"""Most tokens of an output."""
_RECORDED, _PREDICTED, _LIVE = 0.2, 0.5, 0.5
"""Shares of the time after which no output is recorded and no further method predicted, and of the rest for live runs."""
_PROBE = 64
"""Tokens of a prompt whose prefill is timed."""


def run(given: Given) -> int:
    """Run the command."""
    began, seconds = monotonic(), check_float("seconds", given.seconds, 0.0, math.inf, open_low=True)
    draft = given.draft and (given.draft if "(" in given.draft else model_expression(given.draft))
    named = [Method(draft)] if draft else []
    prompts = items(given)
    kinds = len({one.category for one in prompts})
    target = load_target(given, named, max_batch_size=max(kinds, 2))
    methods = [*own_methods(target), *named]
    params, until = SamplingParams(max_new_tokens=_TOKENS), began + _RECORDED * seconds
    with TemporaryDirectory() as folder, advancing("Recording") as advance:
        path, show = Path(folder) / "outputs.jsonl", lambda progress: advance(progress.done, len(prompts))
        recording = record_until(target, prompts, path, params, step=kinds, end=until, on_progress=show)
    with loading("Timing passes, replaying methods"):
        lengths = sorted(len(one.prompt) + len(one.output) // 2 for one in recording.records)
        profile, busy = worth.timed(target, lengths[len(lengths) // 2], _PROBE)
        limit = began + _PREDICTED * seconds
        found = worth.gains(target, recording, profile, methods, lambda: monotonic() < limit)
    if not busy:
        with loading(f"Running {found[0].method.name} live"):
            end = monotonic() + _LIVE * (began + seconds - monotonic())
            found[0], busy = worth.run_live(target, recording, profile, found[0], end)
    _show(target.target.name, found, busy, shown_loading(given), as_json=given.json)
    return 0


def _show(model: str, found: Sequence[Gain], busy: str, options: Sequence[str], *, as_json: bool) -> None:
    sentence = worth.conclusion(found, busy)
    todo, command = advice(model, {one.method: one.best_known for one in found}, options)
    if as_json:
        methods = [{**asdict(one), "method": one.method.name} for one in found]
        answer = {"model": model, "busy": busy or None, "methods": methods, "conclusion": sentence}
        click.echo(json.dumps({**answer, "advice": todo, "command": command}))
        return
    lines = [
        [
            "default" if one is found[0] else one.method.name,
            kind or "prompts",
            f"{count:.2f}",
            f"{one.cost:.2f}",
            f"{speed:.2f}x",
        ]
        for one in found
        for kind, (count, speed) in one.kinds.items()
    ]
    show_table(["method", "kind", "tokens/pass", "pays from", "predicted"], lines, drop=("pays from",))
    click.echo(sentence)
    click.echo(f"{todo}: {command}")
