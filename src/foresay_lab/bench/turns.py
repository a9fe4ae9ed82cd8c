"""Turns of methods and engines on one block of requests, between runs of plain decoding.

Plain decoding runs before and after every few runs, so that a ratio compares runs next to each other in time: the speed of a
machine drifts. Owns the order of runs and isolates failures, so that a failed run does not stop the others. Stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from foresay.errors import ForesayError
from foresay.records.results import Failure, Run
from foresay_lab.bench.runners import Outcome, PromptBlock, Runner


def take_turns(
    plain: Runner,
    turns: Sequence[tuple[int, Runner]],
    block: PromptBlock,
    *,
    warm: PromptBlock,
    between: int,
    starting: Callable[[Runner, int | None], None] = lambda runner, repeat: None,
) -> Iterator[tuple[Run | Failure, Outcome | None]]:
    """Run each (repeat, runner) after all runners decoded `warm`; yield their results and those of plain decoding.

    between: runs between two runs of plain decoding; their results are yielded after the second one. starting: called before
    each run with the runner and the repeat, or with None before a warm-up. Errors of plain decoding are raised.
    """

    def prepare(runner: Runner) -> None:
        starting(runner, None)
        runner.prepare(block)
        if warm.asks:
            runner.run(warm, warm.asks)

    def run(runner: Runner, repeat: int) -> Outcome:
        starting(runner, repeat)
        return runner.run(block, block.asks)

    if not turns:
        return
    prepare(plain)
    errors = {name: _guarded(partial(prepare, runner)) for name, runner in {r.name: r for _, r in turns}.items()}
    before = run(plain, turns[0][0])
    expected = before.outputs
    yield _as_run(block, turns[0][0], plain, before), before
    for first in range(0, len(turns), between):
        some = turns[first : first + between]
        done = [errors[runner.name] or _guarded(partial(run, runner, repeat)) for repeat, runner in some]
        after = run(plain, some[-1][0])
        assert not block.params.greedy or after.outputs == expected, "plain decoding is not deterministic"
        yield _as_run(block, some[-1][0], plain, after), after
        rate = (before.tokens + after.tokens) / (before.seconds + after.seconds)
        for (repeat, runner), outcome in zip(some, done, strict=True):
            if isinstance(outcome, Outcome):
                same = _compared(outcome.outputs, expected) if block.params.greedy or runner.shares_noise else {}
                result = _as_run(block, repeat, runner, outcome, plain_seconds=outcome.tokens / rate, **same)
                yield result, outcome
            else:
                yield Failure(block.cell(runner.name), repeat, str(outcome)), None
        before = after


def _guarded(work: Callable[[], Outcome | None]) -> Outcome | str | None:
    """Return the result of `work`, or its error on one line."""
    try:
        return work()
    except Exception as error:  # any error: the other runs continue
        kind = "" if isinstance(error, ForesayError) else f"{type(error).__name__}: "
        return " ".join(f"{kind}{error}".split())[:500]


def _as_run(block: PromptBlock, repeat: int, runner: Runner, outcome: Outcome, **more: Any) -> Run:
    if outcome.live is not None:
        more |= {"stats": outcome.live.stats.as_dict(), "prompts": outcome.live.prompts(block.asks)}
    return Run(block.cell(runner.name), repeat, outcome.seconds, outcome.tokens, exact=runner.exact, **more)


def _compared(outputs: Sequence[list[int]], expected: Sequence[list[int]]) -> dict[str, Any]:
    """Compare outputs with the expected ones and return the fields of a Run."""
    same = sum(a == b for a, b in zip(outputs, expected, strict=True))
    note = "" if same == len(expected) else f"{same} of {len(expected)} outputs equal those of plain decoding"
    return {"identical": same == len(expected), "note": note}
