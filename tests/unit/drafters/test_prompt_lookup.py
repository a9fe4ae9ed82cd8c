from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.rows import Rows
from foresay.drafters import PromptLookup
from foresay.errors import ConfigError
from foresay.lengths import ConstantLength
from helpers.making import make_row
from helpers.refusals import refused

POLICY = ConstantLength(4)


def reference(tokens: Sequence[int], low: int, high: int, count: int) -> list[int]:
    """By brute force: the longest suffix that ends earlier too, its latest earlier end, and what follows, self-copying."""
    size = len(tokens)
    for n in range(min(high, size), low - 1, -1):
        ends = [end for end in range(n, size) if list(tokens[end - n : end]) == list(tokens[size - n :])]
        if ends:
            out = list(tokens)
            for i in range(count):
                out.append(out[max(ends) + i])
            return out[size:]
    return []


def propose(drafter: PromptLookup, rows: Rows, *budget: int) -> list[list[int]]:
    proposal = drafter.propose(rows, budget, POLICY)
    assert proposal.distributions is None and proposal.distribution_index is None, "copied tokens are point masses"
    assert proposal.token_ids.shape[0] == len(rows)
    assert proposal.token_ids.dtype == torch.int64
    assert proposal.width == max(proposal.num_tokens, default=0)
    return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]


def admitted(prompts: Sequence[Sequence[int]], **options: Any) -> tuple[PromptLookup, Rows]:
    drafter, rows = PromptLookup(**options), Rows([make_row(prompt) for prompt in prompts])
    drafter.admit(rows, 0)
    return drafter, rows


small_texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_guesses_are_those_of_brute_force_in_every_step(data: st.DataObject) -> None:
    low = data.draw(st.integers(1, 3))
    high = data.draw(st.integers(low, 5))
    drafter, rows = admitted(data.draw(st.lists(small_texts, min_size=1, max_size=3)), min_ngram=low, max_ngram=high)
    for _ in range(data.draw(st.integers(1, 5))):
        budget = [data.draw(st.integers(0, 6)) for _ in rows]
        expected = [reference(r.tokens.tolist(), low, high, n) if n else [] for r, n in zip(rows, budget, strict=True)]
        assert propose(drafter, rows, *budget) == expected
        for row in rows:
            row.extend(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=7)))


def test_a_copy_that_reaches_the_end_goes_on_into_itself() -> None:
    drafter, rows = admitted([[7, 1, 2, 3, 1, 2, 3]], min_ngram=2, max_ngram=3)
    assert propose(drafter, rows, 7) == [[1, 2, 3, 1, 2, 3, 1]]
    drafter, rows = admitted([[9, 5, 5, 5]], min_ngram=2, max_ngram=4)
    assert propose(drafter, rows, 4) == [[5, 5, 5, 5]]


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    drafter, rows = admitted([[1, 2, 3, 8, 2, 3, 9, 1, 2, 3]], min_ngram=1, max_ngram=3)
    assert propose(drafter, rows, 1) == [[8]]


def test_the_latest_occurrence_wins() -> None:
    drafter, rows = admitted([[2, 3, 8, 2, 3, 9, 2, 3]], min_ngram=2, max_ngram=2)
    assert propose(drafter, rows, 2) == [[9, 2]]


def test_suffixes_shorter_than_the_minimum_do_not_count() -> None:
    prompt = [1, 2, 1]
    assert propose(*admitted([prompt], min_ngram=1, max_ngram=2), 2) == [[2, 1]]
    assert propose(*admitted([prompt], min_ngram=2, max_ngram=2), 2) == [[]]


def test_nothing_found_is_an_empty_proposal() -> None:
    drafter, rows = admitted([[1, 2, 3], [4]])
    assert propose(drafter, rows, 5, 5) == [[], []]


def test_budgets_are_ragged() -> None:
    repeats = [1, 2, 1, 2]
    drafter, rows = admitted([repeats, repeats, repeats, [5]])
    assert propose(drafter, rows, 3, 0, 1, 4) == [[1, 2, 1], [], [1], []]


def test_a_row_that_sat_out_catches_up() -> None:
    drafter, rows = admitted([[1, 2, 3]], min_ngram=2, max_ngram=4)
    assert propose(drafter, rows, 0) == [[]]
    rows[0].extend([8, 9, 1, 2, 3, 4])
    rows[0].extend([8, 9])
    assert propose(drafter, rows, 3) == [[1, 2, 3]]


def test_guesses_that_were_not_committed_are_never_looked_up() -> None:
    drafter, rows = admitted([[1, 2, 3, 1, 2]], min_ngram=2, max_ngram=2)
    assert propose(drafter, rows, 3) == [[3, 1, 2]]
    rows[0].extend([5, 3, 1])
    assert propose(drafter, rows, 2) == [[2, 5]], "3 1 was committed in the prompt, followed by 2"
    rows[0].extend([9, 9])
    assert propose(drafter, rows, 2) == [[]]


def test_rows_keep_their_indices_when_they_move() -> None:
    prompts = [[1, 2, 9, 1, 2], [3, 4, 8, 3, 4], [5, 6, 7, 5, 6], [2, 2, 2]]
    drafter, rows = admitted(prompts)
    propose(drafter, rows, 2, 2, 2, 2)
    drafter.rearrange([(3, 0), (2, 1)], 2)
    survivors = Rows([rows[3], rows[2]])
    assert propose(drafter, survivors, 2, 2) == [[2, 2], [7, 5]]
    newcomer = make_row([4, 5, 6, 4, 5])
    drafter.admit(Rows([*survivors, newcomer]), 2)
    survivors[1].extend([7, 5])
    assert propose(drafter, Rows([*survivors, newcomer]), 1, 1, 1) == [[2], [6], [6]]


def test_rows_are_forgotten_by_reset() -> None:
    drafter, _ = admitted([[1, 2, 1, 2]])
    drafter.reset()
    rows = Rows([make_row([3, 4, 1, 2])])
    drafter.admit(rows, 0)
    assert propose(drafter, rows, 2) == [[]]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3), (1, 65), (-1, 2)])
def test_bad_sizes_are_refused(low: int, high: int) -> None:
    with refused("min_ngram", low):
        PromptLookup(min_ngram=low, max_ngram=high)


@pytest.mark.parametrize("options", [{"max_ngram": 2.5}, {"min_ngram": "2"}, {"min_ngram": True}], ids=str)
def test_sizes_must_be_integers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PromptLookup(**options)
