"""Requests as Open WebUI 0.12 forms them: a connection, chats with native tools, its own tasks, and both API types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.client_server import NAME, RAIN, SEA, Served

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What colour is the sea?"}]
SPEC: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": SPEC}]


@pytest.fixture(scope="module")
def client(writer: Served) -> Iterator[httpx.Client]:
    """Its headers: those of a connection with a key, and those of the user, which an administrator can switch on."""
    user = {"Name": "Ada%20L", "Id": "7", "Email": "ada@example.org", "Role": "user", "Chat-Id": "c1"}
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    headers |= {f"X-OpenWebUI-User-{name}": value for name, value in user.items()}
    with httpx.Client(base_url=writer.url, headers=headers, timeout=60) as one:
        yield one


def chat(client: httpx.Client, messages: list[Any], **more: Any) -> dict[str, Any]:
    answer = client.post("/chat/completions", json={"stream": False, "model": NAME, "messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream, line by line as it is read."""
    found, ended = [], False
    with client.stream("POST", path, json={"stream": True, "model": NAME, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
    assert ended == (path == "/chat/completions")
    return found


def test_a_connection_is_verified(client: httpx.Client) -> None:
    answer = client.get("/models")
    assert answer.status_code == 200
    [model] = answer.json()["data"]
    assert model["id"] == NAME and model["object"] == "model" and "error" not in answer.json()


def test_a_chat(client: httpx.Client) -> None:
    """With the usage that it requests, and parameters of its dialogue."""
    more = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "seed": 7, "stop": ["</s>"], "max_tokens": 64,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {"5": -50}}  # fmt: skip
    body = {"messages": TALK, "stream_options": {"include_usage": True}, **more}
    found = events(client, "/chat/completions", body)
    deltas = [one["choices"][0]["delta"] for one in found if one["choices"]]
    assert "".join(one.get("content") or "" for one in deltas) == SEA
    assert [one["choices"][0]["finish_reason"] for one in found if one["choices"]][-1] == "stop"
    assert found[-1]["usage"]["completion_tokens"] >= 5 and found[-1]["choices"] == []
    answered = [*TALK, {"role": "assistant", "content": SEA}, {"role": "user", "content": "And the sky?"}]
    assert chat(client, answered)["choices"][0]["message"]["content"] == SEA


@pytest.mark.parametrize("content", ["", "I shall look."])
def test_native_tools(content: str, client: httpx.Client) -> None:
    """Pieces of a call are put together by their index; the result follows, with the tools again."""
    found = events(client, "/chat/completions", {"messages": RAIN, "tools": TOOLS})
    pieces = [call for one in found for call in one["choices"][0]["delta"].get("tool_calls", ())]
    assert {one["index"] for one in pieces} == {0}
    name = "".join(one["function"].get("name") or "" for one in pieces)
    arguments = "".join(one["function"].get("arguments") or "" for one in pieces)
    assert (name, json.loads(arguments)) == ("weather", {"city": "Rome"})
    call = {"id": pieces[0]["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
    talk = [
        *RAIN,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    found = events(client, "/chat/completions", {"messages": talk, "tools": TOOLS})
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in found) == "It is sunny in Rome."


def test_tasks(client: httpx.Client) -> None:
    """Titles, tags and follow-up questions: whole answers to one message, JSON that it reads out of the text."""
    prompt = (
        'Generate a title.\nJSON format: { "title": "your title" }\n<chat_history>\nUSER: What colour?\n</chat_history>'
    )
    done = chat(client, [{"role": "user", "content": prompt}])
    assert json.loads(done["choices"][0]["message"]["content"]) == {"title": "Sea colours"}
    assert done["choices"][0]["finish_reason"] == "stop" and done["usage"]["total_tokens"] > 0


def test_a_refusal_has_a_message(client: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"stream": True, "model": NAME, "messages": [{"role": "user", "content": [image]}]}
    answer = client.post("/chat/completions", json=body)
    assert answer.status_code == 400 and answer.headers["content-type"].startswith("application/json")
    assert "messages" in answer.json()["error"]["message"] + answer.json()["error"]["param"]


def responses_input(talk: list[Any]) -> list[Any]:
    return [
        {"type": "message", "role": one["role"], "content": [{"type": "input_text", "text": one["content"]}]}
        for one in talk
    ]


def test_a_connection_of_the_type_responses(client: httpx.Client) -> None:
    body = {"input": responses_input(TALK[1:]), "instructions": "Be brief.", "max_output_tokens": 64}
    found = events(client, "/responses", body)
    deltas = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == SEA and found[-1]["type"] == "response.completed"
    [message] = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == SEA and found[-1]["response"]["usage"]["output_tokens"] >= 5
    stored = [*responses_input(TALK[1:]), message, *responses_input([{"role": "user", "content": "And the sky?"}])]
    whole = client.post("/responses", json={"model": NAME, "stream": False, "input": stored})
    assert whole.status_code == 200, whole.text
    assert whole.json()["output"][0]["content"][0]["text"] == SEA


def test_tools_of_the_type_responses(client: httpx.Client) -> None:
    tools = [{"type": "function", **SPEC, "strict": False}]
    found = events(client, "/responses", {"input": responses_input(RAIN), "tools": tools})
    [call] = found[-1]["response"]["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Rome"})
    sent = {name: call[name] for name in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    found = events(client, "/responses", {"input": [*responses_input(RAIN), sent, result], "tools": tools})
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "It is sunny in Rome."
    parts = {**result, "output": [{"type": "input_text", "text": "sunny"}]}
    found = events(client, "/responses", {"input": [*responses_input(RAIN), sent, parts], "tools": tools})
    assert found[-1]["type"] == "response.completed"


def test_messages_are_forwarded(client: httpx.Client) -> None:
    """Its own route of Anthropic's API forwards requests to this one, and counts tokens here."""
    body = {"model": NAME, "messages": TALK[1:], "max_tokens": 64}
    done = client.post("/messages", json=body).json()
    assert done["content"][0]["text"] == SEA
    counted = client.post("/messages/count_tokens", json={"model": NAME, "messages": TALK[1:]}).json()
    assert counted["input_tokens"] == done["usage"]["input_tokens"] + done["usage"]["cache_read_input_tokens"]
