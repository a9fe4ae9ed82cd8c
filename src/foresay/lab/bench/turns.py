"""Contenders taking turns over one block of requests, between runs of plain decoding.

Plain decoding runs before and after every few runs, so that a ratio compares neighbours in time: machines are shared and
drift. Owns the order of runs, and that one that fails does not lose the others. Keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from foresay.errors import ForesayError
from foresay.lab.bench.runners import Outcome, PromptBlock, Runner
from foresay.records.results import Failure, Run


def take_turns(
    plain: Runner,
    turns: Sequence[tuple[int, Runner]],
    block: PromptBlock,
    *,
    warm: PromptBlock,
    between: int,
    starting: Callable[[Runner, int | None], None] = lambda runner, repeat: None,
) -> Iterator[tuple[Run | Failure, Outcome | None]]:
    """Run each (repeat, contender), after everyone decoded `warm`; plain decoding's runs are among what comes.

    between: runs between two of plain decoding; they come when it has run again. starting: called before each run, with
    None before a warm-up. What plain decoding raises comes through.
    """

    def ready(runner: Runner) -> None:
        starting(runner, None)
        runner.prepare(block)
        if warm.asks:
            runner.run(warm, warm.asks)

    def run(runner: Runner, repeat: int) -> Outcome:
        starting(runner, repeat)
        return runner.run(block, block.asks)

    if not turns:
        return
    ready(plain)
    broken = {name: _guarded(partial(ready, runner)) for name, runner in {r.name: r for _, r in turns}.items()}
    before = run(plain, turns[0][0])
    wanted = before.outputs
    yield _as_run(block, turns[0][0], plain, before), before
    for first in range(0, len(turns), between):
        some = turns[first : first + between]
        done = [broken[runner.name] or _guarded(partial(run, runner, repeat)) for repeat, runner in some]
        after = run(plain, some[-1][0])
        assert not block.params.greedy or after.outputs == wanted, "plain decoding does not repeat itself"
        yield _as_run(block, some[-1][0], plain, after), after
        rate = (before.tokens + after.tokens) / (before.seconds + after.seconds)
        for (repeat, runner), outcome in zip(some, done, strict=True):
            if isinstance(outcome, Outcome):
                same = _compared(outcome.outputs, wanted) if block.params.greedy or runner.shares_noise else {}
                told = _as_run(block, repeat, runner, outcome, plain_seconds=outcome.tokens / rate, **same)
                yield told, outcome
            else:
                yield Failure(block.cell(runner.name), repeat, str(outcome)), None
        before = after


def _guarded(work: Callable[[], Outcome | None]) -> Outcome | str | None:
    """What it gives, or in one line why it failed."""
    try:
        return work()
    except Exception as error:  # whatever it is, the others go on
        kind = "" if isinstance(error, ForesayError) else f"{type(error).__name__}: "
        return " ".join(f"{kind}{error}".split())[:500]


def _as_run(block: PromptBlock, repeat: int, runner: Runner, outcome: Outcome, **more: Any) -> Run:
    if outcome.live is not None:
        more |= {"stats": outcome.live.stats.as_dict(), "prompts": outcome.live.prompts(block.asks)}
    return Run(block.cell(runner.name), repeat, outcome.seconds, outcome.tokens, exact=runner.exact, **more)


def _compared(outputs: Sequence[list[int]], wanted: Sequence[list[int]]) -> dict[str, Any]:
    """Whether every output is the wanted one, as a Run tells it."""
    same = sum(a == b for a, b in zip(outputs, wanted, strict=True))
    note = "" if same == len(wanted) else f"{same} of {len(wanted)} outputs as plain decoding writes them"
    return {"identical": same == len(wanted), "note": note}
