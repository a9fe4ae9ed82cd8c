"""Requests that are refused by the name of their parameter, by every route that generates."""

from __future__ import annotations

from typing import Any

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
    "embeddings": {"input": "hello"},
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


VALUES: dict[str, dict[str, list[Any]]] = {
    "chat/completions": {
        "functions": [[{"name": "f"}]], "foresay.gama": [3], "temperature": ["1", -1, 2.1], "top_p": [True, 1.5],
        "max_tokens": [0, -1], "n": [17, 0], "user": [7], "top_logprobs": [2],
        "logit_bias": [{"x": 1}, {"5": 101}, {"5": -101}, {"999999": 1}], "stop_token_ids": [[999_999]],
        "presence_penalty": [2.5, -2.5], "frequency_penalty": [3], "min_tokens": [5000], "best_of": [True],
        "echo": [True], "top_k": [-2], "use_beam_search": [True], "modalities": [["text", "audio"]],
        "skip_special_tokens": [False], "stream_options": [{"include_usage": True}], "response_format.type": ["xml"],
        "response_format": [schema({"type": "nothing"}), schema(nested(40))], "messages": [[]],
        "foresay.drafter": ["model(/etc)", "max_gram(table='/etc/passwd')", "suffix(",
            "suffix(keep=true)", "ngram_store(max_contexts=99999999)", "[" * 5000],
        "foresay.length": ["acceptance(/etc)"], "foresay.rule": ["blok"],
        "tools": [[function(), function()], [function()] * 129, [function(parameters={"a": {"multipleOf": 12345677}})]],
        "tool_choice": ["required"], "dry_multiplier": [0.8], "top_n_sigma": [1], "prediction": ["x"],
        "thinking_token_budget": [-2, 0.5, "5", True],
    },
    "completions": {
        "max_tokens": [0], "suffix": ["b"], "stream_options.continuous_usage_stats": [True],
        "stream_options": [{"include_usage": True}], "best_of": [0, 17],
    },
    "responses": {
        "input": [[], [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 3000}] * 2],
        "previous_response_id": ["resp_1"], "background": [True], "truncation": ["auto"], "reasoning.mode": ["pro"],
        "tool_choice": ["required"], "max_output_tokens": [0],
        "text.format": [{"type": "json_schema", "name": "x"},
            {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}],
        "top_logprobs": [2], "temperature": [3.0], "n": [2], "foresay.origins": [True], "model": ["other"],
    },
    "messages": {
        "max_tokens": [None, 0], "messages": [[], [{"role": "user", "content": PARTS}] * 2],
        "thinking.type": ["always"], "container": ["x"], "temperature": [5.0], "foresay.origins": [True],
        "tool_choice": [{"type": "auto", "name": "x"}], "model": ["other"], "fallback_model": ["other"],
        "mcp_servers": [[{"type": "url", "url": "https://a.example", "name": "a"}]],
    },
    "embeddings": {
        "dimensions": [7, "x"], "encoding_format": ["int8"], "pooling": ["cls"], "normalize": [False], "model": ["other"],
        "input": ["", [], [1, 10**6], ["hello", [-1]], None, ["x"] * 1025, [5] * 4096, "number 7 " * 4096],
    },
}  # fmt: skip
"""Route -> field, within objects too -> values of it that are refused."""
OTHERS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat/completions": [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens"),
        (turn("king", "x"), "messages.0.role"), (turn("assistant", None), "messages.0"),
        (turn("user", "x", tool_calls=[function()]), "messages.0"),
        (turn("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
            "messages.0.content.0.type"),
        (turn("assistant", "", tool_calls=[function(arguments=7)]), SENT), (turn("user", "x" * 5000), "messages"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"), ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [function(name="a b")]}, "tools.0.function.name"),
        ({"tools": [function(parameters=7)]}, "tools.0.function.parameters"),
        ({"tools": [function(parameters={"properties": {"a": {"pattern": "("}}})], "tool_choice": "required"}, "tools"),
        ({"tool_choice": function(name="g"), "tools": [function()]}, "tool_choice"),
        ({"tools": [function()], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"xtc_probability": 0.1, "xtc_threshold": 0.2}, "xtc_probability"),
        ({"messages": [*TALK, {"role": "assistant", "content": "a"}],
            "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 7}}, "prediction.content"),
        ({"thinking_token_budget": 5, "thinking_budget_tokens": 6}, "thinking_budget_tokens"),
        ({"repetition_penalty": 1.0, "repeat_penalty": 1.1}, "repeat_penalty"),
    ],
    "completions": [
        ({"prompt": [[5] * 4000] * 16, "echo": True, "logprobs": 20, "max_tokens": 0}, "prompt"),
        ({"prompt": "x" * 5000, "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"),
        *(({"prompt": one, **more}, "prompt") for one in ([-1], [1 << 40], [[5], [-3]], [[1, 999_999]]) for more
            in ({}, {"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 0})),
        ({"prompt": ["hello", 5]}, "prompt.1"), ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
    "responses": [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "mcp"}]},
            "input.0.namespace"),
        ({"tools": [{"type": "file_search"}]}, "tools.0"), ({"tools": [{"type": "custom", "name": "f"}]}, "tools.0"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"include": ["file_search_call.results"]}, "include.0"),
    ],
    "messages": [
        (turn("user", [{"type": "image", "source": {}}]), "messages.0.content.0"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [NAMED], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [NAMED], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{**NAMED, "defer_loading": True}]}, "tools.0.defer_loading"),
        (turn("user", [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}]),
            "messages.0.content.0.content.0.type"),
        (turn("system", [{"type": "tool_result", "tool_use_id": "a"}]), "messages.0"),
        (turn("user", [{"type": "thinking", "thinking": "x"}]), "messages.0"),
        (turn("assistant", [{"type": "tool_result", "tool_use_id": "a"}]), "messages.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ],
    "embeddings": [({"input": [[]]}, "input.0")],
}  # fmt: skip
"""Route -> changes of its request, and the parameter of the error."""


BOTH = ["chat/completions", "completions"]


def outputs_of(**members: Any) -> dict[str, Any]:
    return {"structured_outputs": members}


CALL = {"tool_choice": "required", "tools": [{"type": "function", "name": "time"}]}
CONSTRAINTS: list[tuple[list[str], dict[str, Any], str]] = [
    *(([*BOTH, "responses"], outputs_of(**{name: value}), f"structured_outputs.{name}") for name, value in (
        ("regex", "[.*"), ("regex", ""), ("choice", []), ("json", "{"), ("structural_tag", "{}"))),
    *(([*BOTH, "responses"], outputs_of(json={}, **{name: value}), f"structured_outputs.{name}") for name, value in (
        ("regex", "a"), ("whitespace_pattern", " "), ("disable_any_whitespace", True))),
    *(([*BOTH, "responses"], outputs_of(**members), "structured_outputs") for members in ({}, {"json_object": False})),
    *((BOTH, {name: value}, name) for name, value in (
        ("guided_json", "[]"), ("guided_json", {"type": "nothing"}), ("grammar", 'root ::= "a" other'),
        ("grammar", "start: missing"), ("guided_whitespace_pattern", " "), ("guided_regex", "a{1000}{1000}"))),
    (BOTH, {"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
    (BOTH, {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    (BOTH, {"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    (["responses"], {"guided_regex": "a"}, "guided_regex"),
    (["responses"], outputs_of(regex="a") | {"text": {"format": {"type": "json_object"}}}, "structured_outputs"),
    (["responses"], outputs_of(regex="a") | CALL, "structured_outputs.regex"),
    (["chat/completions"], outputs_of(regex="a") | {"tool_choice": "required", "tools": [TIME]}, "structured_outputs.regex"),
]  # fmt: skip
"""Routes, constraints of the output that contradict each other or have no support, and the parameter of the error."""


def within(field: str, value: Any) -> dict[str, Any]:
    """A body with a value of a field."""
    for name in reversed(field.split(".")):
        value = {name: value}
    return dict(value)


CASES = [
    *((route, within(name, one), name) for route, some in VALUES.items() for name, bad in some.items() for one in bad),
    *((route, *one) for route, some in OTHERS.items() for one in some),
    *((route, *one) for routes, *one in CONSTRAINTS for route in routes),
]


@pytest.mark.parametrize(("route", "body", "param"), CASES, ids=[f"{one[0]} {one[2]}" for one in CASES])
def test_refusals(route: str, body: dict[str, Any], param: str, server: Running) -> None:
    answer = server.post(f"/v1/{route}", **{**ORIGINAL[route], **body})
    assert_refused(answer, param, status=404 if param == "model" else 400)
    error, named = answer.json()["error"], [name for name in param.split(".") if not name.isdigit()][-1]
    named = "prompt" if (route, named) == ("embeddings", "input") and "prompt" in error["message"] else named
    assert any(words in error["message"] for words in (named, "schema", "the model's context is")), error["message"]
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")
    assert (answer.json().get("type") == "error") == (route == "messages"), "the shape of the API"


def test_requests_before_they_are_changed(server: Running) -> None:
    """Control: without the change they are answered."""
    for route, body in ORIGINAL.items():
        assert server.answer(f"/v1/{route}", **body), route


def test_a_reason_of_the_model(serve: Any, chain: Running) -> None:
    """A template without tools; reasoning that cannot be turned off."""
    assert_refused(serve().chat(tools=[TIME]), "tools", "chat template")
    assert_refused(chain.post("/v1/messages", messages=TALK, max_tokens=3, thinking={"type": "disabled"}), "thinking")


def test_ends_of_the_ranges_and_values_without_effect_are_answered(server: Running) -> None:
    """All of the latter at once, and those of samplers that are off with any value."""
    for body in (
        {"temperature": 2, "presence_penalty": 2, "frequency_penalty": -2, "logit_bias": {"70": 100, "71": -100}},
        {"temperature": 0, "presence_penalty": -2, "frequency_penalty": 2, "top_p": 1, "n": 16},
    ):
        assert server.answer("/v1/chat/completions", **ORIGINAL["chat/completions"], **body)
    kinds: list[tuple[str, type[Fields]]] = [("chat/completions", ChatRequest), ("completions", CompletionRequest)]
    for route, kind in kinds:
        body = {name: 0.25 if values[0] is ANYTHING else values[0] for name, values in kind.neutral.items()}
        assert server.answer(f"/v1/{route}", **{**ORIGINAL[route], **body})
        assert {"xtc_probability", "xtc_threshold", "dry_base", "top_n_sigma"} <= body.keys()
