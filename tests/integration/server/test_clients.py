"""Requests as other programs form them: fields that change nothing, prompts that are scored, and plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import foresay
from helpers import tiny
from helpers.serving import TALK, TEXT, Running, events_of, sent

PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm, completions": (
        "/v1/completions",
        {"model": "tiny", "prompt": TEXT, "stream": True, "max_tokens": 4, "stop": None, "ignore_eos": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "guidellm, chat": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": PARTS, "stream": True, "max_completion_tokens": 4, "stop": None, "ignore_eos": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "vLLM's benchmark, completions": (
        "/v1/completions",
        {"model": "tiny", "prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": True,
         "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True, "best_of": 1, "top_k": -1,
         "use_beam_search": False, "min_p": None},
    ),
    "vLLM's benchmark, chat": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": PARTS, "max_completion_tokens": 4, "stream": True,
         "stream_options": {"include_usage": True}},
    ),
    "lm-evaluation-harness, loglikelihood": (
        "/v1/completions",
        {"model": "tiny", "prompt": [[72, 73, 74], [80, 81]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
         "echo": True},
    ),
    "lm-evaluation-harness, generation": (
        "/v1/completions",
        {"model": "tiny", "prompt": [[72, 73, 74]], "max_tokens": 4, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    ),
    "lm-evaluation-harness, chat": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hello", "type": "text"}], "max_tokens": 4,
         "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    ),
    "an SDK that sends nulls": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [*TALK, {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None,
         "audio": None, "function_call": None, "reasoning_content": None, "annotations": []}, TALK[1]],
         "max_tokens": 4, "tools": None, "tool_choice": None, "functions": None, "function_call": None, "logit_bias": None,
         "response_format": None, "seed": None, "metadata": None, "store": None, "service_tier": None, "modalities": None,
         "prediction": None, "audio": None, "reasoning_effort": None, "web_search_options": None, "stream_options": None,
         "parallel_tool_calls": None, "logprobs": None, "top_logprobs": None, "user": None, "n": None, "whatever": None},
    ),
    "an SDK that sends the defaults": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": TALK, "max_tokens": 4, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
         "store": False, "service_tier": "auto", "n": 1, "temperature": 1, "top_p": 1, "presence_penalty": 0,
         "frequency_penalty": 0, "logit_bias": {}, "stop": [], "logprobs": False, "top_logprobs": 0, "user": "me",
         "metadata": {"run": "7"}, "response_format": {"type": "text"}, "modalities": ["text"], "stream": False,
         "stream_options": {"include_usage": False}},
    ),
    "legacy completions": (
        "/v1/completions",
        {"model": "tiny", "prompt": TEXT, "max_tokens": 4, "suffix": None, "echo": False, "best_of": 1, "logprobs": None,
         "n": 1, "stop": None, "logit_bias": {}},
    ),
}  # fmt: skip
"""Bodies as these programs send them."""


@pytest.fixture(scope="module")
def model(chat_folder: Path) -> foresay.Generator:
    return foresay.load(str(chat_folder), num_draft_tokens=3, dtype="fp32")


@pytest.fixture(scope="module")
def server(model: foresay.Generator) -> Iterator[Running]:
    with Running(model) as running:
        yield running


class TestFieldsThatChangeNothing:
    @pytest.mark.parametrize("name", RECORDED)
    def test_recorded_bodies_are_answered(self, name: str, raw: httpx.Client) -> None:
        path, body = RECORDED[name]
        answer = raw.post(path, json=body)
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            told = events_of(answer)
            assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 4

    def test_the_answer_is_the_one_without_them(self, raw: httpx.Client) -> None:
        _, body = RECORDED["an SDK that sends the defaults"]
        plain = {"model": "tiny", "messages": TALK, "max_tokens": 4, "seed": 3}
        texts = [
            raw.post("/v1/chat/completions", json=one).json()["choices"][0]["message"]["content"]
            for one in ({**body, "seed": 3}, plain)
        ]
        assert texts[0] == texts[1]

    def test_usage_in_every_event(self, raw: httpx.Client) -> None:
        path, body = RECORDED["guidellm, completions"]
        counts = [one["usage"]["completion_tokens"] for one in events_of(raw.post(path, json=body))]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4
        only_last = {**body, "stream_options": {"include_usage": True}}
        assert [one["usage"] is None for one in events_of(raw.post(path, json=only_last))][-2:] == [True, False]

    def test_a_fingerprint_names_the_configuration(self, raw: httpx.Client, client: openai.OpenAI) -> None:
        done = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=2)
        assert done.system_fingerprint is not None and done.system_fingerprint.startswith("fp_")
        streamed = raw.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 2, "stream": True})
        assert {one["system_fingerprint"] for one in events_of(streamed)} == {done.system_fingerprint}


class TestRanges:
    @pytest.mark.parametrize("most", [999_999, 10**30])
    def test_more_tokens_than_the_context_holds_are_cut(self, most: int, tmp_path: Any) -> None:
        with Running(foresay.load(str(tiny.save(tmp_path, tiny.llama(context=96), chat=True)))) as running:
            body = {"prompt": TEXT, "max_tokens": most, "temperature": 0}
            done = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
            assert done["choices"][0]["finish_reason"] == "length" and done["usage"]["total_tokens"] == 96


class TestEcho:
    def reference(self, model: foresay.Generator, ids: list[int]) -> list[float]:
        """Log-probabilities of the tokens after the first, by one pass of transformers' own model."""
        import torch
        from transformers import AutoModelForCausalLM

        folder = model.target.name
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            scores = own(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    @pytest.mark.parametrize("most", [0, 1])
    def test_a_batch_of_token_ids_as_a_harness_scores_it(
        self, most: int, raw: httpx.Client, model: foresay.Generator
    ) -> None:
        tokenizer: Any = model.tokenizer
        prompts = [tokenizer(text).input_ids for text in (TEXT, "hello " * 60, "z")]
        body = {"prompt": prompts, "temperature": 0, "max_tokens": most, "logprobs": 1, "seed": 1234, "echo": True}
        answer = raw.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == most * len(prompts)
        for choice, ids in zip(answer["choices"], prompts, strict=True):
            found = choice["logprobs"]
            assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(ids) + most
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert found["token_logprobs"][1 : len(ids)] == pytest.approx(self.reference(model, ids), abs=1e-4)
            assert choice["text"].startswith(tokenizer.decode(ids)) and choice["finish_reason"] == "length"
            assert "".join(found["tokens"]) == choice["text"]
            assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
            for name, own, top in zip(
                *(found[key][1:] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
            ):
                assert top[name] == own and own <= max(top.values()) and len(top) <= 2
            if most:  # what is generated greedily is the most likely token
                assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())

    def test_a_text_and_a_stream(self, raw: httpx.Client, client: openai.OpenAI, model: foresay.Generator) -> None:
        wanted = TEXT + model.generate(TEXT, max_new_tokens=8).text
        done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, temperature=0, echo=True)
        assert done.choices[0].text == wanted and done.choices[0].logprobs is None
        body = {"prompt": [TEXT, TEXT], "max_tokens": 8, "temperature": 0, "echo": True, "stream": True, "logprobs": 0}
        told = [one["choices"][0] for one in events_of(raw.post("/v1/completions", json=body))]
        for index in (0, 1):
            mine = [one for one in told if one["index"] == index]
            assert "".join(one["text"] for one in mine) == wanted and mine[-1]["finish_reason"] == "length"
            offsets = [place for one in mine for place in one["logprobs"]["text_offset"]]
            assert offsets == sorted(offsets) and offsets[-1] < len(wanted) and len(set(offsets)) == len(offsets)
        only = events_of(raw.post("/v1/completions", json={**body, "prompt": TEXT, "max_tokens": 0}))
        assert [one["choices"][0]["text"] for one in only] == [TEXT]
        assert only[0]["choices"][0]["finish_reason"] == "length"


class TestHttp:
    @pytest.mark.parametrize(
        "path", ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/metrics", "/", "/page.js"]
    )
    def test_head(self, path: str, raw: httpx.Client) -> None:
        got, head = raw.get(path), raw.head(path)
        assert head.status_code == got.status_code and head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]

    def test_methods_that_a_route_does_not_take(self, raw: httpx.Client) -> None:
        for method, path, allowed in (
            ("GET", "/v1/completions", {"POST"}), ("HEAD", "/v1/completions", {"POST"}), ("PUT", "/tokenize", {"POST"}),
            ("POST", "/health", {"GET", "HEAD"}), ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
        ):  # fmt: skip
            answer = raw.request(method, path)
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == allowed, (method, path)

    @pytest.mark.parametrize("sender", [{}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}])
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
    def test_a_wrong_content_type_is_named(self, kind: str | None, sender: dict[str, str], raw: httpx.Client) -> None:
        """Programs may leave it out, as curl and litellm do; pages of browsers, which name themselves, may not."""
        headers = sender if kind is None else {"content-type": kind, **sender}
        answer = raw.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        if not sender and kind in (None, "application/x-www-form-urlencoded"):
            assert answer.status_code == 200 and answer.json()["choices"], answer.text
            return
        error = answer.json()["error"]
        assert answer.status_code == 415 and error["param"] == "content-type" and "application/json" in error["message"]
        assert (kind or "no content type") in error["message"]
        for good in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
            sent = raw.post("/tokenize", content=b'{"prompt": "x"}', headers={"content-type": good})
            assert sent.status_code == 200, good

    @pytest.mark.parametrize("stream", [False, True])
    def test_http_1_0_knows_no_chunks(self, stream: bool, server: Running) -> None:
        body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "stream": stream}
        with sent(server.port, body, http="1.0") as held:
            answer = b"".join(iter(lambda: held.recv(1 << 16), b""))
        headers, _, rest = answer.partition(b"\r\n\r\n")
        assert b" 200 " in headers.split(b"\r\n")[0] and b"transfer-encoding" not in headers.lower()
        if stream:
            assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(rest)["choices"][0]["finish_reason"] == "length"

    def test_a_key_in_either_header(self, model: foresay.Generator) -> None:
        with Running(model, keys=frozenset({"secret", "schlüssel"})) as running:
            for headers, status in (
                ({b"Authorization": b"Bearer " + "schlüssel".encode()}, 200),
                ({b"Authorization": b"Bearer " + "schlüssel".encode("latin-1")}, 401),
                ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "wrong"}, 401),
                ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401), ({}, 401), ({"x-api-key": ""}, 401),
            ):  # fmt: skip
                answer = httpx.get(f"{running.url}/v1/models", headers=headers)  # type: ignore[arg-type]
                assert answer.status_code == status, headers
                assert status == 200 or answer.headers["www-authenticate"] == "Bearer"
                if status == 401:
                    named = any(headers.values()) and "is not one of" in answer.json()["error"]["message"]
                    assert named or "is required" in answer.json()["error"]["message"], headers
                    assert named == any(headers.values())
            for path in ("/health", "/ready"):
                assert httpx.get(running.url + path).status_code == 200, "no key is needed"
