"""Prompts filled between decoding steps: pieces by a clock, turns, and outputs that do not depend on either."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from foresay import ConstantLength, Engine, KVCache, Logits, ModelInput, ModelOutput, SamplingParams
from foresay.decoding.acceptance import make_rule
from foresay.drafters import ModelDrafter
from foresay.engine.prefixes import PrefixStore
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


class InOrder(TableCache):
    """A cache whose rows keep their order."""

    swap = None  # type: ignore[assignment]


def timed() -> Timed:
    return Timed(TableModel.random(VOCAB, seed=4).table)


def engine(target: Timed, wait_s: float = 0.1, **options: Any) -> Engine:
    given = {"drafter": None, "prefill_clock": lambda: target.now, **options}
    return Engine(
        target, given.pop("drafter"), make_rule("speculative"), ConstantLength(3), prefill_wait_s=wait_s, **given
    )


def submit(decoder: Engine, *prompts: list[int], new: int = 2) -> list[int]:
    return [decoder.submit(prompt, SamplingParams(max_new_tokens=new)) for prompt in prompts]


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


@pytest.mark.parametrize("wait_s", [0.05, 0.3])
def test_rows_that_decode_wait_no_longer_than_requested(wait_s: float) -> None:
    target = timed()
    decoder = engine(target, wait_s)
    submit(decoder, *SHORT, new=200)
    decoder.step()
    submit(decoder, LONG, new=5)
    gaps = [b - a for times in answered(decoder, target).values() for a, b in itertools.pairwise(times)]
    assert max(gaps) < 1.6 * wait_s + 0.03
    if wait_s == 0.3:
        assert max(gaps) > 0.15, "control: there was something to wait for"


@pytest.mark.parametrize("prefixes", [False, True])
def test_short_prompts_overtake_long_ones(prefixes: bool) -> None:
    """A second long one that begins alike waits for the first; those after it do not."""
    target = timed()
    decoder = engine(target, prefixes=PrefixStore() if prefixes else None)
    long = submit(decoder, *[LONG] * (1 + prefixes))
    decoder.step()
    others = submit(decoder, *SHORT)
    first = {request: times[0] for request, times in answered(decoder, target).items()}
    assert first[long[0]] > 3.0, "the long prompt takes three seconds"
    assert max(first[one] for one in others) < 1.0
    assert not prefixes or 3.0 < first[long[1]] < 5.0, "it began with what the first had filled"


def first_tokens(*, after_long: bool) -> tuple[float, float]:
    """When the median and the last of 24 short prompts gives its first token, alone or after a prompt of 4,000 tokens."""
    target = timed()
    decoder = engine(target, 0.3)
    long = submit(decoder, *[[1, 2, 3, 4, 5] * 800] * after_long, new=1)
    decoder.step()
    began = target.now
    submit(decoder, *([6, i % VOCAB, 3] * (15 + i % 5) for i in range(24)), new=20)
    times = sorted(one[0] - began for request, one in answered(decoder, target).items() if request not in long)
    return times[12], times[-1]


def test_short_prompts_after_a_long_one_are_hardly_later() -> None:
    alone, later = first_tokens(after_long=False), first_tokens(after_long=True)
    assert later[0] < 1.3 * alone[0] + 0.3 and later[1] < 1.3 * alone[1] + 0.3


@pytest.mark.parametrize("case", ["a short prompt after a long one that begins alike", "a long prompt"])
def test_a_prompt_is_not_kept_waiting_by_others_that_come_before_each_step(case: str) -> None:
    """The row that prefills the common beginning is as urgent as the short one that waits for it."""
    target, common, is_short = timed(), [1, 2, 3, 4] * 5, case != "a long prompt"
    decoder = engine(target, 0.3 if is_short else 0.1, prefixes=PrefixStore() if is_short else None)
    both = ([*common, *[5, 4, 3] * 1000], [*common, *[6, 5] * 15]) if is_short else (LONG,)
    watched_one, done = submit(decoder, *both, new=1)[-1], 0.0
    while not done and target.now < 30:
        submit(decoder, [2, 6] * 60 if is_short else [1] * 60, new=1)
        done = next((target.now for step in decoder.step() if step.request_id == watched_one), 0.0)
    assert 0 < done < (2.0 if is_short else 20)


def test_several_short_prompts_share_a_pass() -> None:
    target = timed()
    passes, decoder = watched(target), engine(target, 0.3)
    for i in range(3):  # long and short ones by turns
        submit(decoder, [1, 2, 3, 4, 5] * (200 + i), [6, i, 3] * 10, new=1)
    decoder.step()
    assert len(passes[0]) == 3, "the short ones, whatever their order"


def test_a_prompt_alone_is_filled_by_whole_chunks_and_gives_the_word_back_in_time() -> None:
    for wait_s in (10.0, 0.1):
        target = timed()
        passes, decoder, stops = watched(target), engine(target, wait_s), [0.0]
        submit(decoder, LONG, new=1)
        while decoder.has_work:
            decoder.step()
            stops.append(target.now)
        if wait_s == 10.0:
            assert list(map(sum, passes)) == [256] * 11 + [183]
        else:
            assert len(stops) > 10 and max(b - a for a, b in itertools.pairwise(stops)) < 0.3


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_outputs_do_not_depend_on_turns(prefixes: bool, drafted: bool) -> None:
    prompts = [LONG[:700], *SHORT, [*LONG[:650], 1, 1], [*LONG[:40], 6, 6], LONG[:500]]
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=i) for i in range(len(prompts))]
    found = []
    for wait_s, more in ((0.05, {}), (0.3, {}), (0.3, {"prefill_clock": None})):
        drafter = ModelDrafter(TableModel.random(VOCAB, seed=9), VOCAB) if drafted else None
        decoder = engine(timed(), wait_s, drafter=drafter, prefixes=PrefixStore() if prefixes else None, **more)
        outputs = {decoder.submit(prompt, one): list[int]() for prompt, one in zip(prompts, params, strict=True)}
        while decoder.has_work:
            for step in decoder.step():
                outputs[step.request_id] += step.token_ids
        assert decoder.draft_failures == 0, decoder.drafter and decoder.drafter.last_error
        found.append(outputs)
    assert found[0] == found[1] == found[2]


def test_a_cache_whose_rows_stay_fills_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    target = timed()
    monkeypatch.setattr(target, "new_cache", InOrder)
    decoder = engine(target)
    [first] = submit(decoder, LONG)
    decoder.step()
    [other] = submit(decoder, SHORT[0])
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
        passes, decoder = watched(target), engine(target, 0.05)
        submit(decoder, SHORT[0], new=400)
        decoder.step()
        submit(decoder, LONG[:1400], new=1)
        answered(decoder, target)
        largest.append(max(map(sum, passes)))
    assert largest[0] == 256 > 3 * largest[1]
