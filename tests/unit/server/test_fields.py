"""How a request's body becomes its fields: bounded before it is validated, and refused by the name of the first wrong field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from foresay.server import fields
from foresay.server.errors import MAX_MESSAGE, ApiError
from foresay.server.fields import Fields, read
from foresay.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PredictRequest,
    TokenizeRequest,
)

MANY = 200_000
USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
HOSTILE: dict[str, tuple[type[Fields], dict[str, Any], str]] = {
    "messages that are none": (ChatRequest, {"messages": [0] * MANY}, "messages"),
    "messages": (ChatRequest, {"messages": [USER] * MANY}, "messages"),
    "parts of a message": (ChatRequest, {"messages": [{"role": "user", "content": [PART] * MANY}]}, "messages"),
    "parts that are none": (ChatRequest, {"messages": [{"role": "user", "content": [0] * 4000}]}, "messages.0.content.0"),
    "parts of many messages": (ChatRequest, {"messages": [{"role": "user", "content": [PART] * 500}] * 9}, "messages"),
    "unknown fields": (ChatRequest, {"messages": [USER], **{f"f{i}": 1 for i in range(MANY)}}, "f0"),
    "unknown fields of a message": (
        ChatRequest, {"messages": [{**USER, **{f"f{i}": 1 for i in range(MANY)}}]}, "messages.0.f0",
    ),
    "unknown fields of every message": (ChatRequest, {"messages": [{**USER, "f": 1}] * 4000}, "messages.0.f"),
    "biases": (ChatRequest, {"messages": [USER], "logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
    "stops": (ChatRequest, {"messages": [USER], "stop": [0] * MANY}, "stop"),
    "stop tokens": (ChatRequest, {"messages": [USER], "stop_token_ids": ["x"] * MANY}, "stop_token_ids"),
    "metadata": (ChatRequest, {"messages": [USER], "metadata": {str(i): 1 for i in range(MANY)}}, "metadata"),
    "tools": (ChatRequest, {"messages": [USER], "tools": [0] * MANY}, "tools"),
    "prompts": (CompletionRequest, {"prompt": ["x"] * MANY}, "prompt"),
    "prompts that are none": (CompletionRequest, {"prompt": [None] * MANY}, "prompt"),
    "prompts of tokens": (CompletionRequest, {"prompt": [[1]] * MANY}, "prompt"),
    "a prompt of wrong tokens": (CompletionRequest, {"prompt": [1] + ["x"] * 1000}, "prompt.1"),
    "prompts of wrong tokens": (CompletionRequest, {"prompt": [["x"] * 1000] * 1000}, "prompt.0.0"),
    "tokens": (DetokenizeRequest, {"tokens": [-1] * MANY}, "tokens.0"),
    "messages to tokenize": (TokenizeRequest, {"messages": [0] * MANY}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_large_invalid_body_gives_few_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting an error for each of millions of items stopped the event loop for many seconds."""
    kind, body, param = HOSTILE[name]
    counts: list[int] = []
    honest: Callable[..., ApiError] = fields._first

    def counted(error: pydantic.ValidationError, data: Any) -> ApiError:
        counts.append(error.error_count())
        return honest(error, data)

    monkeypatch.setattr(fields, "_first", counted)
    with pytest.raises(ApiError) as refused:
        read(kind, json.dumps(body).encode())
    assert len(counts) == 1 and counts[0] <= 10
    assert refused.value.status == 400 and refused.value.param == param
    assert len(refused.value.message) <= MAX_MESSAGE


def test_as_many_as_may_be_are_taken() -> None:
    assert len(read(ChatRequest, json.dumps({"messages": [USER] * 4096}).encode()).messages) == 4096
    assert len(read(CompletionRequest, json.dumps({"prompt": [7] * 100_000}).encode()).prompt) == 100_000


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": "a\ud800"}, "prompt"),
        (CompletionRequest, {"prompt": ["a", "b\udfff"]}, "prompt.1"),
        (CompletionRequest, {"prompt": "a", "stop": "\udc00"}, "stop"),
        (CompletionRequest, {"prompt": "a", "stop": ["x", "\udc00\ud800"]}, "stop.1"),
        (CompletionRequest, {"prompt": "a", "user": "\ud800"}, "user"),
        (CompletionRequest, {"prompt": "a", "model": "\ud800"}, "model"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"\ud800": 1}}, "logit_bias.\\ud800"),
        (CompletionRequest, {"prompt": "a", "\ud800": 1}, "\\ud800"),
        (ChatRequest, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
         "messages.0.content.0.text"),
        (TokenizeRequest, {"prompt": "\ud800x"}, "prompt"),
        (TokenizeRequest, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        (PredictRequest, {"prompt": "\ud800"}, "prompt"),
    ],
)  # fmt: skip
def test_a_lone_surrogate_is_refused_by_the_name_of_its_field(
    kind: type[Fields], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        read(kind, json.dumps(body).encode())
    told = refused.value.body()["error"]
    assert refused.value.status == 400 and told["param"] == param
    json.dumps(told, ensure_ascii=False).encode("utf-8")


def test_pairs_of_surrogates_are_characters() -> None:
    assert read(PredictRequest, b'{"prompt": "\\ud83d\\ude00 \\\\ud800"}').prompt == "\U0001f600 \\ud800"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 9000, b"\xff", b'{"prompt": "\xff"}', b"[1] x", b'"\\ud800', b'{"max_tokens": 1e', b"1" * 9000]
)  # fmt: skip
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(ApiError, match="body is not JSON") as refused:
        read(CompletionRequest, body)
    assert refused.value.status == 400 and refused.value.param == "body"


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"7", b"null", b"true"])
def test_what_is_no_object(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"^body") as refused:
        read(CompletionRequest, body)
    assert refused.value.param == "body"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "Field required"),
        ({"prompt": None}, "prompt", "Field required"),
        ({"prompt": 7}, "prompt", "prompt=7 should be a valid string / should be a valid list"),
        ({"prompt": ["x", 5]}, "prompt.1", "prompt.1=5 should be a valid string"),
        ({"prompt": [5, "x"]}, "prompt.1", "prompt.1='x' should be a valid integer"),
        ({"prompt": [[5], ["x"]]}, "prompt.1.0", "valid integer"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "temperature='hot'"),
        ({"prompt": "x", "temperature": "h" * 10**6}, "temperature", "... should be"),
        ({"prompt": "x", "stop": {}}, "stop", "valid string"),
        ({"prompt": "x", "y" * 10**6: 1}, "y" * 10**6, "is not supported"),
        ({"prompt": "x", "stream_options": {"usage": True}}, "stream_options.usage", "stream_options.usage is not"),
        ({"prompt": "x", "logit_bias": {"5": "x"}}, "logit_bias.5", "logit_bias.5='x'"),
    ],
)  # fmt: skip
def test_the_field_the_value_and_what_it_should_be(body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(CompletionRequest, json.dumps(body).encode())
    assert refused.value.status == 400 and refused.value.param == param and said in refused.value.message
    told = refused.value.body()["error"]
    assert len(told["message"]) <= MAX_MESSAGE and len(told["param"]) <= MAX_MESSAGE
