"""Known tokens: predictions that are continued after differences, tokens that a grammar forces, and who drafts them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay import Row, SamplingParams, TableModel
from foresay.drafters import ModelDrafter, SuffixDrafter, known_text
from foresay.lengths import ThroughputLength
from helpers.support import run

PROMPT = [7, 7]
TEXT = random.Random(3).choices(range(40), k=300)


def known_tokens(row: Row, count: int) -> list[int]:
    """Known tokens without a lookup."""
    return known_text.known_tokens(row, count, lambda row, count: [])


def row_of(*, prediction: Sequence[int] = TEXT, processors: Sequence[Any] = ()) -> Row:
    params = SamplingParams(max_new_tokens=1000, prediction=tuple(prediction), processors=tuple(processors))
    return Row(0, PROMPT, params, limit=2000)


def steps(row: Row, output: Sequence[int], most: int = 16) -> int:
    """How many passes an output takes if every pass verifies what is known."""
    count = at = 0
    while at < len(output):
        drafted, right = known_tokens(row, most), 0
        while right < len(drafted) and at + right < len(output) and drafted[right] == output[at + right]:
            right += 1
        new = output[at : at + right + 1]
        row.extend(new)
        at, count = at + len(new), count + 1
    return count


EDITS = {
    "tokens replaced": [*TEXT[:100], 91, 92, *TEXT[102:200], 93, *TEXT[201:]],
    "tokens inserted": [*TEXT[:100], 91, 92, 93, *TEXT[100:]],
    "tokens deleted": [*TEXT[:100], *TEXT[120:]],
    "a beginning of its own": [95, 96, 97, *TEXT],
    "a part moved": [*TEXT[:50], *TEXT[200:], *TEXT[50:200]],
    "a part twice": [*TEXT[:200], *TEXT[100:]],
}


def test_a_prediction_comes_true_and_goes_on_after_a_difference() -> None:
    assert steps(row_of(), TEXT) == -(-len(TEXT) // 17)
    assert steps(row_of(prediction=()), TEXT) == len(TEXT), "control"
    for edit, output in EDITS.items():
        assert steps(row_of(), output) < len(output) / 17 + 16, edit
    row = row_of()
    assert known_tokens(row.with_draft([1], 0), 4) == [] and known_tokens(row, 0) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_that_of_a_plain_search(seed: int) -> None:
    """With few different tokens, so that runs occur often."""
    chance = random.Random(seed)
    text = [chance.randrange(3) for _ in range(60)]
    row, reached, following = row_of(prediction=text), 0, 0
    for _ in range(80):
        token = chance.randrange(3) if following is None or chance.random() < 0.3 else [*text, 0][following]
        output = [*row.tokens[len(PROMPT) :].tolist(), token]
        row.extend([token])
        if following is not None and following < len(text) and text[following] == token:
            following = reached = following + 1
        else:
            long = [end for end in range(3, 61) if len(output) >= 3 and text[end - 3 : end] == output[-3:]]
            short = [end for end in range(2, 61) if len(output) >= 2 and text[end - 2 : end] == output[-2:]]
            ahead = [end for end in long if end > reached] or [end for end in short if reached < end <= reached + 32]
            following = ahead[0] if ahead else long[-1] if long else None
        assert known_tokens(row, 5) == ([] if following is None else text[following : following + 5])


class Forces:
    """A grammar that leaves certain tokens after an output of some length."""

    def __init__(self, tokens: dict[int, list[int]]) -> None:
        self.tokens = tokens

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def forced_tokens(self, output: Sequence[int]) -> list[int] | None:
        return None if 99 in output else self.tokens.get(len(output), [])


def test_a_grammar_comes_before_a_prediction_and_the_first_that_forces_before_others() -> None:
    row = row_of(processors=[Forces({0: [4, 5, 6], 3: []})])
    assert known_tokens(row, 2) == [4, 5] and known_tokens(row, 9) == [4, 5, 6]
    row.extend([4, 5, 6])
    assert known_tokens(row, 2) == [] and not row_of(prediction=()).knows_text
    row.extend(TEXT[:3])
    assert known_tokens(row, 2) == TEXT[3:5]
    limit, grammar, excluded = Forces({2: [8]}), Forces({0: [4, 5], 2: [6], 3: [7, 7]}), Forces({0: [4, 99]})
    for processors, wanted in (
        ([limit, grammar], [4, 5, 8, 7, 7]),
        ([grammar, limit], [4, 5, 6, 7, 7]),
        ([Forces({}), excluded], [4]),
    ):
        assert known_tokens(row_of(prediction=(), processors=processors), 9) == wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([], [4, 5]),
        ([8], [4, 5, 8, 6, 7]),
        ([8, 9], [4, 5, 8, 6, 7]),  # found again after the forced ones
        ([99], [4, 5]),
        ([8, 99], [4, 5, 8, 6, 7, 8]),
    ],
)
def test_a_lookup_fills_the_gaps_between_forced_tokens(found: list[int], wanted: list[int]) -> None:
    """White space, for example, which a grammar allows and an output repeats. A token that cannot come ends the draft."""
    row = row_of(prediction=(), processors=[Forces({0: [4, 5], 3: [6, 7]})])
    calls: list[list[int]] = []

    def lookup(row: Row, count: int) -> list[int]:
        calls.append(row.tokens[len(PROMPT) :].tolist())
        return found if len(calls) <= 2 else []

    drafted = known_text.known_tokens(row, 6, lookup)
    assert drafted[: len(wanted)] == wanted and len(drafted) <= 6
    assert calls[0] == [4, 5]
    nothing = row_of(prediction=(), processors=[Forces({})])
    assert known_text.known_tokens(nothing, 6, lambda row, count: [1, 2]) == [], "no token is forced: a drafter drafts"


def test_the_adaptive_length_drafts_predictions_where_its_drafter_does_not_pay() -> None:
    """A target that repeats nothing: lookups are given up, and predictions are not. A draft model does not know the text."""
    target, draft = (TableModel.random(40, seed=seed, concentration=0.05) for seed in (1, 2))
    params = SamplingParams(max_new_tokens=60)
    prompts = [[i, i + 1] for i in range(12)]
    policy = ThroughputLength()
    plain, without, _ = run(target, prompts, params, drafter=SuffixDrafter(), policy=policy)
    again = [SamplingParams.of(params, prediction=tuple(output)) for output in plain]
    outputs, taken, _ = run(target, prompts, again, drafter=SuffixDrafter(), policy=policy)
    assert outputs == plain and len(taken) < 0.7 * len(without)
    drafted = []
    for given in ([params] * 12, again):
        _, taken, _ = run(target, prompts, given, drafter=ModelDrafter(draft, 40), policy=ThroughputLength())
        drafted.append(sum(step.num_drafted for step in taken))
    assert drafted[1] < 1.5 * drafted[0] + 20
