"""Prompts filled between decoding steps: pieces by a clock, turns, and outputs that do not depend on either."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from foresay.decoding.acceptance import make_rule
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.engine import Engine
from foresay.engine.prefixes import PrefixStore
from foresay.lengths import ConstantLength
from foresay.models.table import TableCache, TableModel
from helpers.refusals import refused

VOCAB, LONG = 7, [1, 2, 3, 4, 5] * 600
SHORT = [[6, i % VOCAB, 3] for i in range(8)]


class Saved(list[int]):
    nbytes = 0


class Sharing(TableCache):
    """A cache whose rows can begin with what others have."""

    def save_prefix(self, row: int, length: int) -> Saved:
        return Saved(self.tokens[row][:length])

    def load_prefix(self, row: int, saved: Saved, length: int) -> None:
        self.lengths[row], self.tokens[row] = length, list(saved[:length])


class Timed(TableModel):
    """A table whose passes take 10 ms, and 1 ms for each token of a prompt, on a clock of its own."""

    now = 0.0

    def new_cache(self) -> TableCache:
        return Sharing()

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        tokens = sum(model_input.num_tokens)
        self.now += 0.01 + (0.001 * tokens if model_input.logits is Logits.NONE else 0.0)
        return super().forward(model_input, cache)

    swap = None  # type: ignore[assignment]


class InOrder(TableCache):
    """A cache whose rows keep their order."""

    swap = None  # type: ignore[assignment]


def timed() -> Timed:
    return Timed(TableModel.random(VOCAB, seed=4).table)


def engine(target: Timed, wait_s: float = 0.1, **options: object) -> Engine:
    return Engine(
        target, None, make_rule("speculative"), ConstantLength(0), prefill_wait_s=wait_s,
        prefill_clock=lambda: target.now, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def watched(target: Timed) -> list[list[int]]:
    """A list that receives the tokens of each row, for each pass over prompts."""
    passes: list[list[int]] = []
    forward = target.forward

    def watching(model_input: ModelInput, cache: KVCache) -> ModelOutput:
        if model_input.logits is Logits.NONE:
            passes.append(list(model_input.num_tokens))
        return forward(model_input, cache)

    target.forward = watching  # type: ignore[method-assign]
    return passes


def answered(decoder: Engine, target: Timed) -> dict[int, list[float]]:
    """When each request's tokens came."""
    out: dict[int, list[float]] = {}
    while decoder.has_work:
        for step in decoder.step():
            out.setdefault(step.request_id, []).append(target.now)
    return out


@pytest.mark.parametrize("wait_s", [0.05, 0.1, 0.3])
def test_rows_that_decode_wait_no_longer_than_asked(wait_s: float) -> None:
    target = timed()
    decoder = engine(target, wait_s)
    for prompt in SHORT:
        decoder.submit(prompt, SamplingParams(max_new_tokens=200))
    decoder.step()
    decoder.submit(LONG, SamplingParams(max_new_tokens=5))
    seen = answered(decoder, target)
    gaps = [b - a for times in seen.values() for a, b in itertools.pairwise(times)]
    assert max(gaps) < 1.6 * wait_s + 0.03
    if wait_s == 0.3:
        assert max(gaps) > 0.15, "control: there was something to wait for"


def test_short_prompts_overtake_a_long_one() -> None:
    target = timed()
    decoder = engine(target)
    first = decoder.submit(LONG, SamplingParams(max_new_tokens=2))
    decoder.step()
    others = [decoder.submit(prompt, SamplingParams(max_new_tokens=2)) for prompt in SHORT]
    seen = answered(decoder, target)
    assert seen[first][0] > 3.0, "the long prompt takes three seconds"
    assert max(seen[one][0] for one in others) < 1.0


def first_tokens(*, after_long: bool) -> tuple[float, float]:
    """When the median and the last of 24 short prompts gives its first token, alone or after a prompt of 4,000 tokens."""
    target = timed()
    decoder = engine(target, 0.3)
    long = decoder.submit([1, 2, 3, 4, 5] * 800, SamplingParams(max_new_tokens=1)) if after_long else -1
    decoder.step()
    began = target.now
    for i in range(24):
        decoder.submit([6, i % VOCAB, 3] * (15 + i % 5), SamplingParams(max_new_tokens=20))
    times = sorted(one[0] - began for request, one in answered(decoder, target).items() if request != long)
    return times[12], times[-1]


def test_short_prompts_after_a_long_one_are_hardly_later() -> None:
    alone, later = first_tokens(after_long=False), first_tokens(after_long=True)
    assert later[0] < 1.3 * alone[0] + 0.3 and later[1] < 1.3 * alone[1] + 0.3


def test_a_short_prompt_is_not_delayed_by_a_long_one_that_begins_alike() -> None:
    """The row that prefills the common beginning is as urgent as the one that waits for it."""
    target, common = timed(), [1, 2, 3, 4] * 5
    decoder = engine(target, 0.3, prefixes=PrefixStore())
    decoder.submit([*common, *[5, 4, 3] * 1000], SamplingParams(max_new_tokens=1))
    short = decoder.submit([*common, *[6, 5] * 15], SamplingParams(max_new_tokens=1))
    done: float | None = None
    for _ in range(60):  # other prompts come before each step
        decoder.submit([2, 6] * 60, SamplingParams(max_new_tokens=1))
        done = done or next((target.now for step in decoder.step() if step.request_id == short), None)
    assert done is not None and done < 2.0


def test_several_short_prompts_share_a_pass() -> None:
    target = timed()
    passes = watched(target)
    decoder = engine(target, 0.3)
    for i in range(3):  # long and short ones by turns
        decoder.submit([1, 2, 3, 4, 5] * (200 + i), SamplingParams(max_new_tokens=1))
        decoder.submit([6, i, 3] * 10, SamplingParams(max_new_tokens=1))
    decoder.step()
    assert len(passes[0]) == 3, "the short ones, whatever their order"


def test_a_long_prompt_is_not_kept_waiting_for_ever() -> None:
    target = timed()
    decoder = engine(target)
    first = decoder.submit(LONG, SamplingParams(max_new_tokens=1))
    done: float | None = None
    for _ in range(600):  # a new prompt of 60 tokens before each step
        decoder.submit([1] * 60, SamplingParams(max_new_tokens=1))
        done = next((target.now for step in decoder.step() if step.request_id == first), done)
    assert done is not None and done < 20


def test_short_prompts_overtake_two_long_ones_that_begin_alike() -> None:
    """The second long one waits for the first; those after it do not."""
    target = timed()
    decoder = engine(target, prefixes=PrefixStore())
    both = [decoder.submit(LONG, SamplingParams(max_new_tokens=2)) for _ in range(2)]
    decoder.step()
    other = decoder.submit(SHORT[0], SamplingParams(max_new_tokens=2))
    seen = answered(decoder, target)
    assert seen[other][0] < 1.0 and min(seen[one][0] for one in both) > 3.0
    assert seen[both[1]][0] < 5.0, "it began with what the first had filled"


def test_a_prompt_alone_is_filled_by_whole_chunks() -> None:
    target = timed()
    passes = watched(target)
    decoder = engine(target, 10.0)
    decoder.submit(LONG, SamplingParams(max_new_tokens=1))
    answered(decoder, target)
    assert list(map(sum, passes)) == [256] * 11 + [183]


def test_a_long_prompt_alone_gives_the_word_back_in_time() -> None:
    target = timed()
    decoder = engine(target)
    decoder.submit(LONG, SamplingParams(max_new_tokens=1))
    stops = []
    while decoder.has_work:
        before = target.now
        decoder.step()
        stops.append(target.now - before)
    assert len(stops) > 10 and max(stops) < 0.3


def outputs(decoder: Engine) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    while decoder.has_work:
        for step in decoder.step():
            out.setdefault(step.request_id, []).extend(step.token_ids)
    return out


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_what_is_generated_does_not_depend_on_turns(prefixes: bool, drafted: bool) -> None:
    prompts = [LONG[:700], *SHORT, [*LONG[:650], 1, 1], [*LONG[:40], 6, 6], LONG[:500]]
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=i) for i in range(len(prompts))]
    found = []
    for wait_s, clocked in ((0.05, True), (0.3, True), (0.3, False)):
        target = timed()
        drafter = ModelDrafter(TableModel.random(VOCAB, seed=9), VOCAB) if drafted else None
        decoder = Engine(
            target, drafter, make_rule("speculative"), ConstantLength(3), prefill_wait_s=wait_s,
            prefill_clock=(lambda target=target: target.now) if clocked else None,  # type: ignore[misc]
            prefixes=PrefixStore() if prefixes else None,
        )  # fmt: skip
        ids = [decoder.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        got = outputs(decoder)
        assert decoder.draft_failures == 0, decoder.drafter and decoder.drafter.last_error
        found.append([got[i] for i in ids])
    assert found[0] == found[1] == found[2]


def test_a_cache_whose_rows_stay_fills_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    target = timed()
    monkeypatch.setattr(target, "new_cache", InOrder)
    decoder = engine(target)
    first = decoder.submit(LONG, SamplingParams(max_new_tokens=2))
    decoder.step()
    other = decoder.submit(SHORT[0], SamplingParams(max_new_tokens=2))
    seen = answered(decoder, target)
    assert seen[other][0] >= seen[first][0]


def test_a_wait_that_is_none_is_refused() -> None:
    with refused("prefill_wait_s", 0.0):
        engine(timed(), 0.0)


def test_a_model_whose_bits_depend_on_the_piece_is_filled_by_whole_chunks() -> None:
    """Whatever rows that decode wait: control, the same model without that setting is filled in small pieces."""
    largest = []
    for prefill_in_any_pieces in (False, True):
        target = timed()
        target.capabilities = replace(target.capabilities, prefill_in_any_pieces=prefill_in_any_pieces)
        passes = watched(target)
        decoder = engine(target, 0.05)
        decoder.submit(SHORT[0], SamplingParams(max_new_tokens=400))
        decoder.step()
        decoder.submit(LONG[:1400], SamplingParams(max_new_tokens=1))
        answered(decoder, target)
        largest.append(max(map(sum, passes)))
    assert largest[0] == 256 > 3 * largest[1]
