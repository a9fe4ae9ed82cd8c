"""Requests as other programs form them: coding agents, fields that change nothing, prompts that are scored, and plain HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import agents, tiny
from helpers.serving import TALK, TEXT, Running, assert_refused, choice_of, events_of, named_events, sent
from helpers.tool_chats import WEATHER

PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
INPUT = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello there"}]}]
WEATHER_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}
RECORDED: dict[str, dict[str, Any]] = {
    "guidellm, completions": {
        "prompt": TEXT, "stream": True, "max_tokens": 4, "stop": None, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "guidellm, chat": {
        "messages": PARTS, "stream": True, "max_completion_tokens": 4, "stop": None, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "vLLM's benchmark, completions": {
        "prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True, "best_of": 1, "top_k": -1,
        "use_beam_search": False, "min_p": None},
    "lm-evaluation-harness, loglikelihood": {
        "prompt": [[72, 73, 74], [80, 81]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True},
    "lm-evaluation-harness, chat": {
        "messages": [{"role": "user", "content": "hello", "type": "text"}], "max_tokens": 4,
        "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    "an SDK that sends nulls": {
        "messages": [*TALK, {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None,
        "audio": None, "function_call": None, "reasoning_content": None, "annotations": []}, TALK[1]],
        "max_tokens": 4, "tools": None, "tool_choice": None, "functions": None, "function_call": None, "logit_bias": None,
        "response_format": None, "seed": None, "metadata": None, "store": None, "service_tier": None, "modalities": None,
        "prediction": None, "audio": None, "reasoning_effort": None, "web_search_options": None, "stream_options": None,
        "parallel_tool_calls": None, "logprobs": None, "top_logprobs": None, "user": None, "n": None, "whatever": None},
    "an SDK that sends the defaults": {
        "messages": TALK, "max_tokens": 4, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "store": False, "service_tier": "auto", "n": 1, "temperature": 1, "top_p": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "logit_bias": {}, "stop": [], "logprobs": False, "top_logprobs": 0, "user": "me",
        "metadata": {"run": "7"}, "response_format": {"type": "text"}, "modalities": ["text"], "stream": False,
        "stream_options": {"include_usage": False}},
    "Open WebUI, a chat": {
        "messages": TALK, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7, "top_p": 0.9,
        "top_k": 40, "min_p": 0.0, "seed": 7, "stop": ["</s>"], "max_tokens": 4, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "logit_bias": {"5": -50}},
    "Open WebUI, the result of a native tool": {
        "messages": [*TALK, {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]},
                     {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}],
        "tools": [WEATHER], "stream": False, "max_tokens": 4},
    "Open WebUI, a connection of the type responses": {
        "input": [*INPUT, {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
                      {"type": "output_text", "text": "blue", "annotations": [], "logprobs": []}]}, *INPUT,
                  {"type": "function_call", "call_id": "call_1", **WEATHER_CALL["function"]},
                  {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
                  {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "x"}]}],
        "instructions": "Be brief.", "tools": [{"type": "function", **WEATHER["function"], "strict": False}],
        "stream": False, "max_output_tokens": 4},
    "legacy completions": {
        "prompt": TEXT, "max_tokens": 4, "suffix": None, "echo": False, "best_of": 1, "logprobs": None,
        "n": 1, "stop": None, "logit_bias": {}},
}  # fmt: skip
"""Bodies as these programs send them, each with the name of the model."""


def answered(running: Running, body: dict[str, Any]) -> httpx.Response:
    routes = {"messages": "chat/completions", "prompt": "completions", "input": "responses"}
    (route,) = [routes[name] for name in routes if name in body]
    answer = running.post(f"/v1/{route}", model="tiny", **body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bodies_are_answered(name: str, server: Running) -> None:
    answer = answered(server, RECORDED[name])
    if RECORDED[name].get("stream"):
        last = events_of(answer)[-1]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


def test_the_answer_is_the_one_without_them(server: Running) -> None:
    bodies = RECORDED["an SDK that sends the defaults"], {"messages": TALK, "max_tokens": 4}
    texts = [choice_of(answered(server, {**one, "seed": 3}))["message"]["content"] for one in bodies]
    assert texts[0] == texts[1]


def test_usage_in_every_event(server: Running) -> None:
    body = RECORDED["guidellm, completions"]
    counts = [one["usage"]["completion_tokens"] for one in events_of(answered(server, body))]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4
    only_last = {**body, "stream_options": {"include_usage": True}}
    assert [one["usage"] is None for one in events_of(answered(server, only_last))][-2:] == [True, False]


def test_a_fingerprint_names_the_configuration(server: Running) -> None:
    name = server.chat(max_tokens=2).json()["system_fingerprint"]
    assert name.startswith("fp_")
    assert {one["system_fingerprint"] for one in events_of(server.complete(max_tokens=2, stream=True))} == {name}


CALLS = [("weather", {"city": "Rome"}), ("time", {})]
"""Calls of the model of the tests."""


def ignored_by(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return set(filter(None, answer.headers.get("x-foresay-ignored", "").split(", ")))


def test_claude_code(chain: Running) -> None:
    """Blocks, schemas and beta headers; what no model here can do is named."""
    answer = chain.post("/v1/messages?beta=true", headers=agents.CLAUDE_HEADERS, **agents.CLAUDE)
    assert ignored_by(answer) == {"context_management", "output_config.effort"}
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    kinds = [one["content_block"]["type"] for one in events if one["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and events[-2]["delta"]["stop_reason"] == "tool_use"
    counted = {name: agents.CLAUDE[name] for name in ("model", "messages", "system", "tools", "thinking")}
    path, usage = "/v1/messages/count_tokens?beta=true", events[0]["message"]["usage"]
    count = chain.answer(path, headers=agents.CLAUDE_HEADERS, **counted)["input_tokens"]
    assert count == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) > 500


def test_codex(chain: Running, server: Running) -> None:
    """The items of a conversation, and those of the answer as the next request sends them back."""
    events = named_events(f"{chain.url}/v1/responses", agents.CODEX)
    assert events[-1]["type"] == "response.completed"
    output = events[-1]["response"]["output"]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == output and [one["type"] for one in output] == ["reasoning", "message", *["function_call"] * 2]
    assert [(one["name"], json.loads(one["arguments"])) for one in output[2:]] == CALLS
    assert {"input_tokens", "output_tokens", "total_tokens"} <= events[-1]["response"]["usage"].keys()
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "ok"} for one in output[2:]]
    whole = {**agents.CODEX, "stream": False}
    again = chain.post("/v1/responses", **whole | {"input": [*agents.CODEX["input"], *output, *results]})
    assert ignored_by(again) == {"reasoning.effort", "text.verbosity", "client_metadata"}
    plain = chain.post("/v1/responses", **whole)
    assert again.json()["usage"]["input_tokens"] > plain.json()["usage"]["input_tokens"]
    items = [{**one, "encrypted_content": "gAAAA"} if one["type"] == "reasoning" else one for one in whole["input"]]
    hidden = chain.post("/v1/responses", **whole | {"input": items})
    assert ignored_by(hidden) == ignored_by(plain) | {"input.reasoning.encrypted_content"}, "of another server"
    assert hidden.json()["usage"]["input_tokens"] == plain.json()["usage"]["input_tokens"]
    form = {"type": "json_schema", "strict": True, "name": "codex_output_schema", "schema": {"enum": ["rain", "sun"]}}
    shaped = server.answer("/v1/responses", **whole | {"tools": [], "text": {"format": form}})
    assert json.loads(shaped["output"][0]["content"][0]["text"]) in ("rain", "sun")


def test_codex_searches_nothing_and_is_told_so(chain: Running) -> None:
    whole, tools = {**agents.CODEX, "stream": False}, agents.CODEX["tools"]
    plain = chain.answer("/v1/responses", **whole)["tools"]
    for kind in ("web_search", "web_search_preview"):
        search = {"type": kind, "external_web_access": False, "filters": {"allowed_domains": ["a.example"]}}
        found = chain.post("/v1/responses", **whole | {"tools": [search, *tools]})
        assert f"tools.{kind}" in ignored_by(found)
        assert found.json()["tools"] == plain and len(plain) == len(tools)
        assert_refused(chain.post("/v1/responses", **whole | {"tools": [search, {"type": "local_shell"}]}), "tools.1")


@pytest.mark.parametrize(("name", "wanted"), [("aider", []), ("Cline", ["weather"]), ("Continue", ["weather", "time"])])
def test_clients_of_chat_completions(name: str, wanted: list[str], chain: Running) -> None:
    """Streams with their usage; labels of caching change nothing, the effort is named as ignored."""
    body = agents.CHATS[name]
    answer = chain.chat(**body)
    assert ignored_by(answer) == ({"reasoning_effort"} if name == "Cline" else set())
    events = events_of(answer)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
    deltas = [one["choices"][0]["delta"] for one in events[:-1]]
    functions = [call["function"] for one in deltas for call in one.get("tool_calls", [])]
    assert [one["name"] for one in functions if "name" in one] == wanted
    assert "".join(one.get("reasoning_content") or "" for one in deltas) == "What is asked?"
    plain = json.loads(json.dumps(body).replace(json.dumps(agents.CACHED)[1:-1], '"name": null'))
    assert "cache_control" not in json.dumps(plain)
    assert events_of(chain.chat(**plain))[-1]["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"]


class TestEcho:
    def test_a_batch_of_token_ids_as_a_harness_scores_it(self, server: Running, random_model: Path) -> None:
        """By log-probabilities of one pass of transformers' own model."""
        tokenizer, own = tiny.tokenizer(), AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
        prompts = [tokenizer(text).input_ids for text in (TEXT, "hello " * 60, "z")]
        for most in (0, 1):
            answer = server.complete(prompts, max_tokens=most, logprobs=1, seed=1234, echo=True).json()
            assert answer["usage"]["completion_tokens"] == most * len(prompts)
            for choice, ids in zip(answer["choices"], prompts, strict=True):
                found = choice["logprobs"]
                names, scores, tops = (found[key] for key in ("tokens", "token_logprobs", "top_logprobs"))
                assert len(names) == len(scores) == len(tops) == len(ids) + most
                assert scores[0] is None and tops[0] is None
                with torch.inference_mode():
                    wanted = own(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
                wanted = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
                assert scores[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
                assert choice["text"].startswith(tokenizer.decode(ids)) and choice["finish_reason"] == "length"
                assert "".join(names) == choice["text"]
                assert found["text_offset"] == [sum(map(len, names[:i])) for i in range(len(names))]
                for name, score, top in zip(names[1:], scores[1:], tops[1:], strict=True):
                    assert top[name] == score and score <= max(top.values()) and len(top) <= 2
                if most:  # what is generated greedily is the most likely token
                    assert scores[-1] == max(tops[-1].values())

    def test_a_text_and_a_stream(self, server: Running, client: openai.OpenAI) -> None:
        wanted = TEXT + server.model.generator.generate(TEXT, max_new_tokens=8).text
        done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, temperature=0, echo=True)
        assert done.choices[0].text == wanted and done.choices[0].logprobs is None
        body = {"echo": True, "stream": True, "logprobs": 0}
        told = [one["choices"][0] for one in events_of(server.complete([TEXT, TEXT], max_tokens=8, **body))]
        for index in (0, 1):
            mine = [one for one in told if one["index"] == index]
            assert "".join(one["text"] for one in mine) == wanted and mine[-1]["finish_reason"] == "length"
            offsets = [place for one in mine for place in one["logprobs"]["text_offset"]]
            assert offsets == sorted(offsets) and offsets[-1] < len(wanted) and len(set(offsets)) == len(offsets)
        (only,) = [one["choices"][0] for one in events_of(server.complete(max_tokens=0, **body))]
        assert (only["text"], only["finish_reason"]) == (TEXT, "length")


class TestHttp:
    def test_head(self, server: Running) -> None:
        for path in ("/health", "/ready", "/v1/models", "/v1/models/tiny", "/metrics", "/", "/page.js"):
            got, head = server.get(path), server.request("HEAD", path)
            assert head.status_code == got.status_code and head.content == b"", path
            assert head.headers["content-type"] == got.headers["content-type"], path

    def test_methods_that_a_route_does_not_take(self, server: Running) -> None:
        for method, path, allowed in (
            ("GET", "/v1/completions", {"POST"}), ("HEAD", "/v1/completions", {"POST"}), ("PUT", "/tokenize", {"POST"}),
            ("POST", "/health", {"GET", "HEAD"}), ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
        ):  # fmt: skip
            answer = server.request(method, path)
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == allowed, (method, path)

    @pytest.mark.parametrize("sender", [{}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}], ids=str)
    def test_a_wrong_content_type_is_named(self, sender: dict[str, str], server: Running) -> None:
        """Programs may leave it out, as curl and litellm do; pages of browsers, which name themselves, may not."""

        def answer(kind: str | None) -> httpx.Response:
            headers = sender if kind is None else {"content-type": kind, **sender}
            return server.request("POST", "/tokenize", content=b'{"prompt": "x"}', headers=headers)

        good = ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"]
        bad = ["text/plain", "multipart/form-data"]
        for kind in [*good, *([] if sender else [None, "application/x-www-form-urlencoded"])]:
            assert answer(kind).json()["tokens"], kind
        for kind in [*bad, *([None, "application/x-www-form-urlencoded"] if sender else [])]:
            assert_refused(answer(kind), "content-type", "application/json", kind or "no content type", status=415)

    @pytest.mark.parametrize("stream", [False, True])
    def test_http_1_0_knows_no_chunks(self, stream: bool, server: Running) -> None:
        with sent(server.port, {"prompt": TEXT, "max_tokens": 8, "stream": stream}, http="1.0") as held:
            answer = b"".join(iter(lambda: held.recv(1 << 16), b""))
        headers, _, rest = answer.partition(b"\r\n\r\n")
        assert b" 200 " in headers.split(b"\r\n")[0] and b"transfer-encoding" not in headers.lower()
        if stream:
            assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(rest)["choices"][0]["finish_reason"] == "length"

    def test_a_key_in_either_header(self, serve: Any) -> None:
        running, umlaut = serve(keys=frozenset({"secret", "schlüssel"})), "Bearer schlüssel"
        for headers, status in (
            ({b"Authorization": umlaut.encode()}, 200), ({b"Authorization": umlaut.encode("latin-1")}, 401),
            ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401), ({}, 401), ({"x-api-key": ""}, 401),
        ):  # fmt: skip
            answer = running.request("GET", "/v1/models", headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                said = "is not one of" if any(headers.values()) else "is required"
                assert said in answer.json()["error"]["message"], headers
        for path in ("/health", "/ready"):
            assert running.get(path).status_code == 200, "no key is needed"
