"""Measurement of a model's pass times on this machine, by batch, tokens per pass and context, and of drafting times.

Owns the method: engine steps with random drafts of a fixed length, which are nearly always rejected; draft lengths are
interleaved and medians reported. Knows nothing about prompts or acceptance rates.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

import foresay_lab.measure.roofline as floors
from foresay.checks import check_int
from foresay.decoding.acceptance import Speculative
from foresay.decoding.capabilities import PREFILL_CHUNK
from foresay.decoding.prefill import prefill_chunk
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.stateless import Stateless
from foresay.engine import Engine
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.lengths import ConstantLength
from foresay.records.profile import FILLED_TOGETHER, Profile, Timing, profile_path
from foresay.records.provenance import machine

BATCHES, COLUMNS, CONTEXTS = (1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 9), (128, 512)
FILLS = (8, 32, 128, PREFILL_CHUNK)
LENGTHS = (1, 2, 4, 8)
_WARM_UP = 2
_CACHE_TOKENS = 128
"""Length of the cache whose size is measured, in tokens; longer caches reserve additional memory."""


class RandomDrafter(Stateless):
    """A drafter of random tokens, as many as the budget allows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Return random tokens, [B, max(budget)] int64."""
        shape = (len(rows), max(budget))
        tokens = torch.randint(0, self._vocab_size, shape, generator=self._generator)
        return Proposal(tokens.to(self._device), list(budget))


class _Bench:
    """An engine with `batch` rows of about `context` tokens, whose steps are timed."""

    def __init__(self, target: LanguageModel, drafter: Drafter, batch: int, context: int, steps: int) -> None:
        self.policy = ConstantLength(0)
        self.engine = Engine(target, drafter, Speculative(), self.policy, max_batch_size=batch)
        numbers = random.Random(batch * 10007 + context)
        for _ in range(batch):
            prompt = [numbers.randrange(target.vocab_size) for _ in range(context)]
            self.engine.submit(prompt, SamplingParams(max_new_tokens=steps * 70, ignore_eos=True))
        self.first = self.engine.step()
        while len(self.first) < batch:
            self.first = self.engine.step()

    def step(self, count: int) -> tuple[float, float]:
        """Run a step with drafts of `count` tokens. Return (seconds of drafting, seconds of the rest)."""
        self.policy.num_draft_tokens = count
        start = perf_counter()
        steps = self.engine.step()
        seconds = perf_counter() - start
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
    """Time the target's forward passes.

    columns: tokens per pass and row; all are timed at the first context, the smallest and the largest at the other contexts.
    fills: lengths of prompts whose prefill is timed. on_progress: called with (cells done, total cells). Raises ConfigError
    for sizes below their bounds, and if context and timed steps together exceed the model's context length.
    """
    target: Any = generator.target.model
    for name, values, low in (("batch", batches, 1), ("columns", columns, 1), ("context", contexts, 2)):
        if not values or any(v < low for v in values):
            raise ConfigError(f"must be numbers of at least {low}", param=name, value=list(values))
    check_int("repeats", repeats, 1)
    needed = max(contexts) + (repeats + _WARM_UP) * len(columns) * 2
    if needed > target.max_length:
        text = f"and the timed steps need {needed} tokens, and the model's context has {target.max_length}; use less"
        raise ConfigError(text, param="context", value=max(contexts))
    timings: list[Timing] = []
    cells = [(b, c) for b in batches for c in contexts]
    for done, (batch, context) in enumerate(cells):
        on_progress(done, len(cells) + 1)
        widths = sorted(columns) if context == contexts[0] else sorted({min(columns), max(columns)})
        timings += _time_widths(target, batch, widths, context, repeats)
    on_progress(len(cells), len(cells) + 1)
    filled = tuple((tokens, _fill(target, tokens, repeats)) for tokens in fills if tokens < target.max_length)
    on_progress(len(cells) + 1, len(cells) + 1)
    floor = floors.floor(target)
    name, precision = generator.target.name, generator.target.precision
    return Profile(name, precision, machine(), tuple(timings), filled, floor, **_reported_by(target))


def _reported_by(target: LanguageModel) -> dict[str, Any]:
    """Return the properties that a model itself reports; they replace the values in a saved profile."""
    capabilities = target.capabilities
    return {
        "ragged": capabilities.ragged,
        "column_cost": capabilities.column_cost,
        "token_bytes": target.cache_bytes([_CACHE_TOKENS]) / _CACHE_TOKENS,
    }


def medians(profiles: Sequence[Profile]) -> Profile:
    """Return the medians of profiles that timed the same cells at different times.

    On a shared machine a slow phase lasts seconds, and a cell timed only during it would appear slow. The low and high of each
    cell become the minimum and maximum of its quartiles.
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


def _time_widths(target: Any, batch: int, widths: Sequence[int], context: int, repeats: int) -> list[Timing]:
    drafter = RandomDrafter(target.vocab_size, target.device)
    bench = _Bench(target, drafter, batch, context, (repeats + _WARM_UP) * len(widths))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(repeats + _WARM_UP):
        for width in widths:
            _, rest = bench.step(width - 1)
            if turn >= _WARM_UP:
                seconds[width].append(rest)
    return [Timing(batch, width, context, *quartiles(found)) for width, found in seconds.items()]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, first quartile, third quartile)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def _fill(target: LanguageModel, tokens: int, repeats: int) -> float:
    """Return the prefill seconds per prompt of this many tokens, if FILLED_TOGETHER prompts are prefilled together."""
    numbers = random.Random(tokens)
    times = []
    for turn in range(min(repeats, 3) + 1):
        prompts = [[numbers.randrange(target.vocab_size) for _ in range(tokens + 1)] for _ in range(FILLED_TOGETHER)]
        params = SamplingParams(max_new_tokens=1)
        rows = Rows([Row(i, prompt, params, limit=tokens + 2) for i, prompt in enumerate(prompts)])
        cache = target.new_cache()
        target.admit(rows, 0, cache)
        start = perf_counter()
        while prefill_chunk(target, cache, rows, 0):
            pass
        if turn:
            times.append((perf_counter() - start) / FILLED_TOGETHER)
    return statistics.median(times)


def measure_drafting(
    generator: Generator,
    *,
    batches: Sequence[int] = (1, 8),
    lengths: Sequence[int] = LENGTHS,
    context: int = CONTEXTS[0],
    repeats: int = 5,
) -> tuple[list[tuple[int, int, float]], float]:
    """Time a generator's drafter. Return ([(batch, tokens drafted, seconds), ...], seconds per prompt token).

    Raises ConfigError if there is no drafter or it fails.
    """
    target = generator.target.model
    out: list[tuple[int, int, float]] = []
    fill = 0.0
    for batch in batches:
        drafter = generator.make_drafter()
        if drafter is None:
            raise ConfigError("drafts nothing that can be timed; give another", param="drafter", value="none")
        bench = _Bench(target, drafter, batch, context, (repeats + 1) * len(lengths))
        first, _ = bench.step(min(lengths))
        seconds: dict[int, list[float]] = {count: [] for count in lengths}
        for _ in range(repeats):
            for count in lengths:
                seconds[count].append(bench.step(count)[0])
        if bench.engine.draft_failures:
            raise ConfigError(f"failed: {bench.engine.drafter and bench.engine.drafter.last_error}", param="drafter")
        out += [(batch, count, statistics.median(found)) for count, found in seconds.items()]
        fill = max(0.0, first - statistics.median(seconds[min(lengths)])) / (batch * context)
    return out, fill


def profile(generator: Generator, *, fresh: bool = False, **settings: Any) -> Profile:
    """Return the target's saved profile on this machine, or measure and save a new one.

    fresh: measure again. settings: arguments of `measure`; a saved profile without some of these batches, columns or contexts
    is measured again. Raises ConfigError as `measure` does, and for a saved file that cannot be read.
    """
    model = generator.target
    path = profile_path(model.name, model.precision, machine())
    if path.exists() and not fresh:
        saved = Profile.load(path)
        required = {(b, c) for b in settings.get("batches", BATCHES) for c in settings.get("columns", COLUMNS)}
        longest = max(settings.get("contexts", CONTEXTS))
        available = {(t.batch, t.columns) for t in saved.timings}
        if required <= available and longest <= max(t.context for t in saved.timings):
            return replace(saved, **_reported_by(generator.target.model))
    measured = measure(generator, **settings)
    measured.save(path)
    return measured
