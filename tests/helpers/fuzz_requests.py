"""Mutated request bodies of the server's API, the same for a seed. No case may be the server's error.

Owns which requests there are to begin with, and how they are broken. `violation` finds what is wrong with an answer. As a format
of `scripts/fuzz`, a case is a file, and reading it is answering it by the application.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

import foresay
from foresay.errors import PromptError
from foresay.server.app import make_app
from foresay.server.service import Service
from foresay.server.settings import ServerSettings
from helpers import tiny
from helpers.fuzz_mutators import dump, mutate_bytes, mutate_value
from helpers.fuzzing import Format, working_folder

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
PROPERTIES = {"type": "object", "properties": {"a": {"enum": [1]}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PROPERTIES}}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": PROPERTIES}
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
    "stop_sequences": ["x"], "tools": [{"name": "f", "input_schema": PROPERTIES}], "tool_choice": {"type": "auto"},
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
_MESSAGES, _FEW = CHAT["messages"], {"max_tokens": 3}
ROUTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", TOOLS),
    ("/v1/responses", RESPONSES),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", {key: MESSAGES[key] for key in ("model", "messages", "system", "tools")}),
    ("/api/chat", OLLAMA_CHAT),
    ("/api/generate", {**OLLAMA, "prompt": TEXT, "system": "brief"}),
    ("/api/generate", {**OLLAMA, "prompt": TEXT, "raw": True, "format": "", "stream": True}),
    ("/api/embed", {"model": "tiny", "input": [TEXT, "and"], "dimensions": 64, "truncate": True}),
    ("/v1/embeddings", {"model": "tiny", "input": [TEXT, [5, 6]], "encoding_format": "base64", "pooling": "last", "user": "me"}),
    ("/v1/embeddings", {"input": [5, 6], "dimensions": 64}),
    ("/api/show", {"model": "tiny", "verbose": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**_FEW, "messages": _MESSAGES, "response_format": SCHEMA}),
    ("/v1/chat/completions", {**_FEW, "messages": _MESSAGES, "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/completions", {**_FEW, "prompt": TEXT, "grammar": 'root ::= "a" | [b-d]', "thinking_token_budget": 2}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "prompt": TEXT, "max_tokens": 0}),
    ("/v1/completions", {**_FEW, "prompt": [TEXT, "and"], "stream": True, "stream_options": {"include_usage": True}}),
    ("/tokenize", {"model": "tiny", "prompt": TEXT}),
    ("/tokenize", {"messages": _MESSAGES}),
    ("/detokenize", {"tokens": [72, 73]}),
    ("/predict", {**_FEW, "prompt": TEXT}),
)  # fmt: skip
ODD: tuple[Any, ...] = (
    "x\udfffy", "\ufffd", "\U0010ffff", "1", "none", "lenience(2)", "suffix", "[" * 300, "é" * 2000, [0] * 3000, ["x"] * 1500,
    [[1]] * 1500, {"type": "text"}, {"a": {"b": [1]}}, {str(i): i for i in range(1500)}, [[[[[[[[[[]]]]]]]]]], [-1], [999_999],
    [TEXT, 5], [[1], "x"], {"\ud800": 1},
)  # fmt: skip
"""Values next to those of `fuzz_mutators.extreme`."""
UNKNOWN = ("x", "temprature", "\ud800", "", "a" * 5000, "tools", "echo", "prompt")


@dataclass(frozen=True, slots=True)
class Case:
    """One POST request."""

    path: str
    body: bytes
    content_type: str


def case(chance: random.Random) -> Case:
    """A valid request, or one with one to three changes of its fields; some are changed in their bytes also."""
    path, body = chance.choice(ROUTES)
    if chance.random() < 0.75:
        body = mutate_value(body, chance, ODD, UNKNOWN)
    raw = dump(body, chance).encode("utf-8", "surrogatepass")
    if chance.random() < 0.15:
        raw = mutate_bytes(raw, chance)
    kind = "application/json" if chance.random() < 0.97 else chance.choice(("text/plain", "", "application/xml"))
    return Case(path, raw, kind)


def cases(seed: int, count: int) -> Iterator[Case]:
    chance = random.Random(seed)
    return (case(chance) for _ in range(count))


def violation(status: int, content_type: str, body: bytes, path: str = "") -> str | None:
    """A fault of an answer: a status of 500 or more, or an error that is not in the route's shape. None: nothing."""
    if status >= 500:
        return f"status {status}"
    if status < 400:
        return None if b'"code":"internal"' not in body else "an internal error in a stream"
    if not content_type.startswith("application/json"):
        return f"an error of the type {content_type!r}"
    error = json.loads(body).get("error")
    shaped = isinstance(error, dict) and {"message", "type", "param", "code"} <= error.keys()
    if path.startswith("/api/"):
        shaped = isinstance(error, str) and bool(error)
    if not shaped or len(body) > 5000:
        return f"an error of another shape, or of {len(body)} bytes: {body[:200]!r}"
    if path.startswith("/api/"):
        return None
    if not error["message"] or not error["type"]:
        return "an error without words"
    if status == 400 and not error["param"]:
        return f"no param: {error['message']}"
    return None


@cache
def _client() -> tuple[asyncio.Runner, httpx.AsyncClient]:
    """The application over a tiny model, and a client of it, in this process."""
    with working_folder() as folder:
        model = foresay.load(str(tiny.save(folder, tiny.llama(context=96), chat=True)), num_draft_tokens=3)
    app: Any = make_app(Service.of(model, ServerSettings(max_body_bytes=1 << 20), ["tiny"]))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    return asyncio.Runner(), client


def _write(place: Path, rng: random.Random) -> Path:
    one, path = case(rng), place / "request.json"
    body = base64.b64encode(one.body).decode()
    path.write_text(json.dumps({"path": one.path, "type": one.content_type, "body": body}), encoding="utf-8")
    return path


def answered(one: Case) -> tuple[int, str | None]:
    """The status of a request's answer, and what is wrong with it."""
    runner, client = _client()
    headers = {"content-type": one.content_type}
    answer = runner.run(client.post(one.path, content=one.body, headers=headers, timeout=60))
    kind = answer.headers.get("content-type", "")
    return answer.status_code, violation(answer.status_code, kind, answer.content, one.path)


def _check(path: Path) -> None:
    """Answer a request. Raises PromptError for one that is refused, as it should be, and AssertionError for a bad answer."""
    one = json.loads(path.read_text(encoding="utf-8"))
    status, wrong = answered(Case(one["path"], base64.b64decode(one["body"]), one["type"]))
    assert wrong is None, wrong
    if status >= 400:
        raise PromptError(f"answered {status}")


FORMAT = Format(_write, _check)
