"""A grammar's masks depend on the context alone, however it was come by."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from foresay.decoding.passes import Logits, ModelInput, ModelOutput
from foresay.decoding.protocols import KVCache
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.table import TableModel
from foresay.text import grammar
from foresay.text.grammar import ANY_OBJECT, BURST_S, SHARE, Grammar, JsonMask, MaskTime
from helpers import tiny
from helpers.refusals import refused
from helpers.support import Always, run

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 12, "x"]}, "b": {"type": "boolean"}}, "required": ["a"]}
PROMPT = [5, 6, 7]


def make(tokenizer: object, schema: object = SCHEMA) -> JsonMask:
    return Grammar(schema, tokenizer, len(tokenizer), [0]).mask_after(len(PROMPT))  # type: ignore[arg-type]


def mask(processor: JsonMask, written: list[int]) -> list[bool]:
    scores = torch.zeros(1, processor._vocab_size)
    out = processor(torch.tensor([PROMPT + written]), scores)
    assert not scores.any(), "what it was given is left alone"
    return torch.isfinite(out[0]).tolist()


def test_an_end_is_allowed_where_it_may_end() -> None:
    tokenizer = tiny.tokenizer()
    for text, ends in (("", False), ('{"a":', False), ('{"a":1', False), ('{"a":1}', True), ('{"a":12}', True)):
        assert mask(make(tokenizer), tokenizer(text).input_ids)[0] == ends, text
    anything = tokenizer('{"q": [1, {"z": null}]}').input_ids
    assert mask(make(tokenizer, ANY_OBJECT), anything)[0]
    assert all(mask(make(tokenizer), anything)), "which the other schema does not take: nothing is changed"
    wide = mask(Grammar(SCHEMA, tokenizer, len(tokenizer) + 60, [0]).mask_after(len(PROMPT)), [])
    assert wide == [*mask(make(tokenizer), []), *[False] * 60], "scores wider than the vocabulary"


def test_schemas_that_are_refused() -> None:
    cases: list[tuple[object, str, Any]] = [
        ({"type": "nothing"}, "schema", None),
        ({"enum": ["x" * 70_000]}, "schema", None),
        ({"$ref": "#/nowhere"}, "schema", None),
        ({"$ref": "#"}, "schema", None),
        ({"type": "integer", "multipleOf": 9999991}, "schema multipleOf", 9999991),
        ({"properties": {"a": {"items": [{"multipleOf": 100.01}]}}}, "schema properties.a.items.0.multipleOf", 100.01),
    ]
    for schema, param, value in cases:
        with refused(param, value):
            make(tiny.tokenizer(), schema)
    with refused("tokenizer", "ByT5Tokenizer"):
        make(ByT5Tokenizer())
    for number in (10_000, 0.01, 2_500_000):  # few remainders, or powers of ten
        make(tiny.tokenizer(), {"type": "number", "multipleOf": number})
    for schema in ({"properties": {"multipleOf": {"type": "integer"}}}, {"const": {"multipleOf": 9999991}}):
        make(tiny.tokenizer(), schema)


class Matcher:
    """Permits every token of 8, after some seconds of a clock."""

    def __init__(self, seconds: float = 0.0, begun: Callable[[], object] = lambda: None) -> None:
        self.now, self._seconds, self._begun = 0.0, seconds, begun

    def compute_bitmask(self) -> bytes:
        self.now += self._seconds
        self._begun()
        return b"\xff"

    def compute_ff_tokens(self) -> list[int]:
        self.now += self._seconds
        return []

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def rollback(self, count: int) -> None:
        pass

    def is_error(self) -> bool:
        return False


def masks_of(matcher: Matcher, count: int) -> list[JsonMask]:
    """Masks of the outputs of one request, by the matcher's clock."""
    time = MaskTime(lambda: matcher.now, lambda: matcher.now)
    return [JsonMask(matcher, 8, 0, "", time) for _ in range(count)]


@pytest.mark.parametrize("outputs", [1, 4])
def test_others_wait_for_the_masks_of_a_request_only_so_long(outputs: int) -> None:
    """With the control that masks which take a fifth of the time are computed for ever."""
    matcher = Matcher(0.3)
    masks = masks_of(matcher, outputs)

    def follow() -> None:
        for i in range(40):
            mask(masks[i % outputs], [1] * i)

    with refused("schema or grammar"):
        follow()
    assert BURST_S <= matcher.now <= BURST_S + 2 * 0.3
    assert masks[-1].forced_tokens([1]) is None, "nor does a drafter wait for it"
    matcher.now += 10.0
    mask(masks[0], [2])
    assert [masks[0].forced_tokens([2]) is None for _ in range(4)] == [False, False, True, True], (
        "masks have the rest of the time"
    )
    mask(masks[0], [3])
    slow = Matcher(0.25 * SHARE)
    (one,) = masks_of(slow, 1)
    for i in range(200):
        mask(one, [1] * i)
        slow.now += 0.25


def test_a_request_is_not_charged_for_the_work_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks wait for threads that others have taken, for longer than it may keep others waiting."""
    monkeypatch.setattr(grammar, "BURST_S", 0.05)
    go_on = threading.Event()
    for _ in range(os.cpu_count() or 1):
        JsonMask(Matcher(begun=lambda: bool(go_on.wait(60))), 8, 0, "").begin([1], [])
    one = JsonMask(Matcher(), 8, 0, "")
    one.begin([*PROMPT, 1], [2])
    threading.Timer(0.3, go_on.set).start()
    assert all(mask(one, [1])) and all(mask(one, [1, 2]))


def test_masks_are_computed_next_to_the_pass() -> None:
    """The masks after the last token and after each draft token; the pass ends once the last of them is begun."""
    begun = list[int]()
    every = threading.Event()

    def begin() -> None:
        begun.append(1)
        if len(begun) == 4:
            every.set()

    class Target(TableModel):
        def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
            assert model_input.logits is Logits.NONE or every.wait(60)
            return super().forward(model_input, cache)

    target = Target.random(8, seed=1)
    (one,) = masks_of(Matcher(begun=begin), 1)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, seed=1, processors=(one,))
    run(target, [[1, 2, 3]], [params], drafter=Always([[1] * 8]), gamma=3)
    assert every.is_set()
