"""Requests that are refused: the parameter, and words of the message, by every route that generates."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foresay.server.fields import ANYTHING, Fields
from foresay.server.requests import ChatRequest, CompletionRequest
from helpers.serving import Running, assert_refused
from helpers.tool_chats import TALK, TIME, WEATHER

ORIGINAL: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": TALK, "max_tokens": 2},
    "completions": {"prompt": "hello", "max_tokens": 2},
    "responses": {"input": "hello", "max_output_tokens": 16},
    "messages": {"messages": TALK, "max_tokens": 3},
}
"""Route -> a request that it answers."""
SENT = "messages.0.tool_calls.0.function.arguments"
NAMED = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
PARTS = [{"type": "text", "text": "x"}] * 3000


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def schema(inside: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": inside}}


def nested(depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for _ in range(depth - 1):
        out = {"not": out}
    return out


def turn(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content[0] if len(content) == 1 else list(content), **more}]}


CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
    ({"foresay": {"gama": 3}}, "foresay.gama", "foresay.gama is not supported"),
    ({"temperature": "1"}, "temperature", "temperature='1'"),
    ({"top_p": True}, "top_p", "top_p"),
    ({"temperature": -1}, "temperature", "temperature=-1.0 must be"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be"),
    ({"n": 17}, "n", "n=17 must be 1 to 16"),
    ({"n": 0}, "n", "n=0"),
    ({"user": 7}, "user", "user=7"),
    ({"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"5": -101}}, "logit_bias", "-101"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ({"stop_token_ids": [999_999]}, "stop_token_ids", "999999"),
    ({"temperature": 2.1}, "temperature", "2.1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"presence_penalty": -2.5}, "presence_penalty", "-2.5"),
    ({"frequency_penalty": 3}, "frequency_penalty", "3"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"min_tokens": 5000}, "min_tokens", "5000"),
    ({"best_of": True}, "best_of", "best_of"),
    ({"echo": True}, "echo", "echo"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"use_beam_search": True}, "use_beam_search", "use_beam_search"),
    ({"modalities": ["text", "audio"]}, "modalities", "modalities"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema and type"),
    ({"response_format": schema({"type": "nothing"})}, "response_format", "schema is not supported"),
    ({"response_format": schema(nested(40))}, "response_format", "depth 40"),
    ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens", "cannot be combined"),
    ({"messages": []}, "messages", "messages"),
    (turn("king", "x"), "messages.0.role", "messages.0.role"),
    (turn("assistant", None), "messages.0", "content"),
    (turn("user", "x", tool_calls=[function()]), "messages.0", "assistant"),
    (turn("assistant", "", tool_calls=[function(arguments=7)]), SENT, "string"),
    (turn("user", "x" * 5000), "messages", "the model's context is 4096"),
    ({"foresay": {"drafter": "model(/etc)"}}, "foresay.drafter", "not available"),
    ({"foresay": {"drafter": "max_gram(table='/etc/passwd')"}}, "foresay.drafter", "not available"),
    ({"foresay": {"drafter": "suffix("}}, "foresay.drafter", "suffix("),
    ({"foresay": {"drafter": "suffix(keep=true)"}}, "foresay.drafter", "not available"),
    ({"foresay": {"drafter": "ngram_store(max_contexts=99999999)"}}, "foresay.drafter", "not available"),
    ({"foresay": {"drafter": "[" * 5000}}, "foresay.drafter", "200 characters"),
    ({"foresay": {"length": "acceptance(/etc)"}}, "foresay.length", "not available"),
    ({"foresay": {"rule": "blok"}}, "foresay.rule", "rule='blok' is not available"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    ({"tools": [function(name="a b")]}, "tools.0.function.name", "1 to 64 letters"),
    ({"tools": [function(), function()]}, "tools", "same name"),
    ({"tools": [function()] * 129}, "tools", "at most 128"),
    ({"tools": [function(parameters=7)]}, "tools.0.function.parameters", "dictionary"),
    ({"tools": [function(parameters={"a": {"multipleOf": 12345677}})]}, "tools", "multipleOf"),
    ({"tools": [function(parameters={"properties": {"a": {"pattern": "("}}})], "tool_choice": "required"}, "tools", "schema"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": function(name="g"), "tools": [function()]}, "tool_choice", "'g'"),
    ({"tools": [function()], "tool_choice": "required", "min_tokens": 2}, "min_tokens", "schema"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "content"),
    ({"xtc_probability": 0.1, "xtc_threshold": 0.2}, "xtc_probability", "not supported"),
    ({"dry_multiplier": 0.8}, "dry_multiplier", "not supported"),
    ({"top_n_sigma": 1}, "top_n_sigma", "not supported"),
    ({"messages": [*TALK, {"role": "assistant", "content": "a"}], "continue_final_message": True, "add_generation_prompt": True},
     "add_generation_prompt", "send one of them"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    ({"prediction": "x"}, "prediction", "object"),
    ({"prediction": {"type": "content", "content": 7}}, "prediction.content", "7"),
]  # fmt: skip
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ({"prompt": [[5] * 4000] * 16, "echo": True, "logprobs": 20, "max_tokens": 0}, "prompt", "echo with logprobs=20"),
    ({"prompt": "x" * 5000, "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt", "context"),
    *(({"prompt": one, **more}, "prompt", "is not in the vocabulary")
      for one in ([-1], [1 << 40], [[5], [-3]], [[1, 999_999]])
      for more in ({}, {"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 0})),
    ({"prompt": ["hello", 5]}, "prompt.1", "prompt.1=5"),
    ({"suffix": "b"}, "suffix", "no tokens for filling in"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats", "include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of=1"),
    ({"best_of": 0}, "best_of", "best_of=0"),
    ({"best_of": 17}, "best_of", "best_of=17"),
    ({"best_of": 2, "stream": True}, "best_of", "streamed"),
]  # fmt: skip
RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type", ""),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    ({"background": True}, "background", "not supported"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not supported"),
    ({"tools": [{"type": "file_search"}]}, "tools.0", "file_search"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "1 to 64 letters"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"max_output_tokens": 0}, "max_output_tokens", "=0"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format", "schema"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"include": ["file_search_call.results"]}, "include.0", "file_search_call"),
    ({"temperature": 3.0}, "temperature", "3.0"),
    ({"n": 2}, "n", "not supported"),
    ({"foresay": {"origins": True}}, "foresay.origins", "origins"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 3000}] * 2}, "input", "6002"),
    ({"model": "other"}, "model", "not served here"),
]  # fmt: skip
MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"messages": []}, "messages", "messages"),
    (turn("user", [{"type": "image", "source": {}}]), "messages.0.content.0", "messages.0.content.0"),
    ({"thinking": {"type": "always"}}, "thinking.type", "thinking"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name", "tools.0"),
    ({"tools": [NAMED], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice", "tool_choice"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "tools.0"),
    ({"container": "x"}, "container", "container"),
    ({"temperature": 5.0}, "temperature", "temperature"),
    ({"foresay": {"origins": True}}, "foresay.origins", "origins"),
    ({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice", "tool_choice"),
    ({"tools": [NAMED], "tool_choice": {"type": "tool"}}, "tool_choice", "tool_choice"),
    (turn("system", [{"type": "tool_result", "tool_use_id": "a"}]), "messages.0", "messages.0"),
    (turn("user", [{"type": "thinking", "thinking": "x"}]), "messages.0", "messages.0"),
    (turn("assistant", [{"type": "tool_result", "tool_use_id": "a"}]), "messages.0", "messages.0"),
    ({"messages": [{"role": "user", "content": PARTS}] * 2}, "messages", "messages"),
    ({"model": "other"}, "model", "model"),
]  # fmt: skip
TABLE = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
CASES = [(route, *one) for route, some in TABLE.items() for one in some]


@pytest.mark.parametrize(("route", "body", "param", "words"), CASES, ids=[f"{one[0]} {one[2]}" for one in CASES])
def test_refusals(route: str, body: dict[str, Any], param: str, words: str, server: Running) -> None:
    answer = server.post(f"/v1/{route}", **{**ORIGINAL[route], **body})
    status = 404 if param == "model" else 400
    assert_refused(answer, param, words, status=status)
    error = answer.json()["error"]
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")
    assert (answer.json().get("type") == "error") == (route == "messages"), "the shape of the API"


@pytest.mark.parametrize("route", TABLE)
def test_requests_before_they_are_changed(route: str, server: Running) -> None:
    """Control: without the change they are answered."""
    assert server.post(f"/v1/{route}", **ORIGINAL[route], stream=False).status_code == 200


def test_a_reason_of_the_model(serve: Any, chain: Running) -> None:
    """A template without tools; reasoning that cannot be turned off."""
    assert_refused(serve().chat(tools=[TIME]), "tools", "chat template")
    assert_refused(chain.post("/v1/messages", messages=TALK, max_tokens=3, thinking={"type": "disabled"}), "thinking")


def test_ends_of_the_ranges_are_within(server: Running) -> None:
    for body in (
        {"temperature": 2, "presence_penalty": 2, "frequency_penalty": -2, "logit_bias": {"70": 100, "71": -100}},
        {"temperature": 0, "presence_penalty": -2, "frequency_penalty": 2, "top_p": 1, "n": 16},
    ):
        answer: httpx.Response = server.chat(max_tokens=2, **body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_values_without_effect_are_answered(kind: type[Fields], server: Running) -> None:
    """All of them at once, and those of samplers that are off with any value."""
    body = {name: 0.25 if values[0] is ANYTHING else values[0] for name, values in kind.neutral.items()}
    route = "chat/completions" if kind is ChatRequest else "completions"
    answer = server.post(f"/v1/{route}", **{**ORIGINAL[route], **body})
    assert answer.status_code == 200, answer.text
    assert {"xtc_probability", "xtc_threshold", "dry_base", "top_n_sigma"} <= body.keys()
