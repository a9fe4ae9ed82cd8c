"""The n-gram store against counting by brute force, and what its drafter learns of the target's passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.protocols import ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import NgramStore, NgramStoreDrafter
from foresay.errors import ConfigError
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers.making import make_row
from helpers.racing import race
from helpers.support import run

POLICY = ConstantLength(4)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def best(text: Sequence[int], context: Sequence[int], n: int, levels: str) -> set[int]:
    """The most frequent tokens after the longest known end of the context, by a search of every position."""
    for size in range(n - 1, n - 2 if levels == "one" else 0, -1):
        if size > len(context):
            continue
        piece = list(context[-size:])
        seen = Counter(text[i] for i in range(size, len(text)) if list(text[i - size : i]) == piece)
        if seen:
            return {token for token, count in seen.items() if count == max(seen.values())}
    return set()


@given(texts, texts, st.integers(2, 5), st.sampled_from(["one", "all"]))
@settings(max_examples=300, deadline=None)
def test_the_most_frequent_token_behind_the_longest_context(
    text: list[int], context: list[int], n: int, levels: str
) -> None:
    store = NgramStore(n, levels=levels)
    store.learn(text, 0)
    wanted = best(text, context, n, levels)
    found = store.next(context)
    assert (None if found is None else found[0]) in (wanted or {None})


def test_of_equally_frequent_tokens_the_later_is_guessed() -> None:
    store = NgramStore(2)
    store.learn([1, 5, 1, 6, 1, 5, 1, 6], 0)
    assert (store.next([1]) or [None])[0] == 6
    store.learn([1, 5, 1, 5], 0)
    assert (store.next([1]) or [None])[0] == 5


@given(texts, texts, st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_learning_in_parts_is_learning_the_whole(first: list[int], second: list[int], n: int) -> None:
    whole, parts = NgramStore(n), NgramStore(n)
    whole.learn([*first, *second], 0)
    parts.learn(first, 0)
    parts.learn([*first[-n:], *second], min(n, len(first)))
    assert parts._counts == whole._counts and parts._best == whole._best


@given(st.lists(st.integers(0, 40), max_size=200))
@settings(max_examples=100, deadline=None)
def test_contexts_are_bounded_and_the_ones_unseen_for_longest_go(tokens: list[int]) -> None:
    store = NgramStore(2, max_contexts=16)
    store.learn(tokens, 0)
    recent = list(dict.fromkeys(reversed(tokens[:-1])))[:16]
    assert set(store._counts) == set(store._best) == {(token,) for token in recent}
    assert len(store) == len(recent) <= 16


def test_clear_forgets_all() -> None:
    store = NgramStore(3)
    store.learn([1, 2, 3, 1, 2], 0)
    assert (store.next([1, 2]) or [None])[0] == 3
    store.clear()
    assert len(store) == 0 and store.next([1, 2]) is None


def propose(drafter: NgramStoreDrafter, rows: Rows, *budget: int) -> list[list[int]]:
    proposal = drafter.propose(rows, budget, POLICY)
    assert proposal.distributions is None
    return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]


def admitted(*prompts: Sequence[int], n: int = 3, **options: Any) -> tuple[NgramStoreDrafter, Rows]:
    drafter, rows = NgramStoreDrafter(n, **options), Rows([make_row(prompt) for prompt in prompts])
    drafter.admit(rows, 0)
    return drafter, rows


@given(
    texts, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4), st.sampled_from(["one", "all"])
)
@settings(max_examples=150, deadline=None)
def test_a_draft_follows_the_store_over_all_that_is_committed(
    prompt: list[int], outputs: list[list[int]], levels: str
) -> None:
    drafter, rows = admitted(prompt, levels=levels)
    for output in [*outputs, []]:
        committed = rows[0].tokens.tolist()
        context = list(committed)
        for token in propose(drafter, rows, 5)[0]:
            assert token in best(committed, context, 3, levels)
            context.append(token)
        assert len(context) == len(committed) + 5 or not best(committed, context, 3, levels)
        rows[0].extend(output)


def test_an_unknown_context_ends_the_draft_or_repeats_its_last_token() -> None:
    assert propose(*admitted([1, 2, 9, 1, 2]), 4) == [[9, 1, 2, 9]]
    assert propose(*admitted([1, 2, 3]), 4) == [[]]
    assert propose(*admitted([1, 2, 3], stop_unknown=False), 4) == [[3, 3, 3, 3]]
    assert propose(*admitted([1, 2, 3], n=2, stop_unknown=False), 2) == [[3, 3]]


def test_guessed_tokens_are_a_context_and_are_never_learned() -> None:
    drafter, rows = admitted([1, 2, 7, 5])
    assert propose(drafter, rows.with_draft([[1, 2]], 0), 2) == [[7, 5]]
    assert propose(drafter, rows.with_draft([[1, 2, 8, 1, 2]], 0), 1) == [[7]]
    rows[0].extend([8])
    assert propose(drafter, rows, 1) == [[]]


SEEN = 128
"""The weight of a committed token, compared with one that the target only found likely."""


def target(*top: Sequence[int]) -> ModelOutput:
    """Scores of one row whose likeliest tokens at each position are these, in order."""
    scores = torch.zeros(1, len(top), 10)
    for t, tokens in enumerate(top):
        for rank, token in enumerate(tokens):
            scores[0, t, token] = 10.0 - rank
    return ModelOutput(scores)


def learned(drafter: NgramStoreDrafter) -> dict[tuple[int, ...], dict[int, int]]:
    return drafter._states[0].store._counts


def test_the_targets_likeliest_tokens_are_learned_behind_the_draft_they_were_scored_after() -> None:
    """Context 1 2, draft 3 4 5; 3 accepted, 6 written instead of 4: scores after 4 and 5 count too."""
    drafter, rows = admitted([1, 2], n=3, filler_top_k=2, levels="one")
    drafter._states[0].store.learn([1, 2, 3, 4, 5], 0)
    assert propose(drafter, rows, 3) == [[3, 4, 5]]
    before = {key: dict(counts) for key, counts in learned(drafter).items()}
    rows[0].extend([3, 6])
    drafter.observe(rows, None, target([3, 7], [6, 4], [8, 9], [0, 1]))
    added = {(1, 2): {3: 2, 7: 1}, (2, 3): {6: 2, 4: 1}, (3, 4): {8: 2, 9: 1}, (4, 5): {0: 2, 1: 1}}
    expected = {key: counts | before.get(key, {}) for key, counts in added.items()}  # what was written keeps its weight
    expected[1, 2][3] += SEEN  # and now 3 and 6 are written
    expected[2, 3][6] += SEEN
    for key, counts in expected.items():
        assert learned(drafter)[key] == counts
    assert learned(drafter).keys() == before.keys() | added.keys()
    assert drafter._states[0].store.next([4, 5])[0] == 0, "of two learned together the likelier is drafted"


def test_what_is_written_is_learned_while_nothing_is_asked_for() -> None:
    """So that a draft after many plain passes takes no longer than others; the prompt is learned when the row comes."""
    drafter, rows = admitted([1, 2, 9])
    assert learned(drafter)[(1, 2)] == {9: SEEN}
    rows[0].extend([1, 2, 9])
    drafter.observe(rows, None, None)
    assert learned(drafter)[(1, 2)] == {9: 2 * SEEN}
    assert propose(drafter, rows, 1) == [[1]]
    assert learned(drafter)[(1, 2)] == {9: 2 * SEEN}, "and once only"


def test_fillers_after_a_stop_inside_a_draft() -> None:
    """The output was cut after the first of three draft tokens; the scored positions are known by the draft."""
    drafter, rows = admitted([1, 2], n=2, filler_top_k=2)
    drafter._states[0].store.learn([2, 3, 4, 5], 0)
    assert propose(drafter, rows, 3) == [[3, 4, 5]]
    rows[0].extend([3])
    drafter.observe(rows, None, target([3, 7], [4, 6], [5, 8], [9, 0]))
    assert learned(drafter)[(2,)] == {3: 2 * SEEN, 7: 1}, "seen twice by now"
    assert learned(drafter)[(3,)] == {4: SEEN, 6: 1}
    assert learned(drafter)[(5,)] == {9: 2, 0: 1}


def test_each_step_learns_behind_what_is_committed() -> None:
    drafter, rows = admitted([1], n=2, filler_top_k=2)
    for token, top in ((2, [2, 9]), (3, [3, 8])):
        propose(drafter, rows, 0)
        rows[0].extend([token])
        drafter.observe(rows, None, target(top))
    assert learned(drafter)[(1,)] == {2: SEEN + 2, 9: 1}, "by the first pass, and as committed text"
    assert learned(drafter)[(2,)] == {3: SEEN + 2, 8: 1}
    assert (3,) not in learned(drafter)


def test_of_a_draft_that_is_not_its_own_only_accepted_tokens_are_known() -> None:
    """Inside a cascade: rejected tokens are another drafter's, so the positions after them precompute nothing."""
    drafter, rows = admitted([1, 2], n=2, filler_top_k=2)
    assert propose(drafter, rows.with_draft([[1]], 0), 3) == [[2]]
    rows[0].extend([3, 6])
    drafter.observe(rows, None, target([3, 7], [6, 4], [8, 9], [0, 1]))
    assert learned(drafter) == {(1,): {2: SEEN}, (2,): {7: 1, 3: SEEN + 2}, (3,): {4: 1, 6: SEEN + 2}}
    drafter.observe(rows.with_draft([[6]], 0), None, target([3, 7]))
    assert (6,) not in learned(drafter), "a pass of a draft model teaches nothing"


def test_without_fillers_only_the_text_is_learned() -> None:
    drafter, rows = admitted([1, 2], n=2)
    propose(drafter, rows, 3)
    rows[0].extend([3])
    drafter.observe(rows, None, target([3, 7], [6, 4]))
    drafter.observe(rows, None, None)
    propose(drafter, rows, 0)
    assert learned(drafter) == {(1,): {2: SEEN}, (2,): {3: SEEN}}


def test_requests_learn_for_themselves_or_for_all() -> None:
    drafter, rows = admitted([1, 2, 1], [1, 1, 1], n=2)
    assert propose(drafter, rows, 1, 1) == [[2], [1]]
    store = NgramStore(2)
    drafter, rows = admitted([1, 2, 1], [3, 1], n=2, store=store)
    assert propose(drafter, rows, 0, 1) == [[], [2]], "a shared store knows the other row's text"
    drafter.reset()
    later, rows = admitted([1], n=2, store=store)
    assert propose(later, rows, 1) == [[2]], "and outlives the drafter's rows"


def test_what_was_written_outweighs_what_was_likely() -> None:
    store = NgramStore(2)
    store.add([1], 5)
    for _ in range(200):
        store.add([1], 6, 4)
    assert (store.next([1]) or [None])[0] == 5


@pytest.mark.parametrize("fillers", [1, 3])
def test_fillers_are_learned_in_a_run_and_change_no_output(fillers: int) -> None:
    model = TableModel.random(6, seed=3, concentration=0.3)
    params = SamplingParams(max_new_tokens=40)
    wanted = run(model, [[1], [2, 3]], params, gamma=0)[0]
    store = NgramStore(3)
    drafter = NgramStoreDrafter(3, filler_top_k=fillers, store=store)
    outputs, steps, engine = run(model, [[1], [2, 3]], params, drafter=drafter)
    assert outputs == wanted and engine.draft_failures == 0
    assert sum(step.num_accepted for step in steps) > 10
    written = {token for text in wanted for token in text}
    drafted = {token for counts in store._counts.values() for token in counts}
    assert (drafted - written - {1, 2, 3} != set()) == (fillers > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1}, "n=1 must be an integer in [2, 32]"),
        ({"levels": "some"}, "levels='some' must be one of one, all"),
        ({"filler_top_k": 0}, "filler_top_k=0 must be an integer in [1, 64]"),
        ({"stop_unknown": 1}, "stop_unknown=1 must be true or false"),
        ({"max_contexts": 8}, "max_contexts=8 must be an integer in [16, 268435456]"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NgramStoreDrafter(**options)
    assert str(caught.value) == message


def test_a_shared_store_bears_several_threads() -> None:
    store = NgramStore(3, max_contexts=16)

    def work(seed: int) -> None:
        for i in range(2000):
            store.add([i % 7, (i * seed) % 5], i % 3)
            store.next([i % 7, i % 5])

    assert not race(work) and len(store) <= 16
    assert store._counts.keys() == store._best.keys()
