"""A budget of reasoning is a function of the output's own tokens: which token it forces, and after which ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tokenizers import AddedToken

from foresay.text.reasoning import REASONING, THINK, Reasoning
from foresay.text.thinking_budget import ThinkingBudget
from helpers import tiny
from helpers.refusals import refused
from helpers.tool_formats import marks_in


def tokenizer_of(kind: str, marks: Reasoning = THINK) -> Any:
    """A tokenizer with the marks as special tokens, as other added tokens, or as texts of several tokens."""
    tokenizer = tiny.tokenizer()
    added = [] if kind == "texts" else marks_in(marks.begin + marks.end)
    tokenizer.add_tokens([AddedToken(one, special=kind == "special", normalized=False) for one in added])
    return tokenizer


def forced(budget: int, tokenizer: Any, prompt: str, output: list[int], marks: Reasoning = THINK) -> list[int]:
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    return ThinkingBudget(budget, tokenizer, reasoning=marks).after(ids).forced_tokens(output)


@pytest.mark.parametrize(
    ("marks", "kind"),
    [*((marks, "special") for marks in REASONING), (THINK, "added"), (THINK, "texts")],
    ids=lambda one: one if isinstance(one, str) else one.begin.strip(),
)
def test_the_mark_follows_the_last_token_of_the_budget(marks: Reasoning, kind: str) -> None:
    """With the marks of every family, whether the output begins inside the reasoning or not."""
    tokenizer = tokenizer_of(kind, marks)
    begin, end = (tokenizer(one, add_special_tokens=False).input_ids for one in (marks.begin, marks.end))
    thoughts = tokenizer("abcdefgh").input_ids
    assert kind == "special" or (len(end) == 1) == (kind == "added")
    for prompt, budget in itertools.product((f"hi{marks.begin}", f"hi{marks.begin}\n", "hi"), (0, 1, 5)):
        start = [] if marks.begin in prompt else [*tokenizer("\n ").input_ids, *begin]
        for count in range(len(start)):
            assert not forced(budget, tokenizer, prompt, start[:count], marks), "before the reasoning"
        for count in range(8):
            found = forced(budget, tokenizer, prompt, [*start, *thoughts[:count]], marks)
            assert found == (end if count >= budget else []), count
        for count in range(len(end)):
            assert forced(budget, tokenizer, prompt, start + thoughts[:budget] + end[:count], marks) == end[count:]
        over = start + thoughts[:budget] + end
        assert not any(forced(budget, tokenizer, prompt, over + thoughts[:count], marks) for count in range(8)), (
            "after it"
        )
    for prompt, output in (
        ("hi", f"abc{marks.begin}def"), (f"hi{marks.begin}a{marks.end}\n", "abc"), ("hi", "<thunk>abc"), ("hi", ""),
        ("hi", "\n" * 65 + f"{marks.begin}abc"), (f"hi{marks.begin}a{marks.end}\n", f"{marks.begin}abc"),
    ):  # fmt: skip
        assert not forced(0, tokenizer, prompt, tokenizer(output).input_ids, marks), "it does not reason"


def test_hidden_tokens_are_no_text_and_other_spellings_of_the_mark_end_the_reasoning() -> None:
    tokenizer = tokenizer_of("special")
    begin, end = (tokenizer.convert_tokens_to_ids(one) for one in ("<think>", "</think>"))
    spelled = tokenizer("ab").input_ids + [tokenizer.convert_tokens_to_ids(one) for one in "</think>"]
    assert forced(2, tokenizer, "hi", [1, begin, *spelled[:2]]) == [end], "<bos> has no text"
    assert not forced(2, tokenizer, "hi", [1, begin, *spelled, 99])


def test_a_character_is_completed_first() -> None:
    tokenizer = tokenizer_of("special")
    end, bytes_of = tokenizer.convert_tokens_to_ids("</think>"), tokenizer("a😀").input_ids
    assert len(bytes_of) == 5
    for count in range(6):
        found = forced(2, tokenizer, "hi<think>", bytes_of[:count])
        assert found == ([end] if count == 5 else []), count
    broken = tokenizer("aé").input_ids[:2] * 4
    assert [bool(forced(2, tokenizer, "hi<think>", broken[:count])) for count in (3, 4, 5)] == [True, False, True]


def test_a_tokenizer_that_cannot_write_the_mark_is_refused() -> None:
    class Deaf:
        def __call__(self, text: str, **_: Any) -> Any:
            return tiny.tokenizer()("x")

        def decode(self, ids: list[int], **_: Any) -> str:
            return "x" * len(ids)

    with refused("thinking budget"):
        ThinkingBudget(1, Deaf())
