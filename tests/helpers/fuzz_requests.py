"""Mutated request bodies of the server's API, the same for a seed. No case may be the server's error.

Owns which requests there are to begin with, and how they are broken. `violation` finds what is wrong with an answer.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TEXT = "the number 7 and 8"
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "stop": ["x", "yz"], "seed": 3, "max_tokens": 3,
    "min_tokens": 1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"70": 5},
    "stop_token_ids": [4], "ignore_eos": True, "stream": False, "logprobs": True, "top_logprobs": 2, "user": "me",
    "stream_options": {"include_usage": False}, "response_format": {"type": "text"}, "metadata": {"a": "b"}, "tools": [],
    "foresay": {"drafter": "prompt_lookup", "length": 2, "rule": "match", "stats": True},
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "model": "tiny", "prompt": [[72, 73, 74], [75, 76]], "max_tokens": 2, "logprobs": 2, "echo": True, "temperature": 0,
    "stop": "q", "suffix": None, "best_of": 1, "seed": 1,
}  # fmt: skip
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}},
}
FUNCTION: dict[str, Any] = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}},
}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK_WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
]  # fmt: skip
TOOLS: dict[str, Any] = {
    "messages": TALK_WITH_TOOLS, "max_tokens": 3, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto",
    "parallel_tool_calls": False, "prediction": {"type": "content", "content": "the number 7"},
    "chat_template_kwargs": {}, "continue_final_message": False, "add_generation_prompt": True,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "tiny", "instructions": "brief", "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stream": False,
    "tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "f"}, "store": False,
    "text": {"format": {"type": "text"}}, "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "tiny", "max_tokens": 3, "system": [{"type": "text", "text": "brief"}], "temperature": 0.5, "top_k": 4,
    "stop_sequences": ["x"], "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"}, "metadata": {"user_id": "me"}, "stream": False,
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "ho"},
                                          {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]}]},
    ],
}  # fmt: skip
OLLAMA: dict[str, Any] = {
    "model": "tiny:latest", "stream": False, "think": None, "keep_alive": "5m", "format": "json", "logprobs": True,
    "options": {"temperature": 0.5, "top_k": 4, "num_predict": 3, "stop": ["x"], "num_ctx": 64, "repeat_last_n": 0},
}  # fmt: skip
OLLAMA_CHAT: dict[str, Any] = {
    **OLLAMA, "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_name": "f", "content": "1"},
    ],
}  # fmt: skip
ROUTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", TOOLS),
    ("/v1/responses", RESPONSES),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", {key: MESSAGES[key] for key in ("model", "messages", "system", "tools")}),
    ("/api/chat", OLLAMA_CHAT),
    ("/api/generate", {**OLLAMA, "prompt": TEXT, "system": "brief"}),
    ("/api/generate", {**OLLAMA, "prompt": TEXT, "raw": True, "format": "", "stream": True}),
    ("/api/embed", {"model": "tiny", "input": [TEXT, "and"], "dimensions": 64, "truncate": True}),
    (
        "/v1/embeddings",
        {"model": "tiny", "input": [TEXT, [5, 6]], "encoding_format": "base64", "pooling": "last", "user": "me"},
    ),
    ("/v1/embeddings", {"input": [5, 6], "dimensions": 64}),
    ("/api/show", {"model": "tiny", "verbose": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": CHAT["messages"], "max_tokens": 3, "response_format": SCHEMA}),
    (
        "/v1/chat/completions",
        {"messages": CHAT["messages"], "max_tokens": 3, "structured_outputs": {"choice": ["a", "b"]}},
    ),
    (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 3, "grammar": 'root ::= "a" | [b-d]', "thinking_token_budget": 2},
    ),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "prompt": TEXT, "max_tokens": 0}),
    (
        "/v1/completions",
        {"prompt": [TEXT, "and"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("/tokenize", {"model": "tiny", "prompt": TEXT}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [72, 73]}),
    ("/predict", {"prompt": TEXT, "max_tokens": 3}),
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, -(2**63), 2**63, 2**64, 10**400, float("nan"), float("inf"),
    "", "x", "\x00", "\ud800", "x\udfffy", "\ufffd", "\U0010ffff", "1", "none", "lenience(2)", "suffix", "[" * 300, "é" * 2000,
    [], {}, [[]], [None],
    [0] * 3000, ["x"] * 1500, [[1]] * 1500, {"type": "text"}, {"a": {"b": [1]}}, {str(i): i for i in range(1500)},
    [[[[[[[[[[]]]]]]]]]], [-1], [999_999], [TEXT, 5], [[1], "x"], {"\ud800": 1},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One POST request."""

    path: str
    body: bytes
    content_type: str


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` requests: valid ones with one to three mutations of their fields, and some also of their bytes."""
    chance = random.Random(seed)
    for _ in range(count):
        path, valid = chance.choice(ROUTES)
        body = copy.deepcopy(valid)
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            _mutate(body, chance)
        raw = json.dumps(body).encode()
        if chance.random() < 0.15:
            raw = chance.choice(_BYTES)(raw, chance)
        kind = "application/json" if chance.random() < 0.97 else chance.choice(("text/plain", "", "application/xml"))
        yield Case(path, raw, kind)


def _mutate(body: dict[str, Any], chance: random.Random) -> None:
    """Change one position, at any depth: give it an odd value, remove it, repeat it, or add an unknown field."""
    inner: Any = body
    places = list(_places(inner))
    if not places:
        body["prompt"] = copy.deepcopy(chance.choice(ODD))
        return
    owner, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.5:
        owner[key] = copy.deepcopy(chance.choice(ODD))
    elif kind < 0.6 and isinstance(owner[key], int | float):
        owner[key] += chance.choice((-1, 1, 0.5, 3))
    elif kind < 0.75:
        del owner[key]
    elif kind < 0.85 and isinstance(owner, list):
        owner.extend(copy.deepcopy(owner[key]) for _ in range(chance.choice((1, 50, 1100))))
    elif isinstance(owner, dict):
        owner[chance.choice(("x", "temprature", "\ud800", "", "a" * 5000, "tools", "echo"))] = copy.deepcopy(
            chance.choice(ODD)
        )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key) of everything inside, in order; of long lists the beginning."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))[:20]
        for key in keys:
            yield value, key
            yield from _places(value[key])


_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda raw, chance: raw[: chance.randrange(len(raw) + 1)],
    lambda raw, chance: raw + raw,
    lambda raw, chance: raw.replace(b'"', b"'", 1),
    lambda raw, chance: raw[: (cut := chance.randrange(len(raw)))] + b"\xff\xfe" + raw[cut:],
    lambda raw, chance: b"\xef\xbb\xbf" + raw,
    lambda raw, chance: raw.decode().encode("utf-16"),
    lambda raw, chance: b"[" * 20_000,
    lambda raw, chance: b'{"prompt": ' + b"9" * 6000 + b"}",
    lambda raw, chance: raw[:-1] + b', "prompt": "twice"}',
)


def violation(status: int, content_type: str, body: bytes, path: str = "") -> str | None:
    """A fault of an answer: a status of 500 or more, or an error that is not in the route's shape. None: nothing."""
    if status >= 500:
        return f"status {status}"
    if status < 400:
        return None if b'"code":"internal"' not in body else "an internal error in a stream"
    if not content_type.startswith("application/json"):
        return f"an error of the type {content_type!r}"
    error = json.loads(body).get("error")
    if path.startswith("/api/"):
        return (
            None
            if isinstance(error, str) and error and len(body) <= 5000
            else f"an error of another shape: {body[:200]!r}"
        )
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
        return f"an error of another shape: {body[:200]!r}"
    if not error["message"] or not error["type"]:
        return "an error without words"
    if len(body) > 5000:
        return f"an error of {len(body)} bytes"
    if status == 400 and not error["param"]:
        return f"no param: {error['message']}"
    return None
