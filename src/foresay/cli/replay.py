"""`foresay replay`: drafters against a recording, without the target."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.cli.common import check_draft_weights, load_generator, use_threads
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import MachineOptions, MethodOptions, ModelOption, ModelOptions
from foresay.cli.progress import loading
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.method import Method, methods
from foresay.lab.data.requests import RequestBuilder
from foresay.lab.replay.cost_tables import PassCounter, drafter_names, read_costs
from foresay.lab.replay.predict import expect
from foresay.lab.replay.replay import Replay, replay
from foresay.lab.replay.theory import CostModel
from foresay.lab.tune import DRAFTERS
from foresay.lengths import ConstantLength
from foresay.methods.recipe import Resources
from foresay.methods.recipes import read_drafter, read_length, read_rule
from foresay.models.recording import RecordingModel
from foresay.models.sources.catalog import LoadedModel
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay.text.wording import percent


def run(
    recording: Annotated[Path, typer.Argument(help="A recording, a log of tensors, or a CS-Drafting cache.")],
    *,
    drafter: Annotated[list[str] | None, typer.Option("--drafter", help="A drafter; may be repeated.")] = None,
    length: Annotated[list[str] | None, typer.Option("--length", help="A length or policy; may be repeated.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows replayed at a time.")] = 1,
    model: ModelOption = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile of the target: predicts speed, for 'throughput'.")
    ] = None,
    costs: Annotated[
        str | None, typer.Option(help="Cost table for SWI: model_parameters, previous_work, or a JSON file.")
    ] = None,
    target_cost: Annotated[str | None, typer.Option(help="The target's name in the cost table.")] = None,
    data: DataOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of the table.")] = False,
    machine: MachineOptions,
) -> int:
    """Say how much of each drafter's work a recorded target would have used.

    The model is loaded where a drafter needs its tokenizer or layers. --prompts names those of a log of tensors.
    """
    if (costs is None) != (target_cost is None):
        raise ConfigError("--costs and --target-cost go together")
    use_threads(machine.threads)
    named = methods(drafter or DRAFTERS, length or ())
    check_draft_weights(machine, named)
    known = None if profile is None else Profile.load(profile)
    if known is None:  # without times no length adapts
        named = [method.fixed for method in named]
    resources, recorded = open_recording(recording, model, named, data, machine)
    table = None if costs is None else read_costs(costs)
    plain = None if known is None else _plain_rate(recorded, batch_size, known)
    lines = []
    for method in named:
        with loading(f"Replaying {method.name}"):
            done, passes = _replay(method, recorded, resources, batch_size, known, counted=costs is not None)
        lines.append(_facts(method, done, recorded, known, plain) | _swi(done, table, target_cost, passes))
    if as_json:
        for line in lines:
            typer.echo(json.dumps(line, ensure_ascii=False))
        return 0
    _show(lines, recorded)
    return 0


def open_recording(
    path: Path, model: str | None, named: list[Method], data: DataOptions, machine: MachineOptions
) -> tuple[Resources, Recording]:
    """The recording, and the target where something needs it: its layers, its tokenizer, a log's prompts."""
    try:
        with open(path, "rb") as file:
            printed = file.read(64).lstrip().startswith(b"tensor(")
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    if not printed and not any(read_drafter(method.drafter).reads_target for method in named):
        recorded = Recording.load(path)
        stand_in = RecordingModel([recorded.records[0].text], recorded.vocab_size)
        return Resources(LoadedModel(recorded.model, stand_in, None, recorded.eos)), recorded
    name = model if model is not None or printed else Recording.load(path).model or None
    generator = load_generator(ModelOptions(name), "none", MethodOptions(), machine, later=named)
    assert generator.resources is not None
    prompts = None
    if printed:
        asks = RequestBuilder(generator, chat=not data.no_template).first(data.items())
        prompts = [ask.token_ids for ask in asks]
    return generator.resources, Recording.load(path, prompts=prompts)


def _replay(
    method: Method, recorded: Recording, resources: Resources, batch_size: int, known: Profile | None, *, counted: bool
) -> tuple[Replay, Mapping[str, int]]:
    """The replay, and the passes of each draft model where they are counted."""
    recipe = read_drafter(method.drafter)
    rule, policy = read_rule(method.rule), read_length(method.own_length)
    clock = None if known is None else known.clock()
    drafter = recipe.prepare(resources)()
    counter = PassCounter(drafter, drafter_names(method.drafter)) if counted else None
    ragged = known is not None and known.ragged
    done = replay(recorded, drafter, policy, rule=rule, batch_size=batch_size, clock=clock, ragged=ragged)
    return done, {} if counter is None else counter.passes


def _plain_rate(recorded: Recording, batch_size: int, known: Profile) -> float:
    """Tokens per second to expect of plain decoding."""
    return expect(replay(recorded, None, ConstantLength(0), batch_size=batch_size), recorded, known).tokens_per_s


def _facts(
    method: Method, done: Replay, recorded: Recording, known: Profile | None, plain: float | None
) -> dict[str, Any]:
    stats, rate = done.stats, done.rate()
    out: dict[str, Any] = {
        "method": method.name,
        "estimate": not done.exact,
        "tokens_per_pass": _finite(done.efficiency()),
        "acceptance_rate": None if rate is None else _finite(rate),
        "draft_utilization": stats.draft_utilization,
        "discard_rate": (stats.num_drafted - stats.num_accepted) / stats.num_tokens,
        "verification_rate": stats.num_passes / stats.num_tokens,
        "seconds": done.seconds,
        "stats": stats.as_dict(),
    }
    if known is not None and plain is not None:
        expected = expect(done, recorded, known)
        out |= {
            "tokens_per_s": expected.tokens_per_s,
            "speed_up": expected.tokens_per_s / plain,
            "predicted_with": known.model,
        }
    return out


def _finite(values: Sequence[float]) -> list[float | None]:
    """For JSON, which has no infinity: one prompt alone gives no interval."""
    return [value if math.isfinite(value) else None for value in values]


def _swi(done: Replay, costs: CostModel | None, target: str | None, passes: Mapping[str, int]) -> dict[str, Any]:
    """Standardised walltime improvement with a cost table; look-ups cost nothing in it."""
    if costs is None or target is None:
        return {}
    stats = done.stats
    return {"swi": costs.swi(target, stats.num_tokens, {target: stats.num_passes, **passes})}


def _show(lines: list[dict[str, Any]], recorded: Recording) -> None:
    headings = ["method", "per pass", "accepted", "used", "discard"]
    extra = [name for name in ("tokens_per_s", "speed_up", "swi") if name in lines[0]]
    titles = {"tokens_per_s": "tokens/s", "speed_up": "speed-up", "swi": "SWI"}
    shown = {"tokens_per_s": "{:.1f}", "speed_up": "{:.2f}x", "swi": "{:.2f}"}

    def row(line: dict[str, Any]) -> list[str]:
        value, low, high = line["tokens_per_pass"]
        rate = line["acceptance_rate"]
        between = f" {low:.2f}-{high:.2f}" if line["estimate"] and low is not None else ""
        tested = percent(None if rate is None else rate[0])
        cells = [line["method"], f"{value:.2f}{between}", tested, percent(line["draft_utilization"])]
        cells += [f"{line['discard_rate']:.2f}"]
        return cells + [shown[name].format(line[name]) for name in extra]

    show_table(headings + [titles[name] for name in extra], [row(line) for line in lines])
    how = "exact: live decoding makes the same steps" if recorded.greedy else "an estimate, with 95% intervals"
    took = sum(line["seconds"] for line in lines)
    of = f"{len(recorded.records)} outputs, {recorded.num_tokens} tokens of {recorded.model}"
    sys.stdout.write(f"{of}, replayed in {took:.1f} s; {how}\n")
