"""N-gram drafters: rows of all of them, and prompt lookup and Max-Gram (Chen et al. 2023) against brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay import ConstantLength, NgramDrafter, Row, Rows, SamplingParams
from foresay.drafters import MaxGram, NgramStoreDrafter, PromptLookup, SuffixDrafter
from foresay.drafters.known_text import MATCH_LENGTH
from foresay.drafters.ngram_table import NgramTable
from foresay.drafters.suffix_tree import SuffixTreeDrafter
from helpers.lookups import admitted, drafted, propose
from helpers.making import make_row
from helpers.tables import UNKNOWN, level

MAKE: dict[str, Callable[[], NgramDrafter[Any]]] = {
    "prompt_lookup": partial(PromptLookup, min_ngram=1),
    "max_gram": MaxGram,
    "suffix": SuffixDrafter,
    "suffix_tree": partial(SuffixTreeDrafter, branches=2),
    "ngram_store": partial(NgramStoreDrafter, 3),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@each
def test_rows_keep_their_texts_when_they_move_until_they_are_forgotten(make: Callable[[], NgramDrafter[Any]]) -> None:
    drafter = make()
    rows = admitted(drafter, [1, 2, 9, 1, 2], [3, 4, 8, 3, 4], [5, 6, 7, 5, 6], [2, 2, 2], [1, 2, 3])
    assert propose(drafter, rows, 1, 0, 1, -1, 4) == [[9], [], [7], [], []]
    assert propose(drafter, rows, 0, 0, -1, 0, 0) == [[]] * 5
    drafter.rearrange([(3, 0), (2, 1)], 2)
    rows = Rows([rows[3], rows[2], make_row([4, 5, 6, 4, 5])])
    drafter.admit(rows, 2)
    rows[1].extend([7])
    assert propose(drafter, rows, 1, 1, 1) == [[2], [5], [6]]
    rows[2].extend([8, 9, 8])
    drafter.reset()
    drafter.admit(rows, 0)
    assert propose(drafter, rows, 1, 1, 1) == [[2], [5], [9]], "with their outputs"
    drafter.reset()
    assert drafted(drafter, [1, 2], 1) == []


@each
def test_draft_tokens_are_a_context_and_are_never_learned(make: Callable[[], NgramDrafter[Any]]) -> None:
    drafter = make()
    rows = admitted(drafter, [1, 2, 7, 5])
    for ahead in ([1, 2], [1, 2, 8, 1, 2]):
        assert propose(drafter, rows.with_draft([ahead], 0), 1) == [[7]]
    rows[0].extend([8])
    assert propose(drafter, rows, 1) == [[]]


@each
def test_the_input_of_an_encoder_is_a_context_too(make: Callable[[], NgramDrafter[Any]]) -> None:
    row = Row(0, [0], SamplingParams(), limit=100, source=[5, 6, 7, 8])
    drafter, rows = make(), Rows([row])
    drafter.admit(rows, 0)
    row.extend([6])
    for one in (rows, rows.as_decoder_only()):
        assert propose(drafter, one, 2) == [[7, 8]] and propose(drafter, one.with_draft([[5]], 0), 2) == [[6, 7]]


@each
def test_predicted_tokens_come_first(make: Callable[[], NgramDrafter[Any]]) -> None:
    params = SamplingParams(max_new_tokens=1000, prediction=(9, 8, 7, 6, 5))
    drafter, rows = make(), Rows([Row(0, [7, 7], params, limit=2000), make_row([7, 7])])
    drafter.admit(rows, 0)
    proposal = drafter.propose(rows, [4, 4], ConstantLength(4))
    assert proposal.token_ids[0, : proposal.num_tokens[0]].tolist() == [9, 8, 7, 6]
    if proposal.matched is not None:
        assert proposal.matched[0] == MATCH_LENGTH and proposal.matched[1] < 3


tokens = st.integers(0, 2)
texts = st.lists(tokens, min_size=1, max_size=20)
outputs = st.lists(tokens, max_size=8)


def places(text: Sequence[int], piece: Sequence[int]) -> list[int]:
    """The positions in the text after the piece that are not its end."""
    n = len(piece)
    return [end for end in range(n, len(text)) if list(text[end - n : end]) == list(piece)]


def looked_up(known: Sequence[int], low: int, high: int, count: int) -> list[int]:
    """The tokens after the latest earlier occurrence of the longest suffix; past the end they repeat."""
    for n in range(min(high, len(known)), low - 1, -1):
        if ends := places(known, known[-n:]):
            out = list(known)
            for i in range(count):
                out.append(out[ends[-1] + i])
            return out[len(known) :]
    return []


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_prompt_lookup_is_its_definition_in_every_step(data: st.DataObject) -> None:
    low = data.draw(st.integers(1, 3))
    high = data.draw(st.integers(low, 5))
    drafter = PromptLookup(min_ngram=low, max_ngram=high)
    rows = admitted(drafter, *data.draw(st.lists(texts, min_size=1, max_size=3)))
    for _ in range(data.draw(st.integers(1, 5))):
        budget = [data.draw(st.integers(0, 6)) for _ in rows]
        expected = [looked_up(row.tokens.tolist(), low, high, n) for row, n in zip(rows, budget, strict=True)]
        assert propose(drafter, rows, *budget) == expected
        for row in rows:
            row.extend(data.draw(outputs))


def max_grams(prompt: Sequence[int], output: Sequence[int], ahead: Sequence[int], count: int) -> list[list[int]]:
    """Tokens that may be proposed: after the first match of the longest suffix in the prompt, else after any in the output."""
    context = [*prompt, *output, *ahead]
    for text, first in ((prompt, True), (output, False)):
        for n in range(len(context), 0, -1):
            if found := places(text, context[-n:]):
                return [list(text[end : end + count]) for end in (found[:1] if first else found)]
    return [[]]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_max_gram_is_its_definition_in_every_step(data: st.DataObject) -> None:
    """In a cascade the context ends in draft tokens, which come and go."""
    drafter = MaxGram()
    rows = admitted(drafter, *data.draw(st.lists(texts, min_size=1, max_size=3)))
    for _ in range(data.draw(st.integers(1, 5))):
        ahead, drafts = rows, [list[int]() for _ in rows]
        for tag in range(data.draw(st.integers(0, 2))):
            more = [data.draw(outputs) for _ in rows]
            ahead, drafts = ahead.with_draft(more, tag), [[*a, *b] for a, b in zip(drafts, more, strict=True)]
        budget = [data.draw(st.integers(0, 6)) for _ in rows]
        for row, draft, n, got in zip(rows, drafts, budget, propose(drafter, ahead, *budget), strict=True):
            prompt, output = row.tokens[: row.prompt_length].tolist(), row.tokens[row.prompt_length :].tolist()
            assert got in (max_grams(prompt, output, draft, n) if n else [[]])
            row.extend(data.draw(outputs))


def test_max_gram_goes_on_with_a_table() -> None:
    drafter = MaxGram(NgramTable(np.array([1, 2, 3, UNKNOWN, 0, 4])))
    rows = admitted(drafter, [4, 5, 4])
    assert propose(drafter, rows, 6) == [[5, 4, 0, 1, 2, 3]], "5 4 are copied, 0 1 2 3 follow them in the table"
    assert propose(drafter, rows, 1) == [[5]]
    assert propose(drafter, rows.with_draft([[1]], 0), 3) == [[2, 3]], "no other text has a token after that draft"
    levels = (level({(9, 5): 9, (5, 9): 7, (4, 7): 8}, 10),)
    contexts = NgramTable(np.full(10, UNKNOWN), levels=levels)
    assert [drafted(MaxGram(contexts), prompt, 4) for prompt in ([9, 5, 9], [4, 7])] == [[5, 9, 7], [8]]
