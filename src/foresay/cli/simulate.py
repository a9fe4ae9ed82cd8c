"""`foresay simulate`: throughput and latency under load, from a recording and a profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from foresay.checks import check_int
from foresay.cli.common import check_draft_weights, use_threads
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import (
    DRAFTING,
    BatchSizeOption,
    JsonOption,
    LengthOption,
    MachineOptions,
    ModelOption,
)
from foresay.cli.progress import loading
from foresay.cli.replay import check_used, open_recording
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.generator import PREFIX_BYTES
from foresay.generation.method import Method
from foresay.lab.replay.arrivals import bursts, from_trace, poisson
from foresay.lab.replay.simulate import LatencyTargets, SimulatedLoad, highest_rate, replicas, simulate
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter, read_length, read_rule

_LOWEST = 1e-3
"""Lowest rate of the search for the highest one, as a fraction of a full batch's throughput."""


@dataclass(frozen=True)
class ArrivalOptions:
    """Arrival process of the requests."""

    PANEL: ClassVar = "Arrivals"

    rate: Annotated[
        str | None,
        typer.Option(metavar="X[,X...]", help="Requests per second, several separated by commas.  [default: 1,2,4,8]"),
    ] = None
    burst: Annotated[int | None, typer.Option(help="Requests that arrive at once.  [default: 1]")] = None
    requests: Annotated[int | None, typer.Option(help="Requests of each load.  [default: 200]")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the arrival times.  [default: 0]")] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Arrival times in seconds, one a line, in place of the options above."),
    ] = None

    @property
    def count(self) -> int:
        """Number of requests of a load."""
        return 200 if self.requests is None else check_int("requests", self.requests, 1)

    def at(self, rate: float) -> list[float]:
        """Return the arrival times at a rate in requests per second."""
        burst, seed = 1 if self.burst is None else self.burst, self.seed or 0
        return poisson(rate, self.count, seed) if burst == 1 else bursts(rate, self.count, burst, seed)

    def loads(self) -> list[tuple[str, Sequence[float]]]:
        """Return (name, arrival times) of the trace, or of each rate."""
        if self.trace is not None:
            return [(self.trace.name, from_trace(self.trace))]
        rates = self.rate or "1,2,4,8"
        try:
            some = [float(part) for part in rates.split(",")]
        except ValueError:
            raise ConfigError(f"--rate {rates!r} must be numbers separated by commas, such as 0.5,1,2") from None
        return [(f"{one:g}/s", self.at(one)) for one in some]


@dataclass(frozen=True)
class LatencyOptions:
    """Latency targets, for which the highest rate is searched."""

    PANEL: ClassVar = "Latency targets"

    first_p99: Annotated[
        float | None, typer.Option("--first-p99", help="Seconds to the first token, for 99% of the requests.")
    ] = None
    gap_p99: Annotated[
        float | None, typer.Option("--gap-p99", help="Seconds between two events of a stream, for 99% of them.")
    ] = None
    total_rate: Annotated[
        float | None,
        typer.Option(
            "--total-rate",
            help="Also print how many engines serve this many requests per second within the targets.",
        ),
    ] = None

    def targets(self) -> LatencyTargets:
        """Return the targets. Raises ConfigError for --total-rate without one."""
        found = LatencyTargets(self.first_p99, self.gap_p99)
        if self.total_rate is not None and found == LatencyTargets():
            raise ConfigError("--total-rate needs a latency target: --first-p99, --gap-p99 or both")
        return found


def run(
    recording: Annotated[Path, typer.Argument(help="A greedy recording of the target's outputs.")],
    *,
    profile: Annotated[Path, typer.Option(metavar="FILE", help="A profile of the target (foresay profile -o FILE).")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            metavar="EXPRESSION",
            rich_help_panel=DRAFTING,
            help="A drafter to compare with plain decoding; may be repeated.  [default: suffix]",
        ),
    ] = None,
    length: LengthOption = None,
    batch_size: BatchSizeOption = 32,
    arrivals: ArrivalOptions,
    latency: LatencyOptions,
    model: ModelOption = None,
    data: DataOptions,
    as_json: JsonOption = False,
    machine: MachineOptions,
) -> int:
    """Predict throughput and latency under load.

    The engine's own loop decodes the recorded outputs, with and without speculation, and the profile gives the duration of each
    pass. A server's own overhead of some milliseconds is not included.
    """
    search = _Search(latency.targets(), arrivals, latency.total_rate)
    if arrivals.trace is not None:
        others = {name: getattr(arrivals, name) for name in ("rate", "burst", "requests", "seed")}
        _check_alone(**others, first_p99=latency.first_p99, gap_p99=latency.gap_p99)
    use_threads(machine.threads)
    if length and drafter and set(drafter) == {"none"}:
        raise ConfigError(f"--length {length} sets a draft length, and --drafter none drafts nothing; drop one")
    named = [Method("none"), *(Method(one, length or "") for one in drafter or ["suffix"] if one != "none")]
    check_draft_weights(machine, named)
    check_used([recording], named, data, machine)
    times = Profile.load(profile)
    loads = arrivals.loads()
    resources, recorded = open_recording(recording, model, named, data, machine)
    server = _SimulatedServer(recorded, times, resources, batch_size)
    lines, searched = _simulated(server, named, loads, search)
    if as_json:
        for line in [*lines, *searched]:
            typer.echo(json.dumps(line))
        return 0
    _show(lines, searched, recorded)
    return 0


@dataclass(frozen=True, slots=True)
class _Search:
    """Settings of the search for the highest rate. Without a target there is no search."""

    targets: LatencyTargets
    arrivals: ArrivalOptions
    total_rate: float | None


def _simulated(
    server: _SimulatedServer, named: Sequence[Method], loads: Sequence[tuple[str, Sequence[float]]], search: _Search
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (figures of each method under each load, highest rate of each method within the latency targets)."""
    lines, searched = [], []
    for method in named:
        for name, times in loads:
            with loading(f"{method.name} at {name}"):
                lines.append(_figures(method, name, server.simulated(method, times)))
        if search.targets != LatencyTargets():
            with loading(f"{method.name}: the highest rate"):
                searched.append(_highest(server, method, search))
    return lines, searched


@dataclass(frozen=True, slots=True)
class _SimulatedServer:
    """Recording, profile and drafters that serve a simulated load."""

    recorded: Recording
    profile: Profile
    resources: Resources
    batch_size: int

    def simulated(self, method: Method, times: Sequence[float]) -> SimulatedLoad:
        """Simulate requests at these times, with a new drafter."""
        recipe = read_drafter(method.drafter)
        if recipe.loads_model and method.drafter not in self.profile.drafts:
            raise ConfigError(f"the profile does not contain the drafting times of --drafter {method.drafter!r}")
        drafter = recipe.prepare(self.resources)()
        return simulate(
            self.recorded,
            self.profile,
            times,
            drafter,
            read_length(method.own_length if drafter is not None else 0),
            rule=read_rule(method.rule),
            batch_size=self.batch_size,
            drafting=self._drafting(method.drafter),
            prefix_bytes=PREFIX_BYTES,
        )

    def _drafting(self, drafter: str) -> Callable[[int, int], float] | None:
        """The profile's drafting times; None if it has none for the drafter."""
        if drafter not in self.profile.drafts:
            return None
        return lambda batch, count: self.profile.draft_seconds(drafter, batch, count)


def _check_alone(**others: Any) -> None:
    """Raise ConfigError for an option that contradicts --trace."""
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"--trace sets the arrival times; drop --{name.replace('_', '-')}")


def _figures(method: Method, name: str, load: SimulatedLoad) -> dict[str, Any]:
    out: dict[str, Any] = {"method": method.name, "arrivals": name, "requests": len(load.requests)}
    out |= {"tokens_per_s": load.tokens_per_s, "tokens_per_pass": load.tokens_per_pass, "mean_batch": load.mean_batch}
    out |= {"busy": load.busy_s / load.seconds, "mean_latency_s": load.mean("latency")}
    for of in ("queue", "first", "gap", "latency"):
        out |= {f"{of}_p{share}_s": load.percentile(of, share / 100) for share in (50, 90, 99)}
    return out


def _highest(server: _SimulatedServer, method: Method, search: _Search) -> dict[str, Any]:
    arrivals = search.arrivals
    full = server.simulated(method, [0.0] * arrivals.count)
    full_rate = len(full.requests) / full.seconds  # the throughput of a full batch is an upper bound
    found = highest_rate(
        lambda rate: server.simulated(method, arrivals.at(rate)),
        search.targets,
        low=full_rate * _LOWEST,
        high=full_rate,
    )
    out: dict[str, Any] = {"method": method.name, "highest_rate": found}
    if search.total_rate is None:
        return out
    return out | {"replicas": replicas(search.total_rate, found), "total_rate": search.total_rate}


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
        typer.echo(_within_targets(line))
    typer.echo(f"simulated with {len(recorded.records)} outputs of {recorded.model or 'a recording'}")


def _within_targets(line: dict[str, Any]) -> str:
    if not line["highest_rate"]:
        return f"{line['method']}: misses the latency targets at any rate"
    text = f"{line['method']}: meets the latency targets up to {line['highest_rate']:.3g} requests/s"
    if "replicas" in line:
        text += f"; {line['total_rate']:g} requests/s need {line['replicas']} engines"
    return text


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"
