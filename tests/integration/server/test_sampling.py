"""Defaults of requests: the model's generation config if the generator was loaded for it, and fields of the request first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foresay
from helpers import tiny
from helpers.serving import TALK, Running, assert_refused, choice_of

CONTEXT = 160


@pytest.fixture(scope="module", params=["model", "foresay"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = tiny.llama(context=CONTEXT)
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=20, repetition_penalty=1.4, min_new_tokens=3)
    model.generation_config.max_new_tokens = 9
    folder = tiny.save(tmp_path_factory.mktemp("model"), model, chat=True)
    with Running(foresay.load(folder, dtype="fp32", sampling=request.param)) as one:
        yield one


def text_of(running: Running, **fields: Any) -> str:
    return str(choice_of(running.chat(messages=TALK, **fields))["message"]["content"])


def test_defaults(running: Running) -> None:
    generator = running.model.generator
    is_model = generator.target.generation.sampling == "model"
    wanted = {"temperature": 3.0, "top_k": 20} if is_model else {"temperature": 1.0}
    expected = generator.generate(TALK, seed=4, max_new_tokens=9, **wanted).text
    assert text_of(running, seed=4, max_tokens=9) == expected
    whole = running.chat(ignore_eos=True).json()["usage"]
    assert whole["completion_tokens" if is_model else "total_tokens"] == (9 if is_model else CONTEXT)
    assert running.complete(temperature=None, ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    predicted = generator.generate("and 7", max_new_tokens=12, temperature=0.0).text
    assert running.answer("/predict", prompt="and 7", max_tokens=12) == {"text": predicted}, "greedy"
    for fields, temperature in (({}, wanted["temperature"]), ({"temperature": 0.5}, 0.5)):
        response = running.answer("/v1/responses", input="hello", max_output_tokens=4, **fields)
        assert response["temperature"] == temperature, "a response reports what was used"


def test_fields_of_the_request_come_first(running: Running) -> None:
    generator, own = running.model.generator, {"temperature": 0.0, "repetition_penalty": 1.0}
    plain = generator.generate(TALK, max_new_tokens=12, min_new_tokens=0, **own).text
    assert text_of(running, max_tokens=12, min_tokens=0, **own) == plain
    assert text_of(running, max_tokens=12, min_tokens=0, temperature=0, repeat_penalty=1.0) == plain, "llama.cpp's name"
    constrained = generator.generate(TALK, max_new_tokens=12, temperature=0.0).text
    assert text_of(running, max_tokens=12, temperature=0) == constrained != plain
    sampled = generator.generate(TALK, max_new_tokens=12, temperature=0.7, top_k=0, seed=3).text
    for off in (0, -1):
        assert text_of(running, max_tokens=12, temperature=0.7, top_k=off, seed=3) == sampled
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    assert text_of(running, response_format=schema, temperature=0) == "7", "the config's minimum forbids no short value"


@pytest.mark.parametrize(("name", "off"), [("typical_p", 1), ("no_repeat_ngram_size", 0)])
def test_what_a_request_cannot_turn_off_is_named(name: str, off: int, tmp_path: Path) -> None:
    model = tiny.llama(context=CONTEXT)
    model.generation_config.update(do_sample=True, **{name: 0.5 if off else 2})
    folder = tiny.save(tmp_path, model, chat=True)
    for sampling, applied in (("model", True), ("foresay", name == "no_repeat_ngram_size")):
        with Running(foresay.load(folder, dtype="fp32", sampling=sampling)) as running:
            turned_off = running.complete(max_tokens=2, **{name: off})
            assert_refused(running.complete(max_tokens=2, **{name: off + 2}), name)
        if applied:
            assert_refused(turned_off, name, "cannot turn off")
        else:
            assert turned_off.status_code == 200, turned_off.text
