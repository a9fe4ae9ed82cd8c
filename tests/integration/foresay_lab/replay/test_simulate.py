"""Predicted load, against queueing theory, replay, and accounts that must balance."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foresay.decoding.protocols import LengthPolicy
from foresay.drafters import SuffixDrafter
from foresay.errors import ConfigError
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.models.recording import RecordedText
from foresay.records.profile import Profile, Timing
from foresay.records.recording import Record, Recording
from foresay_lab.replay.arrivals import bursts, from_trace, poisson
from foresay_lab.replay.simulate import (
    LatencyTargets,
    SimulatedLoad,
    _common_prefixes,
    highest_rate,
    replicas,
    simulate,
)
from helpers.refusals import refuses

PASS_S, TOKENS = 0.01, 20


def profile(column: float = 0.0, row: float = 0.0, fill: float = 0.0) -> Profile:
    """Passes of 10 ms; what a column, a row and a prompt's token add, in passes."""
    timings = tuple(
        Timing(b, c, 40, s := PASS_S * (1 + column * (c - 1) * b + row * (b - 1)), s, s)
        for b in (1, 2, 8, 32)
        for c in (1, 2, 5, 9)
    )
    return Profile("m", "float32", {}, timings, ((1, PASS_S * fill), (256, 256 * PASS_S * fill)), ragged=True)


def recording(count: int = 12, *, repeating: bool = False, tokens: int = TOKENS, prompt: int = 5) -> Recording:
    def text(seed: int) -> Record:
        rng = random.Random(seed)
        phrase = [rng.randrange(2, 400) for _ in range(6)]
        output = (phrase * 20)[:tokens] if repeating else [rng.randrange(2, 400) for _ in range(tokens)]
        return Record(f"r{seed}", tuple(rng.randrange(2, 400) for _ in range(prompt)), tuple(output))

    return Recording(tuple(map(text, range(count))), 512, params={"max_new_tokens": tokens, "ignore_eos": True})


def undrafted(
    texts: Recording, costs: Profile, arrivals: Sequence[float], batch_size: int, **more: Any
) -> SimulatedLoad:
    return simulate(texts, costs, arrivals, None, ConstantLength(0), batch_size=batch_size, **more)


def plain(arrivals: Sequence[float], tokens: int = TOKENS, batch_size: int = 1) -> SimulatedLoad:
    return undrafted(recording(tokens=tokens), profile(), arrivals, batch_size)


@pytest.mark.parametrize("busy", [0.3, 0.8])
def test_one_row_is_a_queue_with_constant_service(busy: float) -> None:
    """M/D/1: the mean wait is busy S / 2 (1 - busy). Control: with rows for everyone, no request waits longer than a pass."""
    arrivals = poisson(busy / PASS_S, 3000, seed=3)
    load = plain(arrivals, 1)
    wanted = busy * PASS_S / (2 * (1 - busy))
    assert load.mean("queue") == pytest.approx(wanted, rel=0.15 if busy < 0.7 else 0.25)
    assert load.busy_s / load.seconds == pytest.approx(busy, rel=0.06)
    assert 0 < plain(arrivals[:1000], 1, batch_size=256).mean("queue") < PASS_S


def test_every_token_is_answered_once_and_time_adds_up() -> None:
    load = plain(poisson(40, 100, seed=1), batch_size=4)
    assert all(one.tokens == TOKENS for one in load.requests)
    assert load.row_passes == 100 * TOKENS and load.tokens_per_pass == 1.0
    assert load.busy_s == pytest.approx(load.passes * PASS_S)
    for one in load.requests:
        assert one.queue_s >= 0 and one.queue_s < one.first_s <= one.latency_s
        assert one.first_s + math.fsum(one.gaps) == pytest.approx(one.latency_s)
        assert len(one.gaps) == TOKENS - 1
    full = plain([0.0] * 32, batch_size=8)
    assert full.mean_batch == 8 and full.tokens_per_s == pytest.approx(8 / PASS_S)


def test_prompts_take_their_time_and_hold_up_those_that_decode() -> None:
    first, second = undrafted(recording(prompt=101), profile(fill=0.1), [0.0, 0.05], 4).requests
    assert first.first_s == pytest.approx(PASS_S * (10 + 1)), "100 tokens of its prompt, a pass"
    assert max(first.gaps) > 10 * PASS_S, "the second's prompt came between two of its tokens"
    assert second.first_s > 10 * PASS_S
    # the time of each of four prompts that are filled together: a quarter of what a pass over the weights begins with
    begin, token = 4 * PASS_S, 0.01 * PASS_S
    known = replace(profile(), fills=tuple((n, begin / 4 + n * token) for n in (1, 256)))
    for count in (1, 2, 8):
        done = undrafted(recording(prompt=41), known, [0.0] * count, 8)
        assert done.requests[0].first_s == pytest.approx(begin + count * 40 * token + PASS_S)


def test_a_beginning_that_another_row_holds_takes_no_time() -> None:
    """As in a live engine; without sharing, every prompt is filled whole. A text played again shares no more of itself."""
    begin, costs = recording(prompt=101).records[0], profile(fill=0.1)
    texts = replace(recording(), records=tuple(Record(f"r{i}", (*begin.prompt, i + 2), begin.output) for i in range(2)))
    shared, alone = (undrafted(texts, costs, [0.0, 0.15], 4, share_prefixes=one) for one in (True, False))
    assert shared.requests[0].first_s == alone.requests[0].first_s == pytest.approx(PASS_S * (10.1 + 1))
    assert shared.requests[1].first_s < 2 * PASS_S < 10 * PASS_S < alone.requests[1].first_s
    assert alone.busy_s - shared.busy_s == pytest.approx(10.1 * PASS_S)
    loads = (undrafted(recording(count=3, prompt=101), costs, [0.0] * n, 6) for n in (3, 6))
    once, twice = (load.busy_s - load.passes * PASS_S for load in loads)
    assert twice == pytest.approx(2 * once, rel=0.01) and once == pytest.approx(30 * PASS_S, rel=0.01)


def test_what_rows_that_ended_keep_takes_no_time_either_within_its_bytes() -> None:
    """As in a server. The third is the next turn of the first, which ended long before; the second, played again, begins like
    none."""
    one, other = recording(count=2, prompt=101).records
    known = replace(profile(fill=0.1), token_bytes=10.0)
    third = Record("r2", (*one.prompt, *one.output[:-1], 7, 8, 9, 7, 8), one.output)
    texts, arrivals = replace(recording(), records=(one, other, third)), [0.0, 10.0, 20.0, 30.0, 40.0]

    def third_and_fifth(prefix_bytes: int, known: Profile = known) -> tuple[float, float]:
        answers = undrafted(texts, known, arrivals, 4, prefix_bytes=prefix_bytes).requests
        return answers[2].first_s / PASS_S, answers[4].first_s / PASS_S

    held = 101 + TOKENS - 1
    filled = pytest.approx((1 + 0.1 * (held + 4), 11.0))
    assert third_and_fifth(2 * held * 10) == pytest.approx((1.4, 11.0)), "both are kept"
    assert third_and_fifth(2 * held * 10 - 1) == filled, "the second drove the first out"
    assert third_and_fifth(0) == filled
    assert third_and_fifth(1 << 20, replace(known, token_bytes=0.0)) == filled, "what a token takes is not known"


def test_what_prompts_share_is_what_comparing_all_of_them_finds() -> None:
    def same_for(one: Sequence[int], other: Sequence[int]) -> int:
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))

    rng = random.Random(3)

    def text(longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2) for _ in range(rng.randrange(1, longest)))

    for _ in range(400):
        texts = [RecordedText(text(7), text(4)) for _ in range(rng.randrange(1, 9))]
        held = [(*one.prompt, *one.output[:-1]) for one in texts]
        wanted = [
            max((same_for(one.prompt, held[j]) for j in range(len(texts)) if j != i), default=0)
            for i, one in enumerate(texts)
        ]
        assert _common_prefixes(texts) == wanted


def test_drafts_that_hold_answer_more() -> None:
    """The time of drafting counts."""
    texts, arrivals = recording(repeating=True), poisson(12, 80, seed=2)

    def drafting(seconds: float) -> SimulatedLoad:
        free: Any = {"batch_size": 2, "drafting": lambda batch, count: seconds}
        return simulate(texts, profile(), arrivals, SuffixDrafter(), ConstantLength(6), **free)

    without, fast = undrafted(texts, profile(), arrivals, 2), drafting(0.0)
    assert fast.tokens_per_pass > 1.8
    assert fast.percentile("first", 0.99) < 0.5 * without.percentile("first", 0.99)
    assert drafting(5 * PASS_S).mean("latency") > without.mean("latency")


def test_where_columns_cost_lengths_that_adapt_lose_little_and_a_constant_much() -> None:
    """Draft tokens hold, but 16 rows' columns cost more than they bring; the constant is the control."""
    texts, arrivals, costly = recording(repeating=True), [0.0] * 150, profile(column=0.3)
    free: Any = {"batch_size": 16, "drafting": lambda batch, count: 0.0}

    def rate(policy: LengthPolicy) -> float:
        return simulate(texts, costly, arrivals, SuffixDrafter(), policy, **free).tokens_per_s

    plain_rate = rate(ConstantLength(0))
    assert rate(ThroughputLength()) > 0.93 * plain_rate
    assert rate(ConstantLength(6)) < 0.7 * plain_rate


def test_the_highest_rate_that_meets_a_target() -> None:
    """One row, constant service: beyond 1 / S the queue grows without bound."""
    service = 4 * PASS_S

    def at(rate: float) -> SimulatedLoad:
        return plain(poisson(rate, 150, seed=5), 4, batch_size=1)

    wanted = LatencyTargets(first_p99_s=10 * service)
    found = highest_rate(at, wanted, low=1, high=200)
    assert 0.7 / service < found < 1.1 / service
    assert wanted.met(at(found)) and not wanted.met(at(1.5 * found))
    assert highest_rate(at, LatencyTargets(first_p99_s=service / 100), low=1, high=200) == 0.0
    assert replicas(10 * found, found) == 10 and replicas(1, 0.0) is None
    assert LatencyTargets().met(at(found))


def test_arrivals(tmp_path: Path) -> None:
    times = poisson(5, 20_000, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05), "exponential: as spread as it is long"
    together = bursts(5, 20_000, 10, seed=1)
    assert len(together) == 20_000 and len(set(together)) == 2000
    assert together[-1] == pytest.approx(4000, rel=0.1)
    assert poisson(5, 10, seed=1) == poisson(5, 10, seed=1) != poisson(5, 10, seed=2)
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 12.5, "other": 1}\n\n11\n13.25\n')
    assert from_trace(file) == [0.0, 1.5, 2.25]
    for text, position in (("x\n", ":1"), ('{"time": 1}\n', ":1"), ("\n", "no arrivals"), ("1\ntrue", ":2")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=position):
            from_trace(file)


def test_what_cannot_be_simulated_is_an_error() -> None:
    sampled = replace(recording(), params={"temperature": 0.7, "max_new_tokens": TOKENS})
    reads = SuffixDrafter()
    reads.hidden_layers = (2,)
    refuses(lambda: undrafted(sampled, profile(), [0.0], 1), "recording")
    refuses(lambda: simulate(recording(), profile(), [0.0], reads, ConstantLength(2)), "drafter", "SuffixDrafter")
    refuses(lambda: undrafted(recording(), Profile("m", "f", {}, (), ()), [0.0], 1), "profile")
