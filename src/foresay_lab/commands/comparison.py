"""Methods side by side on one prompt: a benchmark of a single request, as a table.

The feature `compare` of the commands `generate` and `chat`. Owns the rows and their figures; `bench.runners` runs the methods.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from foresay.cli import tables
from foresay.cli.colours import console, notes
from foresay.cli.common import fresh_seed, model_expression, own_methods
from foresay.cli.progress import Advance
from foresay.decoding.acceptance import RULES
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.generation.result import Generation
from foresay.lengths import LENGTHS, ConstantLength
from foresay.records.results import Failure, Run
from foresay.spec.expressions import parse, to_expression
from foresay.text.formatting import NOISE, is_noise, percent, yes_no
from foresay_lab.bench.runners import MethodRunner, PromptBlock, Runner, take_turns
from foresay_lab.candidates import advice
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import PromptRequest, RequestBuilder
from foresay_lab.measure.live_run import Outcome
from foresay_lab.tune import DRAFTERS

ALONE = "draft alone"
_WIDE = (
    *("method", "tokens", "drafted", "accepted", "drafts used", "tokens/pass", "seconds", "tokens/s", "speed-up"),
    "identical",
)
_SHORT = ("method", "tokens", "drafted", "accepted", "used", "tok/pass", "secs", "tok/s", "speed", "same")
_WARM_UP = 4
_REASON = NOISE + " noise: below the {} that plain runs differ by, or above tokens per pass"


class DraftAlone(MethodRunner):
    """A draft model that decodes alone, from the prompt in its own tokens."""

    def __init__(self, target: Generator, draft: str) -> None:
        assert target.resources is not None
        own = Generator(target.resources.model(draft), lambda: None, target.rule, ConstantLength(0))
        super().__init__(own, Method("none"))
        self.name = ALONE

    def run(self, block: PromptBlock, asks: Sequence[PromptRequest]) -> Outcome:
        """Decode the items of the requests."""
        return super().run(block, RequestBuilder(self.generator).first([ask.item for ask in asks]))


@dataclass(frozen=True, slots=True)
class Row:
    """A method and its runs."""

    name: str
    runner: MethodRunner
    runs: list[Run] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool | None:
        """True if every output is plain decoding's; None if outputs may differ."""
        identical = {run.identical for run in self.runs}
        return None if self.name == ALONE or None in identical else all(identical)


def compare(
    target: Generator,
    prompt: str | tuple[Mapping[str, str], ...],
    methods: Sequence[Method],
    draft: str | None,
    params: SamplingParams,
    repeats: int,
    advance: Advance,
    *,
    raw: bool,
) -> list[Row]:
    """Run plain decoding, the draft model alone, and the methods under the target's rule. Raises if one cannot be made.

    advance: called before each run with the number of runs before it, and of all.
    """
    if not params.greedy and params.seed is None:
        params = replace(params, seed=fresh_seed())
    block = PromptBlock("", RequestBuilder(target).first([PromptItem("", prompt, raw=raw)]), 1, params)
    rule = to_expression(target.rule, RULES)
    rows = [Row(PLAIN, MethodRunner(target, Method("none")))]
    rows += [] if draft is None else [Row(ALONE, DraftAlone(target, draft))]
    rows += [Row(one.drafter, MethodRunner(target, replace(one, rule=rule))) for one in methods]
    by_runner, runs, total = {row.runner.name: row for row in rows}, count(), len(rows) * (repeats + 1) + 1
    for row in rows:
        advance(0, total, f"{row.name}, preparing")
        row.runner.prepare(block)

    def report(runner: Runner, repeat: int | None) -> None:
        turn = "warming up" if repeat is None else f"run {repeat + 1} of {repeats}"
        advance(next(runs), total, f"{by_runner[runner.name].name}, {turn}")

    warm = replace(block, params=SamplingParams(max_new_tokens=min(_WARM_UP, params.max_new_tokens)))
    turns = [(repeat, row.runner) for repeat in range(repeats) for row in rows[1:]]
    for run, outcome in take_turns(rows[0].runner, turns, block, warm=warm, between=len(rows) - 1, starting=report):
        row = by_runner[run.cell.method]
        if isinstance(run, Failure):
            row.failures.append(run.error)
        elif outcome is not None and outcome.generations:
            row.runs.append(run)
            row.generations.extend(outcome.generations)
    return rows


def methods(generator: Generator, draft: str | None, length: str | None) -> list[Method]:
    """The n-gram drafters, the draft model, and the drafter in use at its present length; the others at their own length."""
    own = generator.drafter_name
    known = [*DRAFTERS, *([] if draft is None else [model_expression(draft)])]
    named = [Method(name) for name in known if parse(name) != parse(own)]
    length = length or to_expression(generator.policy, LENGTHS)
    return named if own == "none" else [*named, Method(own, length)]


def show(rows: Sequence[Row], generator: Generator, options: Sequence[str]) -> None:
    """Print the table, and a line for each difference and failure. options: of loading, for the command that is shown."""
    out = console()
    spread = plain_spread(rows)
    cells = [_cells(row, spread) for row in rows]
    table = tables.table(_WIDE, cells, out, short=_SHORT)
    marked = [] if all(NOISE not in row[-2] for row in cells) else [_REASON.format(percent(spread))]
    sentence, command = _conclusion(rows, spread, generator, options)
    for one in (table, *marked, *differences(rows, generator.tokenizer), *sentence):
        out.print(one, soft_wrap=not out.is_terminal)
    for one in command:  # in one piece, to be copied
        out.print(one, soft_wrap=True)
    if not generator.rule.exact:
        notes().print(f"(the rule {generator.rule.name} is lossy: its output may differ)", style="dim")


def _conclusion(
    rows: Sequence[Row], spread: float, generator: Generator, options: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return lines of the fastest method on this prompt and of the command that serves the model so.

    No lines where an output is wrong, or if the model's default failed. One that did not run counts as plain decoding.
    """
    speeds = {
        row.runner.method: 1.0 if found["noise"] else found["speed_up"]
        for row in rows[1:]
        if row.runs and row.runner.exact and row.name != ALONE and (found := record(row, spread))
    }
    default = own_methods(generator, best=False)[0]
    own = {one: speed for one, speed in speeds.items() if one.drafter == default.drafter}
    failed = not own and default.drafter in [row.name for row in rows]
    if not speeds or broken(rows) or failed:
        return [], []
    speeds = (own or {default: 1.0}) | speeds
    best = max(speeds, key=lambda one: speeds[one])
    gains = f"{best.drafter} is {speeds[best]:.2f}x plain decoding" if speeds[best] > 1 else "nothing gains"
    todo, line = advice(generator.target.name, speeds, options)
    return [f"On this prompt {gains}."], [f"{todo}: {line}"]


def plain_spread(rows: Sequence[Row]) -> float:
    """Return by how much the slowest run of plain decoding took longer than the fastest, as a share."""
    seconds = [run.seconds for run in rows[0].runs]
    return max(seconds) / min(seconds) - 1 if seconds else 0.0


def differences(rows: Sequence[Row], tokenizer: Any) -> list[str]:
    """A line for each method that failed, or whose output differs from plain decoding's though it must not."""
    lines = [f"{row.name} failed: {row.failures[0]}" for row in rows if row.failures]
    for row in [row for row in rows if row.identical is False]:
        found = [tables.first_difference(rows[0].generations[0], one, tokenizer) for one in row.generations]
        lines.append(f"{row.name}: {next(filter(None, found))}")
    return lines


def broken(rows: Sequence[Row]) -> bool:
    """True if a method's output differs from plain decoding's under an exact rule."""
    return any(row.runner.exact and row.identical is False for row in rows)


def record(row: Row, spread: float) -> dict[str, Any]:
    """The row as JSON data. exact: None for the draft model alone, whose distribution is not the target's.

    spread: that of plain decoding.
    """
    if row.failures:
        return {"method": row.name, "failed": row.failures[0]}
    speed_up = statistics.median(run.speed_up or 1.0 for run in row.runs)
    is_method, per_pass = row.name not in (PLAIN, ALONE), row.generations[-1].stats.block_efficiency
    seconds, policy = statistics.median(run.seconds for run in row.runs), row.runner.generator.policy
    figures = {
        "exact": None if row.name == ALONE else row.runner.exact,
        "seconds": seconds,
        "all_seconds": [run.seconds for run in row.runs],
        "tokens_per_s": row.runs[-1].tokens / seconds,
        "speed_up": speed_up,
        "noise": is_method and is_noise(speed_up, spread, per_pass),
        "identical": row.identical,
        "length": getattr(policy, "num_draft_tokens", type(policy).__name__),
    }
    return {"method": row.name, "failed": None} | row.generations[-1].as_record() | figures


def _cells(row: Row, spread: float) -> tuple[str, ...]:
    if row.failures:
        return (row.name, *["-"] * (len(_WIDE) - 2), "failed")
    figures, stats = record(row, spread), row.generations[-1].stats
    other = {PLAIN: "-", ALONE: "another"}.get(row.name, "sampled")
    return (
        row.name,
        str(stats.num_tokens),
        str(stats.num_drafted or "-"),
        percent(stats.acceptance_rate),
        percent(stats.draft_utilization),
        f"{stats.block_efficiency or 0:.2f}",
        f"{figures['seconds']:.2f}",
        f"{figures['tokens_per_s']:.1f}",
        f"{NOISE * figures['noise']}{figures['speed_up']:.2f}x",
        other if row.identical is None else yes_no(row.identical),
    )
