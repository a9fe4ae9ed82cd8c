"""A grammar's masks depend on the context alone, however it was come by."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import ByT5Tokenizer

from foresay.errors import ConfigError
from foresay.text.grammar import ANY_OBJECT, Grammar, JsonMask
from helpers import tiny

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 12, "x"]}, "b": {"type": "boolean"}}, "required": ["a"]}
PROMPT = [5, 6, 7]


def make(tokenizer: object, schema: object = SCHEMA) -> JsonMask:
    return Grammar(schema, tokenizer, len(tokenizer), [0]).mask_after(len(PROMPT))  # type: ignore[arg-type]


def mask(processor: JsonMask, written: list[int]) -> list[bool]:
    scores = torch.zeros(1, processor._vocab_size)
    out = processor(torch.tensor([PROMPT + written]), scores)
    assert not scores.any(), "what it was given is left alone"
    return torch.isfinite(out[0]).tolist()


def test_masks_after_guesses_that_were_taken_back_are_those_of_a_fresh_one() -> None:
    tokenizer, chance = tiny.tokenizer(), random.Random(0)
    schema = {**SCHEMA, "additionalProperties": False}
    grammar, one = Grammar(schema, tokenizer, len(tokenizer), [0]), make(tokenizer, schema)
    lengths = set()
    for _ in range(6):
        written: list[int] = []
        while not written or written[-1] != 0:
            allowed = [i for i, good in enumerate(mask(one, written)) if good]
            assert mask(grammar.mask_after(len(PROMPT)), written) == mask(one, written)
            wrong = next(i for i in range(4, 250) if i not in allowed)
            for draft_tokens in ([chance.choice(allowed), chance.choice(allowed)], [wrong], [wrong, wrong]):
                seen = mask(one, written + draft_tokens)  # as a pass over draft tokens does
                assert all(seen) or draft_tokens[0] != wrong
            written.append(0 if 0 in allowed else chance.choice(allowed))
        text = tokenizer.decode(written[:-1])
        assert text.strip().startswith("{") and text.strip().endswith("}")
        lengths.add(len(written))
    assert len(lengths) > 1


def test_behind_tokens_that_break_it_nothing_is_changed() -> None:
    tokenizer = tiny.tokenizer()
    one = make(tokenizer)
    wrong = tokenizer("hello").input_ids
    assert all(mask(one, wrong)) and not all(mask(one, []))


def test_an_end_is_allowed_where_it_may_end() -> None:
    tokenizer = tiny.tokenizer()
    for text, ends in (("", False), ('{"a":', False), ('{"a":1', False), ('{"a":1}', True), ('{"a":12}', True)):
        assert mask(make(tokenizer), tokenizer(text).input_ids)[0] == ends, text
    anything = tokenizer('{"q": [1, {"z": null}]}').input_ids
    assert mask(make(tokenizer, ANY_OBJECT), anything)[0]
    assert all(mask(make(tokenizer), anything)), "which the other schema does not take"


def test_scores_wider_than_the_vocabulary() -> None:
    tokenizer = tiny.tokenizer()
    wide = Grammar(SCHEMA, tokenizer, len(tokenizer) + 60, [0]).mask_after(len(PROMPT))
    found = mask(wide, [])
    assert found[: len(tokenizer)] == mask(make(tokenizer), []) and not any(found[len(tokenizer) :])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nothing"}, "not supported"),
        ({"enum": ["x" * 70_000]}, "bytes"),
        ({"$ref": "#/nowhere"}, "not supported"),
        ({"$ref": "#"}, "the schema matches no text"),
        ({"type": "integer", "multipleOf": 9999991}, "multipleOf=9999991 .* at most 10000"),
        ({"properties": {"a": {"items": [{"multipleOf": 100.01}]}}}, r"properties\.a\.items\.0\.multipleOf=100\.01 "),
    ],
)
def test_what_is_refused(schema: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tiny.tokenizer(), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 10_000},
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 2_500_000},
        {"properties": {"multipleOf": {"type": "integer"}}},
        {"const": {"multipleOf": 9999991}},
    ],
)
def test_multiples_with_few_remainders_and_what_only_has_the_name_are_taken(schema: object) -> None:
    make(tiny.tokenizer(), schema)


def test_a_tokenizer_without_a_fast_version_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\(ByT5Tokenizer\) cannot be used for structured output"):
        make(ByT5Tokenizer())


def test_forced_tokens_are_what_only_may_come() -> None:
    tokenizer = tiny.tokenizer()
    schema = {
        "type": "object",
        "properties": {"hello": {"enum": ["hello", "hell"]}},
        "required": ["hello"],
        "additionalProperties": False,
    }
    one, written, forced = make(tokenizer, schema), list[int](), 0
    while not written or written[-1] != 0:
        found = one.forced_tokens(written)
        assert make(tokenizer, schema).forced_tokens(written) == found, "however it was come by"
        allowed = [i for i, good in enumerate(mask(one, written)) if good]
        assert not found or found[0] in allowed
        forced += len(found) > 1
        wrong = next(i for i in range(4, 250) if i not in allowed)
        assert one.forced_tokens([*written, wrong]) is None
        assert found is not None
        written += found or [allowed[-1]]
        assert len(written) < 200
    assert forced > 0 and '"hello"' in tokenizer.decode(written)
