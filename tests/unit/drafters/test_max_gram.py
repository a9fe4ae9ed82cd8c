"""Max-Gram against its definition (Chen et al. 2023) by brute force, on committed tokens and on drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import MaxGram
from foresay.drafters.ngram_table import NgramTable
from foresay.lengths import ConstantLength
from helpers.making import make_row
from helpers.tables import UNKNOWN, level

POLICY = ConstantLength(4)
tokens = st.integers(0, 2)
texts = st.lists(tokens, min_size=1, max_size=20)
outputs = st.lists(tokens, max_size=8)


def places(text: Sequence[int], piece: Sequence[int]) -> list[int]:
    """The positions in the text after the piece that are not its end."""
    n = len(piece)
    return [end for end in range(n, len(text)) if list(text[end - n : end]) == list(piece)]


def choices(prompt: Sequence[int], output: Sequence[int], drafted: Sequence[int], count: int) -> list[list[int]]:
    """Tokens that may be proposed: after the first match of the longest suffix in the prompt, else after any in the output."""
    context = [*prompt, *output, *drafted]
    for text, first in ((prompt, True), (output, False)):
        for n in range(len(context), 0, -1):
            if found := places(text, context[-n:]):
                return [list(text[end : end + count]) for end in (found[:1] if first else found)]
    return [[]]


def propose(drafter: MaxGram, rows: Rows, *budget: int) -> list[list[int]]:
    proposal = drafter.propose(rows, budget, POLICY)
    assert proposal.distributions is None and proposal.distribution_index is None
    return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]


def admitted(*prompts: Sequence[int], **options: Any) -> tuple[MaxGram, Rows]:
    drafter, rows = MaxGram(**options), Rows([make_row(prompt) for prompt in prompts])
    drafter.admit(rows, 0)
    return drafter, rows


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_guesses_are_those_of_the_definition_in_every_step(data: st.DataObject) -> None:
    drafter, rows = admitted(*data.draw(st.lists(texts, min_size=1, max_size=3)))
    for _ in range(data.draw(st.integers(1, 5))):
        budget = [data.draw(st.integers(0, 6)) for _ in rows]
        for row, n, got in zip(rows, budget, propose(drafter, rows, *budget), strict=True):
            prompt, output = row.tokens[: row.prompt_length].tolist(), row.tokens[row.prompt_length :].tolist()
            assert got in (choices(prompt, output, [], n) if n else [[]])
            row.extend(data.draw(outputs))


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_guessed_tokens_are_looked_up_and_never_learned(data: st.DataObject) -> None:
    """In a cascade the context ends in draft tokens, which come and go; each time only committed tokens are known."""
    drafter, rows = admitted(data.draw(texts))
    row = rows[0]
    for _ in range(data.draw(st.integers(1, 6))):
        drafted = data.draw(outputs)
        ahead = rows.with_draft([drafted], 0)
        if data.draw(st.booleans()):  # a draft after a draft
            more = data.draw(outputs)
            ahead, drafted = ahead.with_draft([more], 1), [*drafted, *more]
        prompt, output = row.tokens[: row.prompt_length].tolist(), row.tokens[row.prompt_length :].tolist()
        assert propose(drafter, ahead, 4)[0] in choices(prompt, output, drafted, 4)
        row.extend(data.draw(outputs))


def test_the_prompt_comes_before_a_longer_match_in_the_output() -> None:
    drafter, rows = admitted([3, 9, 5])
    rows[0].extend([1, 2, 3, 7, 1, 2, 3])
    assert propose(drafter, rows, 2) == [[9, 5]]


def test_an_end_of_the_prompt_is_no_match_there() -> None:
    drafter, rows = admitted([1, 2, 8])
    rows[0].extend([8, 4, 4])
    assert propose(drafter, rows, 3) == [[4]], "8 ends the prompt, and 4 is not in it"
    rows[0].extend([8])
    assert propose(drafter, rows, 2) == [[4, 4]]


def test_what_an_encoder_read_is_the_prompt() -> None:
    row = Row(0, [0], SamplingParams(), limit=100, source=[5, 6, 7, 8])
    drafter, rows = MaxGram(), Rows([row])
    drafter.admit(rows, 0)
    row.extend([6])
    assert propose(drafter, rows, 5) == [[7, 8]]
    assert propose(drafter, rows.with_draft([[5]], 0), 5) == [[6, 7, 8]]
    assert propose(drafter, rows.as_decoder_only(), 5) == [[7, 8]], (
        "a decoder-only draft model reads source and output as one"
    )
    assert propose(drafter, rows.as_decoder_only().with_draft([[5]], 0), 5) == [[6, 7, 8]]


def table(**changes: Any) -> NgramTable:
    return NgramTable(**{"successor": np.array([1, 2, 3, UNKNOWN, 0, 4]), **changes})


def test_the_table_goes_on_where_the_match_ends() -> None:
    drafter, rows = admitted([4, 5, 4], table=table())
    assert propose(drafter, rows, 6) == [[5, 4, 0, 1, 2, 3]], "5 4 are copied, 0 1 2 3 follow them in the table"
    assert propose(drafter, rows, 1) == [[5]]
    assert propose(drafter, rows.with_draft([[1]], 0), 3) == [[2, 3]], (
        "nothing but the table knows a token after a draft"
    )


def test_the_tables_context_is_what_lies_before_its_place() -> None:
    """Copied tokens and those before them count, in their order."""
    levels = (level({(9, 5): 9, (5, 9): 7, (4, 7): 8}, 10),)
    drafter, rows = admitted([9, 5, 9], table=table(successor=np.full(10, UNKNOWN), levels=levels))
    assert propose(drafter, rows, 4) == [[5, 9, 7]]
    drafter, rows = admitted([4, 7], table=table(successor=np.full(10, UNKNOWN), levels=levels))
    assert propose(drafter, rows, 4) == [[8]]


def test_without_a_table_nothing_known_is_an_empty_proposal() -> None:
    drafter, rows = admitted([1, 2, 3], [2, 1, 2])
    assert propose(drafter, rows, 4, 4) == [[], [1, 2]]


def test_rows_keep_their_texts_when_they_move() -> None:
    drafter, rows = admitted([1, 9, 1], [2, 8, 2], [3, 7, 3])
    drafter.rearrange([(2, 0)], 2)
    survivors = Rows([rows[2], rows[1], make_row([6, 5, 6])])
    drafter.admit(survivors, 2)
    assert propose(drafter, survivors, 1, 1, 1) == [[7], [8], [5]]
    drafter.reset()
    drafter.admit(Rows([make_row([4])]), 0)
    assert propose(drafter, Rows([make_row([4])]), 1) == [[]]


def test_a_row_that_is_admitted_again_knows_its_output() -> None:
    drafter, rows = admitted([1])
    rows[0].extend([2, 3, 2])
    drafter.reset()
    drafter.admit(rows, 0)
    assert propose(drafter, rows, 2) == [[3, 2]]


@pytest.mark.parametrize("budget", [(0, 0), (-1, 0)])
def test_no_budget_is_no_proposal(budget: tuple[int, int]) -> None:
    drafter, rows = admitted([1, 1], [2, 2])
    proposal = drafter.propose(rows, budget, POLICY)
    assert proposal.width == 0 and proposal.num_tokens == [0, 0] and proposal.token_ids.dtype == torch.int64
