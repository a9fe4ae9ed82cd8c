"""Items as prompts and their turns; subsets and halves of a set; the shipped set."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foresay.errors import UnknownNameError
from foresay.text.prompts import encode
from foresay_lab.data.datasets import ROLES, halves, load_items, subset
from foresay_lab.data.items import PromptItem, as_prompt, next_turn, transcript
from foresay_lab.data.requests import RequestBuilder
from helpers.refusals import refused

SAID = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})


class Tokenizer:
    """Token ids are character codes; the template writes roles in brackets."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": [ord(char) for char in text]})

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self("".join(f"[{m['role']}]{m['content']}" for m in messages)).input_ids}


CHATTY, PLAIN = Tokenizer("yes"), Tokenizer(None)


def test_the_form_of_a_prompt() -> None:
    text, joined = PromptItem("a", "Hi"), "System: Be brief.\n\nUser: Why?\n\nAssistant:"
    cases: list[tuple[PromptItem, bool, Any, Any]] = [
        (text, True, CHATTY, [{"role": "user", "content": "Hi"}]),
        (text, False, CHATTY, "Hi"),
        (text, True, PLAIN, "Hi"),
        (text, True, None, "Hi"),
        (PromptItem("a", "def f(", raw=True), True, CHATTY, "def f("),
        (PromptItem("a", SAID), True, CHATTY, list(SAID)),
        (PromptItem("a", SAID), False, CHATTY, joined),
        (PromptItem("a", SAID), True, PLAIN, joined),
    ]
    for item, chat, tokenizer, expected in cases:
        prompt = as_prompt(item, tokenizer, chat=chat)
        assert prompt == expected
        written = prompt if isinstance(prompt, str) else "".join(f"[{m['role']}]{m['content']}" for m in prompt)
        assert encode(prompt, tokenizer or PLAIN) == [ord(char) for char in written]
    assert transcript([]) == "Assistant:"
    assert all(encode([{"role": role, "content": "x"}], CHATTY) for role in ROLES)


def test_turns() -> None:
    item = PromptItem("a", "One?", followups=("Two?", "Three?"))
    user = [{"role": "user", "content": text} for text in ("One?", "Two?", "Three?")]
    said = [{"role": "assistant", "content": text} for text in ("1", "2")]
    assert next_turn(item, 0, []) == (user[0],)
    assert next_turn(item, 1, ["1"]) == (user[0], said[0], user[1])
    assert next_turn(item, 2, ["1", "2"]) == (user[0], said[0], user[1], said[1], user[2])
    assert next_turn(item, 1, ["1", "2"]) == next_turn(item, 1, ["1"])
    again = replace(item, prompt=next_turn(item, 1, ["1"]))
    assert as_prompt(again, PLAIN, chat=True) == "User: One?\n\nAssistant: 1\n\nUser: Two?\n\nAssistant:"
    assert next_turn(PromptItem("b", SAID, followups=("How?",)), 1, ["So."])[:2] == SAID


def test_what_is_refused() -> None:
    item = PromptItem("a", "One?", followups=("Two?",))
    for turn, answers in ((2, ["1", "2"]), (-1, []), (1, [])):
        with refused("turn", turn):
            next_turn(item, turn, answers)
    with refused("item", "a"):
        next_turn(PromptItem("a", "def f(", raw=True), 0, [])
    with refused("prompts"):
        halves([item])

    def refuse(text: str) -> None:
        raise UnknownNameError("token", text, ["b"])

    builder = RequestBuilder(SimpleNamespace(tokenizer=refuse))  # type: ignore[arg-type]
    with refused("token", "a", UnknownNameError) as caught:
        builder.first([PromptItem("chat-01", "a")])
    assert "chat-01" in str(caught.value), "an error names its prompt"


MANY = [PromptItem(f"{name}-{i}", "p", name) for i in range(12) for name in ("a", "b", "c") if name != "c" or i < 2]

SUBSET_0 = ["c-0", "c-1", "a-2", "b-4", "b-7", "a-9", "a-11", "b-11"]
SUBSET_1 = ["b-0", "c-0", "c-1", "a-4", "a-6", "b-6", "b-9", "a-11"]
HALVES_2 = (["b-0", "a-1", "b-1", "c-1", "a-3"], ["a-0", "c-0", "a-2", "b-2"])


def ids(items: list[PromptItem]) -> list[str]:
    return [item.id for item in items]


def test_subsets_are_the_same_everywhere() -> None:
    """Pinned: a later version that chooses others makes earlier measurements incomparable."""
    assert ids(subset(MANY, 8)) == SUBSET_0
    assert ids(subset(MANY, 8, seed=1)) == SUBSET_1
    first, second = halves(MANY[:9], seed=2)
    assert (ids(first), ids(second)) == HALVES_2


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99), data=st.data())
def test_subsets_are_balanced_and_nested(sizes: list[int], seed: int, data: st.DataObject) -> None:
    items = [PromptItem(f"{c}/{i}", "p", str(c)) for c, size in enumerate(sizes) for i in range(size)]
    items = data.draw(st.permutations(items))
    count = data.draw(st.integers(1, len(items)))
    chosen = subset(items, count, seed)
    assert len(chosen) == count and chosen == [item for item in items if item in chosen]
    taken = Counter(item.category for item in chosen)
    most = max(taken.values())
    assert all(taken[str(c)] >= min(size, most - 1) for c, size in enumerate(sizes))
    if count < len(items):
        assert set(ids(chosen)) < set(ids(subset(items, count + 1, seed)))
    assert set(ids(subset(list(reversed(items)), count, seed))) == set(ids(chosen))


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_halves_are_disjoint_and_balanced(sizes: list[int], seed: int) -> None:
    items = [PromptItem(f"{c}/{i}", "p", str(c)) for c, size in enumerate(sizes) for i in range(size)]
    parts = halves(items, seed)
    assert sorted(ids(parts[0]) + ids(parts[1])) == sorted(ids(items))
    assert abs(len(parts[0]) - len(parts[1])) <= 1
    assert ids(halves(items[::-1], seed)[0]) == ids(parts[0])[::-1]
    first, second = (Counter(item.category for item in part) for part in parts)
    assert all(abs(first[str(c)] - second[str(c)]) <= 1 for c in range(len(sizes)))
    assert all(part == [item for item in items if item in part] for part in parts)


def test_halves_are_of_like_lengths() -> None:
    """One enormous prompt apart, the sums cannot differ by more than the longest does from the shortest."""
    items = [PromptItem(f"{i}", "x" * (i * i % 97 + 1), "") for i in range(40)]
    chats = [PromptItem(f"{i}", ({"role": "user", "content": "x" * (10 ** (i // 2))},), "") for i in range(8)]
    for seed in range(5):
        sums = [sum(len(str(item.prompt)) for item in half) for half in halves(items, seed)]
        assert abs(sums[0] - sums[1]) < 97
        sizes = [sorted(len(item.prompt[0]["content"]) for item in half) for half in halves(chats, seed)]  # type: ignore[index,call-overload]
        assert sizes == [[1, 10, 100, 1000]] * 2
        assert ids(halves(items, seed)[0]) != ids(halves(items, seed + 1)[0])


def test_the_shipped_set_is_well_formed() -> None:
    items = load_items()
    words = {"chat": (10, 60), "code": (10, 60), "maths": (10, 60), "editing": (60, 150)}
    names = (*words, "completion", "summarising")
    assert ids(items) == [f"{name}-{i:02d}" for name in names for i in range(1, 11)]
    assert all(item.id.startswith(item.category) and item.raw == (item.category == "completion") for item in items)
    assert Counter(item.category for item in load_items(count=30)) == dict.fromkeys(names, 5)
    texts = [str(item.prompt) for item in items]
    assert not [(a, b) for a in texts for b in texts if a is not b and a in b]
    lines = Counter(line.strip() for text in texts for line in text.split("\n") if len(line.strip()) > 30)
    assert max(lines.values()) == 1, "no line is repeated"
    for item, text in zip(items, texts, strict=True):
        if item.category in words:
            fewest, most = words[item.category]
            assert fewest <= len(text.split()) <= most
        elif item.category == "completion":
            assert 30 <= text.count("\n") <= 60
        else:
            task, material = text.split("\n\n", 1)
            assert 120 <= len(material.split()) <= 250 and len(task.split()) < 30
