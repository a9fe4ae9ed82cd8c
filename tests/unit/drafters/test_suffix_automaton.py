"""The suffix automaton against brute force over the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.drafters.suffix_automaton import SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=40)
contexts = st.lists(st.integers(0, 3), max_size=20)


def built(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def ends(text: Sequence[int], piece: Sequence[int]) -> list[int]:
    """The positions where a piece ends in the text; the empty one ends everywhere."""
    n = len(piece)
    return [end for end in range(n, len(text) + 1) if list(text[end - n : end]) == list(piece)]


def longest(text: Sequence[int], context: Sequence[int], *, followed: bool = False) -> int:
    """Length of the longest suffix of the context in the text, or in the text without its last token."""
    body = text[:-1] if followed else text
    return next(n for n in range(len(context), -1, -1) if ends(body, context[len(context) - n :]) or n == 0)


@given(texts, contexts)
@settings(max_examples=300, deadline=None)
def test_the_longest_suffix_of_a_context_is_found_where_it_is(text: list[int], context: list[int]) -> None:
    automaton = built(text)
    state, length = automaton.match(context)
    assert length == longest(text, context)
    piece = context[len(context) - length :]
    if length:
        assert automaton.first_end[state] == ends(text, piece)[0]
    assert automaton.length[automaton.link[state]] < length or not state, "the state is the one of that very substring"
    assert length <= automaton.length[state]


@given(texts, contexts)
@settings(max_examples=300, deadline=None)
def test_followed_finds_the_longest_suffix_that_something_follows(text: list[int], context: list[int]) -> None:
    automaton = built(text)
    state, length = automaton.followed(*automaton.match(context))
    assert length == longest(text, context, followed=True)
    if length:
        before = ends(text[:-1], context[len(context) - length :])
        assert automaton.first_end[state] == before[0]
        assert automaton.recent_end(state) in before


@given(st.lists(texts, min_size=1, max_size=4), st.lists(contexts, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_text_and_context_may_grow_in_turns(pieces: list[list[int]], more: list[list[int]]) -> None:
    """The text's own end as the context, as drafters use it: (last, size) is a match that stays one."""
    automaton, text = SuffixAutomaton(), []
    for piece in pieces:
        automaton.extend(piece)
        text += piece
        state, length = automaton.followed(automaton.last, automaton.size)
        assert length == longest(text, text, followed=True)
        if length:
            assert automaton.recent_end(state) in ends(text[:-1], text[len(text) - length :])
    place, read = (0, 0), []
    for part in more:
        place = automaton.match(part, *place)
        read += part
        assert place[1] == longest(text, read)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ([2, 3, 8, 2, 3, 9, 2, 3], 5),  # the end before the one just written, not the first
        ([2, 3, 8, 2, 3, 9, 2, 3, 4, 2, 3], 8),
        ([1, 2, 8, 1, 2, 7, 2], 5),  # a substring that was never alone before
        ([5, 5], 1),
    ],
)
def test_of_several_ends_a_recent_one_is_told(text: list[int], end: int) -> None:
    automaton = built(text)
    assert automaton.recent_end(automaton.followed(automaton.last, automaton.size)[0]) == end


@given(texts)
@settings(max_examples=200, deadline=None)
def test_at_most_two_states_per_token(text: list[int]) -> None:
    automaton = built(text)
    assert len(automaton.next) <= max(2, 2 * len(text))
    assert sum(map(len, automaton.next)) <= max(1, 3 * len(text))
    assert len(automaton.next) == len(automaton.link) == len(automaton.length) == len(automaton.first_end)


class Counting(dict[int, int]):
    """A state's transitions, counting how often any are looked at."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        Counting.looks += 1
        return super().__contains__(key)

    def get(self, *args: int) -> int | None:  # type: ignore[override]
        Counting.looks += 1
        return super().get(*args)


class Counted(SuffixAutomaton):
    __slots__ = ()

    def _new(self, following: dict[int, int], length: int, first_end: int) -> int:
        return super()._new(Counting(following), length, first_end)


@pytest.mark.parametrize("period", [1, 2, 7, 50])
def test_adding_and_following_take_constant_work_per_token(period: int) -> None:
    text = [(i * i + i // 97) % period for i in range(3000)]
    automaton = Counted()
    automaton.next[0] = Counting()
    Counting.looks = 0
    automaton.extend(text)
    assert Counting.looks <= 7 * len(text)
    Counting.looks = 0
    automaton.match([token if i % 11 else -1 for i, token in enumerate(text)])
    assert Counting.looks <= 3 * len(text)


def test_tokens_nobody_has_seen_end_a_match() -> None:
    automaton = built([4, 5, 6])
    assert automaton.match([4, 5, 9]) == (0, 0)
    assert automaton.match([9, 5, 6])[1] == 2
    assert automaton.followed(*automaton.match([5, 6])) == (0, 0)
    assert SuffixAutomaton().match([1]) == SuffixAutomaton().followed(0, 0) == (0, 0)
