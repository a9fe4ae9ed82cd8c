"""Coding agents' requests in their shapes: answered, with ignored wishes named, or refused by the name of a field."""

from __future__ import annotations

import json

import httpx
import pytest

from helpers import agents
from helpers.serving import Running, assert_refused, events_of, named_events

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
