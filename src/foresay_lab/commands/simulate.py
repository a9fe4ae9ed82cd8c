"""`foresay simulate`: throughput and latency under load, from a recording and a profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from foresay.checks import check_int
from foresay.cli.command import Given
from foresay.cli.common import use_threads
from foresay.cli.progress import loading
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.generator import PREFIX_BYTES
from foresay.generation.method import Method
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter, read_length, read_rule
from foresay_lab.commands.replay import check_used, is_printed, open_recording
from foresay_lab.replay.arrivals import bursts, from_trace
from foresay_lab.replay.simulate import LatencyTargets, SimulatedLoad, highest_rate, replicas, simulate

_LOWEST = 1e-3
"""Lowest rate of the search for the highest one, as a fraction of a full batch's throughput."""


def run(given: Given) -> int:
    """Run the command."""
    targets = LatencyTargets(given.first_p99, given.gap_p99)
    if given.total_rate is not None and targets == LatencyTargets():
        raise ConfigError("needs --first-p99, --gap-p99 or both", param="total_rate", value=given.total_rate)
    for name in ("rate", "burst", "requests", "seed", "first_p99", "gap_p99") if given.trace is not None else ():
        if name in given.typed:
            raise ConfigError(f"sets the arrival times; drop {given.typed[name]}", param="trace", value=given.trace)
    check_int("requests", given.requests, 1)
    use_threads(given.threads)
    if given.length and given.drafter and set(given.drafter) == {"none"}:
        raise ConfigError("is a draft length, and --drafter none drafts nothing", param="length", value=given.length)
    drafters = [one for one in given.drafter or ["suffix"] if one != "none"]
    named = [Method("none"), *(Method(one, given.length or "") for one in drafters)]
    if is_printed(given.recording):
        raise ConfigError("is a log of tensors, not a recording", param="recording", value=given.recording)
    check_used([given.recording], named, given)
    times, loads = Profile.load(given.profile), _loads(given)
    resources, recorded = open_recording(given.recording, named, given)
    simulated = _server(recorded, times, resources, given.batch_size)
    lines, searched = [], []
    for method in named:
        for name, arrivals in loads:
            with loading(f"{method.name} at {name}"):
                lines.append(_figures(method, name, simulated(method, arrivals)))
        if targets != LatencyTargets():
            with loading(f"{method.name}: the highest rate"):
                searched.append(_highest(simulated, method, targets, given))
    if given.json:
        for line in [*lines, *searched]:
            click.echo(json.dumps(line))
    else:
        _show(lines, searched, recorded)
    return 0


def _loads(given: Given) -> list[tuple[str, Sequence[float]]]:
    """Return (name, arrival times) of the trace, or of each rate."""
    if given.trace is not None:
        return [(given.trace.name, from_trace(given.trace))]
    try:
        rates = [float(part) for part in given.rate.split(",")]
    except ValueError:
        raise ConfigError("must be numbers and commas, such as 0.5,1,2", param="rate", value=given.rate) from None
    return [(f"{one:g}/s", bursts(one, given.requests, given.burst, given.seed)) for one in rates]


Simulated = Callable[[Method, Sequence[float]], SimulatedLoad]


def _server(recorded: Recording, profile: Profile, resources: Resources, batch_size: int) -> Simulated:
    """Return a function of a method and arrival times that simulates the load, with a new drafter."""

    def simulated(method: Method, times: Sequence[float]) -> SimulatedLoad:
        recipe, known = read_drafter(method.drafter), method.drafter in profile.drafts
        if recipe.loads_model and not known:
            raise ConfigError("has no drafting times in the profile", param="drafter", value=method.drafter)
        drafter = recipe.prepare(resources)()
        length = read_length(method.own_length if drafter is not None else 0)
        drafting = partial(profile.draft_seconds, method.drafter) if known else None
        more: dict[str, Any] = {"rule": read_rule(method.rule), "batch_size": batch_size, "drafting": drafting}
        return simulate(recorded, profile, times, drafter, length, prefix_bytes=PREFIX_BYTES, **more)

    return simulated


def _figures(method: Method, name: str, load: SimulatedLoad) -> dict[str, Any]:
    out: dict[str, Any] = {"method": method.name, "arrivals": name, "requests": len(load.requests)}
    out |= {"tokens_per_s": load.tokens_per_s, "tokens_per_pass": load.tokens_per_pass, "mean_batch": load.mean_batch}
    out |= {"busy": load.busy_s / load.seconds, "mean_latency_s": load.mean("latency")}
    for of in ("queue", "first", "gap", "latency"):
        out |= {f"{of}_p{share}_s": load.percentile(of, share / 100) for share in (50, 90, 99)}
    return out


def _highest(simulated: Simulated, method: Method, targets: LatencyTargets, given: Given) -> dict[str, Any]:
    """Highest rate of a method within the targets, and the engines that --total-rate needs."""
    full = simulated(method, [0.0] * given.requests)
    full_rate = len(full.requests) / full.seconds  # the throughput of a full batch is an upper bound
    at = lambda rate: simulated(method, bursts(rate, given.requests, given.burst, given.seed))  # noqa: E731
    found = highest_rate(at, targets, low=full_rate * _LOWEST, high=full_rate)
    out: dict[str, Any] = {"method": method.name, "highest_rate": found}
    if given.total_rate is not None:
        out |= {"replicas": replicas(given.total_rate, found), "total_rate": given.total_rate}
    return out


def _show(lines: list[dict[str, Any]], searched: list[dict[str, Any]], recorded: Recording) -> None:
    headings = ["method", "arrivals", "tokens/s", "per pass", "rows", "first p50", "p99", "gap p50", "p99", "queue p99"]

    def row(line: dict[str, Any]) -> list[str]:
        spans = [line[f"{of}_s"] for of in ("first_p50", "first_p99", "gap_p50", "gap_p99", "queue_p99")]
        return [
            line["method"],
            line["arrivals"],
            f"{line['tokens_per_s']:.1f}",
            f"{line['tokens_per_pass']:.2f}",
            f"{line['mean_batch']:.1f}",
            *(_duration(one) for one in spans),
        ]

    show_table(headings, [row(line) for line in lines])
    for line in searched:
        text = f"meets the latency targets up to {line['highest_rate']:.3g} requests/s"
        if not line["highest_rate"]:
            text = "misses the latency targets at any rate"
        elif "replicas" in line:
            text += f"; {line['total_rate']:g} requests/s need {line['replicas']} engines"
        click.echo(f"{line['method']}: {text}")
    click.echo(f"simulated with {len(recorded.records)} outputs of {recorded.model or 'a recording'}")


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"
