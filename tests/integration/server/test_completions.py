"""Completions: gaps between two texts, and prompts of several kinds in one list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest

import foresay
from helpers import tiny
from helpers.serving import TEXT, Running


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny.save_filling(tmp_path_factory.mktemp("filling"))
    with Running(foresay.load(str(folder))) as running:
        yield running


def test_a_gap_is_filled(filling: Running) -> None:
    def complete(**body: Any) -> httpx.Response:
        return httpx.post(f"{filling.url}/v1/completions", json={"max_tokens": 8, "temperature": 0, **body}, timeout=60)

    ids = [filling.post("/tokenize", prompt=text).json()["tokens"] for text in ("hello", " you")]
    base = len(tiny.tokenizer())
    given = complete(prompt=[base, *ids[0], base + 1, *ids[1], base + 2]).json()["choices"][0]["text"]
    done = complete(prompt=["hello", "hello"], suffix=" you").json()
    assert [one["text"] for one in done["choices"]] == [given, given]
    assert complete(prompt="hello", suffix="").json()["choices"] == complete(prompt="hello").json()["choices"]
    for wrong in ({"prompt": ids[0], "suffix": "x"}, {"prompt": "x", "suffix": "x", "echo": True}):
        answer = complete(**wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"


def test_texts_and_token_ids_in_one_list(filling: Running) -> None:
    ids = filling.post("/tokenize", prompt="hello").json()["tokens"]
    body = {"prompt": ["hello", ids], "max_tokens": 6, "temperature": 0}
    done = filling.post("/v1/completions", **body).json()
    assert done["choices"][0]["text"] == done["choices"][1]["text"]
    refused = httpx.post(f"{filling.url}/v1/completions", json={**body, "prompt": ["hello", 5]}, timeout=60)
    assert refused.status_code == 400


def complete(running: Running, **body: Any) -> Any:
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()


class TestBestOf:
    BODY: ClassVar[dict[str, Any]] = {"prompt": [TEXT, "and 7"], "max_tokens": 6, "temperature": 1.0, "seed": 5}

    def test_the_most_probable_outputs_are_returned(self, server: Running) -> None:
        scored = complete(server, **self.BODY, n=4, logprobs=0)
        every, best = scored["choices"], complete(server, **self.BODY, n=2, best_of=4)
        expected = []
        for group in (every[:4], every[4:]):
            means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["tokens"]) for one in group]
            order = sorted(range(4), key=lambda i: -means[i])
            assert len(set(means)) > 2
            expected += [group[i]["text"] for i in order[:2]]
        assert [one["text"] for one in best["choices"]] == expected
        assert [one["index"] for one in best["choices"]] == [0, 1, 2, 3]
        assert all(one["logprobs"] is None for one in best["choices"])
        assert best["usage"]["completion_tokens"] == sum(len(one["logprobs"]["tokens"]) for one in every)

    def test_the_same_number_may_be_streamed(self, server: Running) -> None:
        answer = httpx.post(
            f"{server.url}/v1/completions", json={**self.BODY, "n": 2, "best_of": 2, "stream": True}, timeout=60
        )
        assert answer.text.endswith("data: [DONE]\n\n")
