"""Defaults of requests: the model's generation config if the generator was loaded for it, and fields of the request first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from helpers import tiny
from helpers.serving import TALK, TEXT, Running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.llama(context=160)
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=20, repetition_penalty=1.4, min_new_tokens=3)
    model.generation_config.max_new_tokens = 9
    return tiny.save(tmp_path_factory.mktemp("model"), model, chat=True)


@pytest.fixture(scope="module", params=["model", "foresay"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Running, foresay.Generator]]:
    generator = foresay.load(folder, dtype="fp32", sampling=request.param)
    running = Running(generator)
    yield running, generator
    running.close()


def _text(running: Running, **fields: Any) -> str:
    chat = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": TALK, **fields}, timeout=60)
    assert chat.status_code == 200, chat.text
    return str(chat.json()["choices"][0]["message"]["content"])


def test_defaults_of_a_chat(served: tuple[Running, foresay.Generator]) -> None:
    running, generator = served
    is_model = generator.target.generation.sampling == "model"
    wanted = {"temperature": 3.0, "top_k": 20} if is_model else {"temperature": 1.0}
    expected = generator.generate(TALK, seed=4, max_new_tokens=9, **wanted).text
    assert _text(running, seed=4, max_tokens=9) == expected
    whole = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": TALK, "ignore_eos": True}, timeout=60)
    assert (whole.json()["usage"]["completion_tokens"] == 9) is is_model
    completion = httpx.post(f"{running.url}/v1/completions", json={"prompt": TEXT, "ignore_eos": True}, timeout=60)
    assert completion.json()["usage"]["completion_tokens"] == 16


def test_fields_of_the_request_come_first(served: tuple[Running, foresay.Generator]) -> None:
    running, generator = served
    own = {"temperature": 0.0, "repetition_penalty": 1.0}
    plain = generator.generate(TALK, max_new_tokens=12, min_new_tokens=0, **own).text
    assert _text(running, max_tokens=12, min_tokens=0, **own) == plain
    assert _text(running, max_tokens=12, min_tokens=0, temperature=0, repeat_penalty=1.0) == plain, (
        "as llama.cpp has it"
    )
    differs = running.chat(**own, repeat_penalty=1.1).json()["error"]
    assert differs["param"] == "repeat_penalty" and "differ" in differs["message"]
    constrained = generator.generate(TALK, max_new_tokens=12, temperature=0.0).text
    assert _text(running, max_tokens=12, temperature=0) == constrained != plain
    sampled = generator.generate(TALK, max_new_tokens=12, temperature=0.7, top_k=0, seed=3).text
    for off in (0, -1):
        assert _text(running, max_tokens=12, temperature=0.7, top_k=off, seed=3) == sampled


@pytest.mark.parametrize(("name", "off"), [("typical_p", 1), ("no_repeat_ngram_size", 0)])
def test_what_a_request_cannot_turn_off_is_named(name: str, off: int, tmp_path: Path) -> None:
    model = tiny.llama(context=160)
    model.generation_config.update(do_sample=True, **{name: 0.5 if off else 2})
    folder = tiny.save(tmp_path, model, chat=True)
    for sampling, applied in (("model", True), ("foresay", name == "no_repeat_ngram_size")):
        with Running(foresay.load(folder, dtype="fp32", sampling=sampling)) as running:
            answers = [
                httpx.post(
                    f"{running.url}/v1/completions", json={"prompt": TEXT, "max_tokens": 2, name: value}, timeout=60
                )
                for value in (off, off + 2)
            ]
        assert [one.status_code for one in answers] == [400 if applied else 200, 400]
        assert all(one.json()["error"]["param"] == name for one in answers if one.status_code == 400)
        assert not applied or "cannot turn off" in answers[0].text


def test_predict_is_greedy(served: tuple[Running, foresay.Generator]) -> None:
    running, generator = served
    wanted = generator.generate(TEXT, max_new_tokens=12, temperature=0.0).text
    for _ in range(2):
        answer = httpx.post(f"{running.url}/predict", json={"prompt": TEXT, "max_tokens": 12}, timeout=60).json()
        assert answer["text"] == wanted


def test_a_response_reports_what_was_used(served: tuple[Running, foresay.Generator]) -> None:
    running, generator = served
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 4}
    reported = httpx.post(f"{running.url}/v1/responses", json=body, timeout=60).json()
    assert reported["temperature"] == (3.0 if generator.target.generation.sampling == "model" else 1.0)
    reported = httpx.post(f"{running.url}/v1/responses", json={**body, "temperature": 0.5}, timeout=60).json()
    assert reported["temperature"] == 0.5


def test_a_schema_ends_where_it_ends(served: tuple[Running, foresay.Generator]) -> None:
    """The config's least number of tokens does not forbid the end of a short value."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    assert _text(served[0], response_format=schema, temperature=0) == "7"
