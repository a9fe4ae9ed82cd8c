"""Methods side by side on one prompt: plain decoding, a draft by itself, and what drafts for the target.

Each method starts with an empty drafter, after a warm-up that is not timed; repeats take turns, and the median counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Console, RenderableType

from foresay.cli import tables
from foresay.cli.common import as_record
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.generation.load import change
from foresay.generation.result import Generation
from foresay.lengths import ConstantLength
from foresay.text.prompts import Prompt
from foresay.text.wording import percent, yes_no

DEFAULT_METHODS = ("prompt_lookup", "max_gram", "ngram_store", "suffix")
PLAIN, ALONE = "plain", "draft alone"
_WIDE = (
    "method",
    "tokens",
    "seconds",
    "tokens/s",
    "speed-up",
    "tokens/pass",
    "accepted",
    "drafts used",
    "identical",
    "exact",
)
_SHORT = ("method", "tokens", "seconds", "tok/s", "speed", "tok/pass", "accepted", "used", "same", "exact")
_WARM_UP = 4


@dataclass(slots=True)
class TableMethod:
    """One row: a method, its prompt, and its output and times once it has run."""

    name: str
    generator: Generator
    prompt: Prompt
    seconds: list[float] = field(default_factory=list)
    written: Generation | None = None
    failed: str | None = None
    """Why there is no output."""

    @property
    def median_s(self) -> float:
        """The seconds that count."""
        return statistics.median(self.seconds)

    def run(self, params: SamplingParams) -> None:
        """Decode once, with what the drafter keeps between requests cleared."""
        self.generator.forget()
        began = perf_counter()
        self.written = self.generator.generate(self.prompt, params)
        self.seconds.append(perf_counter() - began)

    def same_as(self, plain: TableMethod, params: SamplingParams) -> bool | None:
        """Whether the output is plain decoding's; None where it need not be."""
        if self.written is None or plain.written is None or self.name == ALONE:
            return None
        if not params.greedy and not self.generator.rule.needs.shares_noise:
            return None
        return self.written.token_ids == plain.written.token_ids


def plain_and(
    generator: Generator, prompt: Prompt, drafters: Sequence[tuple[str, dict[str, Any]]]
) -> list[TableMethod]:
    """Plain decoding, and a row for each (drafter, other settings); raises for one that cannot be made."""
    rows = [TableMethod(PLAIN, generator.plain(), prompt)]
    return rows + [TableMethod(name, change(generator, drafter=name, **more), prompt) for name, more in drafters]


def alone(generator: Generator, draft: str, prompt: Callable[[Generator], Prompt]) -> TableMethod:
    """The draft model decoding by itself."""
    assert generator.resources is not None
    own = Generator(generator.resources.model(draft), lambda: None, generator.rule, ConstantLength(0))
    return TableMethod(ALONE, own, prompt(own))


def measure(
    methods: Sequence[TableMethod], params: SamplingParams, repeats: int, progress: Callable[[str], None]
) -> None:
    """Warm up, then run each method in turn, `repeats` times."""
    warm = SamplingParams(max_new_tokens=min(_WARM_UP, params.max_new_tokens))
    for turn in range(repeats + 1):
        for method in methods:
            if method.failed is not None:
                continue
            progress(f"Decoding: {method.name} ({f'{turn} of {repeats}' if turn else 'warm-up'})")
            try:
                method.run(params if turn else warm)
            except ForesayError as error:
                if method.name == PLAIN:  # what the target itself cannot decode
                    raise
                method.failed, method.written = str(error), None
        if turn == 0:
            for method in methods:
                method.seconds.clear()


def differences(methods: Sequence[TableMethod], params: SamplingParams, tokenizer: Any) -> list[str]:
    """Where outputs that should be plain decoding's part from it, and drafters that failed, a line each."""
    plain, lines = methods[0], []
    for one in methods[1:]:
        if one.failed is not None:
            lines.append(f"{one.name} failed: {one.failed}")
        elif one.written is not None and one.written.draft_error is not None:
            lines.append(f"{one.name}: the drafter failed, and decoding went on plainly: {one.written.draft_error}")
        if one.same_as(plain, params) is False:
            lines.append(f"{one.name}: {tables.first_difference(plain.written, one.written, tokenizer)}")
    return lines


def broken(methods: Sequence[TableMethod], params: SamplingParams) -> bool:
    """Whether an exact rule gave something else than plain decoding."""
    return any(one.generator.rule.exact and one.same_as(methods[0], params) is False for one in methods[1:])


def records(methods: Sequence[TableMethod], params: SamplingParams) -> list[dict[str, Any]]:
    """The rows as --json prints them."""
    plain = methods[0]
    out = []
    for one in methods:
        record: dict[str, Any] = {"method": one.name, "failed": one.failed}
        if one.written is not None:
            record |= as_record(one.written) | {
                "exact": _exact(one),
                "seconds": one.median_s,
                "all_seconds": one.seconds,
                "tokens_per_s": one.written.stats.num_tokens / one.median_s,
                "speed_up": plain.median_s / one.median_s,
                "identical": one.same_as(plain, params),
                "length": getattr(one.generator.policy, "num_draft_tokens", type(one.generator.policy).__name__),
            }
        out.append(record)
    return out


def _exact(one: TableMethod) -> bool | None:
    """Whether the target's law is kept: plain decoding is it, and a draft by itself has its own."""
    return None if one.name == ALONE else one.name == PLAIN or one.generator.rule.exact


def _cells(one: TableMethod, plain: TableMethod, params: SamplingParams) -> tuple[str, ...]:
    if one.written is None:
        return (one.name, *["-"] * 7, "failed", "-")
    stats: Stats = one.written.stats
    same = one.same_as(plain, params)
    other = "another" if one.name == ALONE else "sampled"
    failed = one.written.draft_error is not None
    return (
        one.name,
        str(stats.num_tokens),
        f"{one.median_s:.2f}",
        f"{stats.num_tokens / one.median_s:.1f}",
        f"{plain.median_s / one.median_s:.2f}x",
        f"{stats.block_efficiency or 0:.2f}",
        "failed" if failed else percent(stats.acceptance_rate),
        percent(stats.draft_utilization),
        "-" if one is plain else other if same is None else yes_no(same),
        yes_no(_exact(one)),
    )


def table(methods: Sequence[TableMethod], params: SamplingParams, console: Console) -> RenderableType:
    """The figures, a row for each method."""
    return tables.table(_WIDE, [_cells(one, methods[0], params) for one in methods], console, short=_SHORT)


def seeded(params: SamplingParams, seed: Callable[[], int]) -> SamplingParams:
    """The parameters with one seed for all methods and repeats."""
    if params.greedy or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=seed())
