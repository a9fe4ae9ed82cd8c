"""`foresay load`: what requests would wait for under load, from a recording and a profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.cli.common import check_draft_weights, use_threads
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import MachineOptions, ModelOption
from foresay.cli.progress import loading
from foresay.cli.replay import open_recording
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.generator import PREFIX_BYTES
from foresay.generation.method import Method
from foresay.lab.replay.arrivals import bursts, from_trace, poisson
from foresay.lab.replay.simulate import Load, Target, highest_rate, replicas, simulate
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter, read_length, read_rule

_LOWEST = 1e-3
"""Where the search for the highest rate begins, as a share of what a full batch answers."""


def run(
    recording: Annotated[Path, typer.Argument(help="A greedy recording of the target's answers.")],
    *,
    profile: Annotated[Path, typer.Option(help="A profile of the target: how long its passes take.")],
    rate: Annotated[str | None, typer.Option(help="Requests a second; several as 1,2,4.  [default: 1,2,4,8]")] = None,
    burst: Annotated[int | None, typer.Option(help="So many come at once.  [default: 1]")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="When requests come, in place of --rate: seconds, one to a line.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of each load.  [default: 200]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the arrivals.  [default: 0]")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Beside plain decoding; may be repeated.")
    ] = None,
    length: Annotated[str, typer.Option(help="A length or policy.")] = "",
    batch_size: Annotated[int, typer.Option(help="Rows decoded at a time.")] = 32,
    first_p99: Annotated[
        float | None, typer.Option("--first-p99", help="Promise: seconds to the first token, of 99 in 100.")
    ] = None,
    gap_p99: Annotated[
        float | None, typer.Option("--gap-p99", help="Promise: seconds between two events of a stream, of 99 in 100.")
    ] = None,
    total: Annotated[
        float | None, typer.Option("--total", help="With a promise: how many engines share so many requests a second.")
    ] = None,
    model: ModelOption = None,
    data: DataOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of the table.")] = False,
    machine: MachineOptions,
) -> int:
    """Foretell throughput and waiting under load, with and without speculation.

    The engine's own loop answers requests from the recording, and the profile says what its passes take; a server's own
    milliseconds come on top.
    """
    promise = Target(first_p99, gap_p99)
    if total is not None and promise == Target():
        raise ConfigError("--total needs a promise: --first-p99, --gap-p99 or both")
    if trace is not None:
        _check_alone(rate=rate, burst=burst, requests=requests, seed=seed, first_p99=first_p99, gap_p99=gap_p99)
    come = _Come(burst or 1, 200 if requests is None else requests, seed or 0)
    use_threads(machine.threads)
    if length and drafter and set(drafter) == {"none"}:
        raise ConfigError(f"--length {length} is of a draft, and --drafter none drafts nothing; drop one")
    named = [Method("none"), *(Method(one, length) for one in drafter or ["suffix"] if one != "none")]
    check_draft_weights(machine, named)
    resources, recorded = open_recording(recording, model, named, data, machine)
    world = _World(recorded, Profile.load(profile), resources, batch_size)
    loads = come.at_all(rate or "1,2,4,8") if trace is None else [(trace.name, from_trace(trace))]
    lines, searched = _all(world, named, loads, _Search(promise, come, total))
    if as_json:
        for line in [*lines, *searched]:
            typer.echo(json.dumps(line))
        return 0
    _show(lines, searched, recorded)
    return 0


@dataclass(frozen=True, slots=True)
class _Search:
    """What the highest rate is looked for with; a promise of nothing looks for none."""

    promise: Target
    come: _Come
    total: float | None


def _all(
    world: _World, named: Sequence[Method], loads: Sequence[tuple[str, Sequence[float]]], search: _Search
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(what each method makes of each load, the highest rates that keep the promise)."""
    lines, searched = [], []
    for method in named:
        for name, times in loads:
            with loading(f"{method.name} at {name}"):
                lines.append(_facts(method, name, world.answered(method, times)))
        if search.promise != Target():
            with loading(f"{method.name}: the highest rate"):
                searched.append(_highest(world, method, search))
    return lines, searched


@dataclass(frozen=True, slots=True)
class _World:
    """What a load is answered with."""

    recorded: Recording
    profile: Profile
    resources: Resources
    batch_size: int

    def answered(self, method: Method, times: Sequence[float]) -> Load:
        """A load, with a drafter that has seen nothing yet."""
        recipe = read_drafter(method.drafter)
        if recipe.loads_model and method.drafter not in self.profile.drafts:
            raise ConfigError(f"drafter={method.drafter!r} takes time of its own, which the profile does not hold")
        made = recipe.prepare(self.resources)()
        return simulate(
            self.recorded,
            self.profile,
            times,
            made,
            read_length(method.own_length if made is not None else 0),
            rule=read_rule(method.rule),
            batch_size=self.batch_size,
            drafting=self._drafting(method.drafter),
            prefix_bytes=PREFIX_BYTES,
        )

    def _drafting(self, drafter: str) -> Callable[[int, int], float] | None:
        """The profile's times of drafting, where it has them."""
        if drafter not in self.profile.drafts:
            return None
        return lambda batch, count: self.profile.draft_seconds(drafter, batch, count)


def _check_alone(**others: Any) -> None:
    """ConfigError for what says when requests come beside a trace, or is searched over rates."""
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"--trace says when requests come; drop --{name.replace('_', '-')}")


@dataclass(frozen=True, slots=True)
class _Come:
    """How requests come, whatever their rate."""

    burst: int
    requests: int
    seed: int

    def at(self, rate: float) -> list[float]:
        """The times at so many a second."""
        if self.burst == 1:
            return poisson(rate, self.requests, self.seed)
        return bursts(rate, self.requests, self.burst, self.seed)

    def at_all(self, rates: str) -> list[tuple[str, list[float]]]:
        """(what it is called, the times) of each rate."""
        try:
            some = [float(part) for part in rates.split(",")]
        except ValueError:
            raise ConfigError(f"--rate {rates!r} must be numbers separated by commas, as 0.5,1,2") from None
        return [(f"{one:g}/s", self.at(one)) for one in some]


def _facts(method: Method, name: str, load: Load) -> dict[str, Any]:
    out: dict[str, Any] = {"method": method.name, "arrivals": name, "requests": len(load.requests)}
    out |= {"tokens_per_s": load.tokens_per_s, "tokens_per_pass": load.tokens_per_pass, "mean_batch": load.mean_batch}
    out |= {"busy": load.busy_s / load.seconds, "mean_latency_s": load.mean("latency")}
    for of in ("queue", "first", "gap", "latency"):
        out |= {f"{of}_p{share}_s": load.percentile(of, share / 100) for share in (50, 90, 99)}
    return out


def _highest(world: _World, method: Method, search: _Search) -> dict[str, Any]:
    come = search.come
    full = world.answered(method, [0.0] * come.requests)
    most = len(full.requests) / full.seconds  # a full batch answers no more
    found = highest_rate(
        lambda rate: world.answered(method, come.at(rate)), search.promise, low=most * _LOWEST, high=most
    )
    out: dict[str, Any] = {"method": method.name, "highest_rate": found}
    return (
        out if search.total is None else out | {"replicas": replicas(search.total, found), "total_rate": search.total}
    )


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
            *(_span(one) for one in spans),
        ]

    show_table(headings, [row(line) for line in lines])
    for line in searched:
        said = f"{line['method']}: keeps the promise up to {line['highest_rate']:.3g} requests a second"
        if "replicas" in line:
            many = line["replicas"]
            said += f"; {line['total_rate']:g} a second take " + (
                "more than any number of them" if many is None else f"{many} of them"
            )
        typer.echo(said if line["highest_rate"] else f"{line['method']}: never keeps the promise")
    typer.echo(f"{len(recorded.records)} outputs of {recorded.model or 'a recording'}, on a profile's clock")


def _span(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"
