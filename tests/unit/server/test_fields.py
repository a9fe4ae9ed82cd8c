"""How a request's body becomes its fields: bounded before it is validated, and refused by the name of the first wrong field."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from foresay.server.errors import MAX_MESSAGE, ApiError
from foresay.server.fields import Fields, read
from foresay.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, PredictRequest, TokenizeRequest

MANY = 20_000
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


def test_as_many_as_may_be_are_taken() -> None:
    assert len(read(ChatRequest, json.dumps({"messages": [USER] * 4096}).encode()).messages) == 4096
    assert len(read(CompletionRequest, json.dumps({"prompt": [7] * 100_000}).encode()).prompt) == 100_000


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


REFUSED: list[tuple[type[Fields], dict[str, Any], str, str]] = [
    *((CompletionRequest, {"prompt": "a", **more}, param, "lone surrogate") for more, param in (
        ({"prompt": "a\ud800"}, "prompt"), ({"prompt": ["a", "b\udfff"]}, "prompt.1"), ({"stop": "\udc00"}, "stop"),
        ({"stop": ["x", "\udc00\ud800"]}, "stop.1"), ({"user": "\ud800"}, "user"), ({"model": "\ud800"}, "model"),
        ({"logit_bias": {"\ud800": 1}}, "logit_bias.\\ud800"), ({"\ud800": 1}, "\\ud800"),
    )),
    (ChatRequest, user("\ud800"), "messages.0.content", "lone surrogate"),
    (ChatRequest, user([{"type": "text", "text": "\ud800"}]), "messages.0.content.0.text", "lone surrogate"),
    (TokenizeRequest, {"prompt": "\ud800x"}, "prompt", "lone surrogate"),
    (TokenizeRequest, user("\ud800"), "messages.0.content", "lone surrogate"),
    (PredictRequest, {"prompt": "\ud800"}, "prompt", "lone surrogate"),
    *((CompletionRequest, {"prompt": "x", **more}, param, said) for more, param, said in (
        ({"prompt": None}, "prompt", "Field required"),
        ({"prompt": 7}, "prompt", "prompt=7 should be a valid string / should be a valid list"),
        ({"prompt": ["x", 5]}, "prompt.1", "prompt.1=5 should be a valid string"),
        ({"prompt": [5, "x"]}, "prompt.1", "prompt.1='x' should be a valid integer"),
        ({"prompt": [[5], ["x"]]}, "prompt.1.0", "valid integer"),
        ({"temperature": "hot"}, "temperature", "temperature='hot'"),
        ({"temperature": "h" * 10**6}, "temperature", "... should be"), ({"stop": {}}, "stop", "valid string"),
        ({"y" * 10**6: 1}, "y" * 997 + "...", "is not supported"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "stream_options.usage is not"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "logit_bias.5='x'"),
    )),
]  # fmt: skip
"""Fields, a body, the parameter of its error, and words of its message: the field, the value and what it should be."""


@pytest.mark.parametrize(
    ("kind", "body", "param", "said"),
    [*((*one, "") for one in HOSTILE.values()), *REFUSED],
    ids=[*HOSTILE, *(one[2][:30] for one in REFUSED)],
)
def test_the_first_wrong_field_is_named(kind: type[Fields], body: dict[str, Any], param: str, said: str) -> None:
    """By few errors: collecting one for each of millions of items stopped the event loop for many seconds."""
    with pytest.raises(ApiError) as refused:
        read(kind, json.dumps(body).encode())
    told, cause = refused.value.body()["error"], refused.value.__context__
    assert (refused.value.status, told["param"]) == (400, param) and said in refused.value.message
    assert cause.error_count() <= 10 if isinstance(cause, pydantic.ValidationError) else said
    assert len(told["message"]) <= MAX_MESSAGE and len(told["param"]) <= MAX_MESSAGE
    json.dumps(told, ensure_ascii=False).encode("utf-8")


def test_pairs_of_surrogates_are_characters() -> None:
    assert read(PredictRequest, b'{"prompt": "\\ud83d\\ude00 \\\\ud800"}').prompt == "\U0001f600 \\ud800"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *((one, "body is not JSON") for one in (b"", b"{", b"[" * 9000, b"\xff", b'{"prompt": "\xff"}', b"[1] x",
                                                b'"\\ud800', b'{"max_tokens": 1e', b"1" * 9000)),
        *((one, "body") for one in (b"[]", b'"x"', b"7", b"null", b"true")),
    ],
    ids=lambda one: str(one[:12]),
)  # fmt: skip
def test_what_is_no_json_or_no_object(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=f"^(the )?{said}") as refused:
        read(CompletionRequest, body)
    assert (refused.value.status, refused.value.param) == (400, "body")
