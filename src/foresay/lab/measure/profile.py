"""Measuring how long a model's passes take on this machine, over batch, columns and context, and how long drafting takes.

Owns how a pass is timed: through the engine, with random drafts of a set length, which are nearly always rejected, widths
interleaved, medians. Knows nothing of prompts or of acceptance rates.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

import foresay.lab.measure.roofline as floors
from foresay.decoding.acceptance import Speculative
from foresay.decoding.prefill import prefill_chunk
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import PREFILL_CHUNK, Drafter, LanguageModel, LengthPolicy
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.stateless import Stateless
from foresay.engine import Engine
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.records.profile import FILLED_TOGETHER, Profile, Timing, profile_path
from foresay.records.provenance import machine

BATCHES, COLUMNS, CONTEXTS = (1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 9), (128, 512)
FILLS = (8, 32, 128, PREFILL_CHUNK)
LENGTHS = (1, 2, 4, 8)
_WARM_UP = 2
_FEW = 128
"""Tokens of a cache whose size is asked for: longer ones have room to grow."""


class Noise(Stateless):
    """Drafts random tokens, as many as its budget allows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Random tokens, [B, max(budget)]."""
        shape = (len(rows), max(budget))
        tokens = torch.randint(0, self._vocab_size, shape, generator=self._generator)
        return Proposal(tokens.to(self._device), list(budget))


class _Stepwise(LengthPolicy):
    """Drafts `count` tokens a row, which is set before each timed step."""

    remembers = False
    count = 0

    def budget(self, rows: Rows) -> list[int]:
        return [self.count] * len(rows)


class _Bench:
    """An engine with `batch` rows of about `context` tokens, which is stepped and timed."""

    def __init__(self, target: LanguageModel, drafter: Drafter, batch: int, context: int, steps: int) -> None:
        self.policy = _Stepwise()
        self.engine = Engine(target, drafter, Speculative(), self.policy, max_batch_size=batch)
        numbers = random.Random(batch * 10007 + context)
        for _ in range(batch):
            prompt = [numbers.randrange(target.vocab_size) for _ in range(context)]
            self.engine.submit(prompt, SamplingParams(max_new_tokens=steps * 70, ignore_eos=True))
        self.first = self.engine.step()
        while len(self.first) < batch:
            self.first = self.engine.step()

    def step(self, count: int) -> tuple[float, float]:
        """(seconds of drafting, seconds of the rest) of one step with drafts of `count` tokens."""
        self.policy.count = count
        began = perf_counter()
        steps = self.engine.step()
        seconds = perf_counter() - began
        return steps[0].draft_s, seconds - steps[0].draft_s


def measure(
    generator: Generator,
    *,
    batches: Sequence[int] = BATCHES,
    columns: Sequence[int] = COLUMNS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    fills: Sequence[int] = FILLS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Time the target's passes.

    batches, columns, contexts: the first context is timed with all columns, the others with the fewest and the most.
    fills: lengths of prompts whose prefill is timed. on_progress: called with (cells done, cells in all). Raises ConfigError
    for sizes below their bounds, and where context and timed steps together exceed the model's context length.
    """
    _check(batches, columns, contexts, repeats, generator.target.model.max_length)
    target: Any = generator.target.model
    timings: list[Timing] = []
    cells = [(b, c) for b in batches for c in contexts]
    for done, (batch, context) in enumerate(cells):
        on_progress(done, len(cells) + 1)
        widths = sorted(columns) if context == contexts[0] else sorted({min(columns), max(columns)})
        timings += _widths(target, batch, widths, context, repeats)
    on_progress(len(cells), len(cells) + 1)
    filled = tuple((tokens, _fill(target, tokens, repeats)) for tokens in fills if tokens < target.max_length)
    on_progress(len(cells) + 1, len(cells) + 1)
    floor = floors.floor(target)
    name, precision = generator.target.name, generator.target.precision
    return Profile(name, precision, machine(), tuple(timings), filled, floor, **_said_by(target))


def _said_by(target: LanguageModel) -> dict[str, Any]:
    """What a model says of its passes and its cache, which no file that is kept has to be believed about."""
    can = target.capabilities
    return {
        "ragged": can.ragged,
        "column_cost": can.column_cost,
        "token_bytes": target.cache_bytes([_FEW]) / _FEW,
    }


def medians(profiles: Sequence[Profile]) -> Profile:
    """The medians of profiles that timed the same cells at different moments.

    On a shared machine a slow phase lasts seconds, and a cell timed once within it would look slow itself. Each cell's low and
    high become the outermost of its quartiles.
    """
    timings = [
        Timing(
            *(same[0].batch, same[0].columns, same[0].context),
            statistics.median(t.seconds for t in same),
            min(t.low for t in same),
            max(t.high for t in same),
        )
        for same in zip(*(p.timings for p in profiles), strict=True)
    ]
    fills = [
        (same[0][0], statistics.median(s for _, s in same)) for same in zip(*(p.fills for p in profiles), strict=True)
    ]
    return replace(profiles[-1], timings=tuple(timings), fills=tuple(fills))


def _check(batches: Sequence[int], columns: Sequence[int], contexts: Sequence[int], repeats: int, longest: int) -> None:
    for name, values, low in (("batch", batches, 1), ("columns", columns, 1), ("context", contexts, 2)):
        if not values or any(v < low for v in values):
            raise ConfigError(f"{name}={list(values)} must be numbers of at least {low}")
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} must be at least 1")
    most = max(contexts) + (repeats + _WARM_UP) * len(columns) * 2
    if most > longest:
        raise ConfigError(
            f"context={max(contexts)} and what is decoded behind it do not fit the model's {longest} tokens"
        )


def _widths(target: Any, batch: int, widths: Sequence[int], context: int, repeats: int) -> list[Timing]:
    bench = _Bench(target, Noise(target.vocab_size, target.device), batch, context, (repeats + _WARM_UP) * len(widths))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(repeats + _WARM_UP):
        for width in widths:
            _, rest = bench.step(width - 1)
            if turn >= _WARM_UP:
                seconds[width].append(rest)
    return [Timing(batch, width, context, *quartiles(found)) for width, found in seconds.items()]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, first quartile, third quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def _fill(target: LanguageModel, tokens: int, repeats: int) -> float:
    """Seconds of the prefill of a prompt of this many tokens, one of several that join the batch together."""
    numbers = random.Random(tokens)
    times = []
    for turn in range(min(repeats, 3) + 1):
        prompts = [[numbers.randrange(target.vocab_size) for _ in range(tokens + 1)] for _ in range(FILLED_TOGETHER)]
        params = SamplingParams(max_new_tokens=1)
        rows = Rows([Row(i, prompt, params, limit=tokens + 2) for i, prompt in enumerate(prompts)])
        cache = target.new_cache()
        target.admit(rows, 0, cache)
        began = perf_counter()
        while prefill_chunk(target, cache, rows, 0):
            pass
        if turn:
            times.append((perf_counter() - began) / FILLED_TOGETHER)
    return statistics.median(times)


def measure_drafting(
    generator: Generator,
    *,
    batches: Sequence[int] = (1, 8),
    lengths: Sequence[int] = LENGTHS,
    context: int = CONTEXTS[0],
    repeats: int = 5,
) -> tuple[list[tuple[int, int, float]], float]:
    """Time a generator's drafter: (batch, tokens drafted, seconds), and its seconds per token of a prompt.

    Raises ConfigError where there is no drafter, and when it fails.
    """
    target = generator.target.model
    out: list[tuple[int, int, float]] = []
    fill = 0.0
    for batch in batches:
        drafter = generator.make_drafter()
        if drafter is None:
            raise ConfigError("drafter='none' has nothing to time")
        bench = _Bench(target, drafter, batch, context, (repeats + 1) * len(lengths))
        first, _ = bench.step(min(lengths))
        seconds: dict[int, list[float]] = {count: [] for count in lengths}
        for _ in range(repeats):
            for count in lengths:
                seconds[count].append(bench.step(count)[0])
        if bench.engine.draft_failures:
            raise ConfigError(f"the drafter failed: {bench.engine.drafter and bench.engine.drafter.last_error}")
        out += [(batch, count, statistics.median(found)) for count, found in seconds.items()]
        fill = max(0.0, first - statistics.median(seconds[min(lengths)])) / (batch * context)
    return out, fill


def profile(generator: Generator, *, fresh: bool = False, **settings: Any) -> Profile:
    """The target's profile on this machine: the one kept from before, or a new one, which is kept.

    fresh: measure again. settings: as `measure`; a kept profile that lacks some of these batches, columns or contexts is
    measured anew. Raises ConfigError as `measure` does, and for a kept file that cannot be read.
    """
    model = generator.target
    path = profile_path(model.name, model.precision, machine())
    if path.exists() and not fresh:
        kept = Profile.load(path)
        wanted = {(b, c) for b in settings.get("batches", BATCHES) for c in settings.get("columns", COLUMNS)}
        longest = max(settings.get("contexts", CONTEXTS))
        have = {(t.batch, t.columns) for t in kept.timings}
        if wanted <= have and longest <= max(t.context for t in kept.timings):
            return replace(kept, **_said_by(generator.target.model))
    made = measure(generator, **settings)
    made.save(path)
    return made
