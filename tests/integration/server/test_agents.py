"""Coding agents' requests in their shapes: answered, with ignored wishes named, or refused by the name of a field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

import foresay
from helpers import agents, chains, tiny
from helpers.serving import Running, choice_of, events_of, named_events
from helpers.tool_chats import PIECES, TEMPLATE

CALLS = [("weather", {"city": "Rome"}), ("time", {})]
"""Calls of the model of the tests."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that reasons, answers and makes two calls, whose context has room for an agent's prompt."""
    special = ["<tool_call>", "<think>", "</think>"]
    folder = chains.save(tmp_path_factory.mktemp("agent"), PIECES, TEMPLATE + "{# </think> #}", special=special)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 15}))
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        yield running


def changed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a body with another value at a path; "+" appends to a list."""
    out = deepcopy(body)
    *parts, last = path.split(".")
    at: Any = out
    for part in parts:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if last == "+":
        at.append(value)
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return out


def test_claude_code(agent: Running) -> None:
    """Blocks, schemas and beta headers; what no model here can do is named."""
    url = f"{agent.url}/v1/messages?beta=true"
    with httpx.stream("POST", url, json=agents.CLAUDE, headers=agents.CLAUDE_HEADERS, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        ignored = answer.headers["x-foresay-ignored"].split(", ")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert sorted(ignored) == ["context_management", "output_config.effort"]
    kinds = [one["content_block"]["type"] for one in events if one["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and events[-2]["delta"]["stop_reason"] == "tool_use"
    counted = {name: agents.CLAUDE[name] for name in ("model", "messages", "system", "tools", "thinking")}
    answer = httpx.post(f"{agent.url}/v1/messages/count_tokens?beta=true", json=counted, headers=agents.CLAUDE_HEADERS)
    usage = events[0]["message"]["usage"]
    assert answer.json()["input_tokens"] == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) > 1000


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({"thinking": {"type": "adaptive"}}, {"context_management", "output_config.effort"}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000, "display": "summarized"}, "speed": "fast"},
         {"thinking.budget_tokens", "thinking.display", "speed", "context_management", "output_config.effort"}),
        ({"context_management": None, "output_config": None, "thinking": None, "service_tier": "auto"}, set()),
        ({"system": "You are an agent.", "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         {"context_management", "output_config.effort"}),
    ],
)  # fmt: skip
def test_variants_of_claude_code(changes: dict[str, Any], ignored: set[str], agent: Running) -> None:
    answer = agent.post("/v1/messages", **{**agents.CLAUDE, "stream": False, **changes})
    assert answer.status_code == 200, answer.text
    assert set(filter(None, answer.headers.get("x-foresay-ignored", "").split(", "))) == ignored
    calls = [(one["name"], one["input"]) for one in answer.json()["content"] if one["type"] == "tool_use"]
    assert calls == (CALLS[:1] if "tool_choice" in changes else CALLS)


def test_codex(agent: Running) -> None:
    """The items of a conversation, and those of the answer as the next request sends them back."""
    events = named_events(f"{agent.url}/v1/responses", agents.CODEX)
    assert events[-1]["type"] == "response.completed"
    output = events[-1]["response"]["output"]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == output and [one["type"] for one in output] == ["reasoning", "message", *["function_call"] * 2]
    assert [(one["name"], json.loads(one["arguments"])) for one in output[2:]] == CALLS
    assert {"input_tokens", "output_tokens", "total_tokens"} <= events[-1]["response"]["usage"].keys()
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "ok"} for one in output[2:]]
    body = {**agents.CODEX, "input": [*agents.CODEX["input"], *output, *results], "stream": False}
    answer = agent.post("/v1/responses", **body)
    assert answer.status_code == 200, answer.text
    ignored = {"reasoning.effort", "text.verbosity", "client_metadata"}
    assert set(answer.headers["x-foresay-ignored"].split(", ")) == ignored
    assert answer.json()["usage"]["input_tokens"] > events[-1]["response"]["usage"]["input_tokens"]


def test_another_servers_reasoning_is_left_out(agent: Running) -> None:
    """As in the Messages API: its text is encrypted."""
    plain, given = (
        agent.post("/v1/responses", **changed({**agents.CODEX, "stream": False}, "input.3.encrypted_content", value))
        for value in (None, "gAAAA")
    )
    assert given.status_code == 200, given.text
    assert given.json()["usage"]["input_tokens"] == plain.json()["usage"]["input_tokens"]
    assert "input.reasoning.encrypted_content" in given.headers["x-foresay-ignored"]
    assert "encrypted_content" not in plain.headers["x-foresay-ignored"]


def test_the_schema_of_codex_exec(server: Running) -> None:
    form = {"type": "json_schema", "strict": True, "name": "codex_output_schema", "schema": {"enum": ["rain", "sun"]}}
    body = {**agents.CODEX, "tools": [], "stream": False, "text": {"format": form}}
    answer = server.post("/v1/responses", **body)
    assert json.loads(answer.json()["output"][0]["content"][0]["text"]) in ("rain", "sun"), answer.text


@pytest.mark.parametrize("name", agents.CHATS)
def test_clients_of_chat_completions(name: str, agent: Running) -> None:
    """Streams with their usage; labels of caching are accepted, the effort is named as ignored."""
    body = agents.CHATS[name]
    answer = agent.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-foresay-ignored", "") == ("reasoning_effort" if name == "Cline" else "")
    events = events_of(answer)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
    deltas = [one["choices"][0]["delta"] for one in events[:-1]]
    calls = [
        call["function"]["name"] for one in deltas for call in one.get("tool_calls", []) if "name" in call["function"]
    ]
    wanted = {"aider": [], "Cline": ["weather"], "Continue": ["weather", "time"]}
    assert calls == wanted[name] or (name == "aider" and not calls)
    assert "".join(one.get("reasoning_content") or "" for one in deltas) == "What is asked?"


def test_labels_of_caching_change_nothing(agent: Running) -> None:
    body = {**agents.CHATS["Continue"], "stream": False, "stream_options": None}
    plain = json.loads(json.dumps(body).replace(json.dumps(agents.CACHED)[1:-1], '"name": null'))
    assert "cache_control" not in json.dumps(plain)
    tokens = [agent.post("/v1/chat/completions", **one).json()["usage"]["prompt_tokens"] for one in (body, plain)]
    assert tokens[0] == tokens[1]


def test_continue_fills_in(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the stop strings of a language, of which there are many."""
    folder = tiny.save_filling(tmp_path_factory.mktemp("filling"))
    with Running(foresay.load(str(folder))) as running:
        answer = running.post("/v1/completions", **agents.FILL_IN)
        assert answer.status_code == 200, answer.text
        streamed = "".join(one["choices"][0]["text"] for one in events_of(answer))
        whole = running.post("/v1/completions", **{**agents.FILL_IN, "stream": False})
        assert choice_of(whole)["text"] == streamed != ""
        filled = running.post("/tokenize", prompt=f"<fim_prefix>{'hello'}<fim_suffix> you<fim_middle>").json()["count"]
        assert whole.json()["usage"]["prompt_tokens"] == filled


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview"])
def test_codex_searches_nothing_and_is_told_so(kind: str, agent: Running) -> None:
    search = {"type": kind, "external_web_access": False, "filters": {"allowed_domains": ["a.example"]}}
    tools = [search, *agents.CODEX["tools"]]
    found = [
        agent.post("/v1/responses", **{**agents.CODEX, "tools": one, "stream": False}) for one in (tools, tools[1:])
    ]
    assert found[0].status_code == 200, found[0].text
    assert f"tools.{kind}" in found[0].headers["x-foresay-ignored"].split(", ")
    assert found[0].json()["tools"] == found[1].json()["tools"] and len(found[0].json()["tools"]) == len(tools) - 1
    refused = agent.post("/v1/responses", **{**agents.CODEX, "tools": [search, {"type": "local_shell"}]})
    assert refused.json()["error"]["param"] == "tools.1"


IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
PIXEL = "data:image/png;base64,AAAA"
FREE = {"name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
SHELL = {"status": "completed", "action": {"type": "exec", "command": ["ls"]}}
BODIES = {"messages": agents.CLAUDE, "responses": agents.CODEX, "chat/completions": agents.CHATS["Cline"]}
REFUSED: list[tuple[str, str, Any]] = [
    ("messages", "tools.+", {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}),
    ("messages", "messages.2.content.0.content", [{"type": "image", "source": IMAGE}]),
    ("messages", "messages.0.content.+", {"type": "document", "source": IMAGE}),
    ("messages", "mcp_servers", [{"type": "url", "url": "https://a.example", "name": "a"}]),
    ("messages", "tools.0.defer_loading", True), ("messages", "fallback_model", "other"),
    ("responses", "tools.+", {"type": "local_shell"}), ("responses", "tools.+", {"type": "custom", **FREE}),
    ("responses", "tools.+", {"type": "namespace", "name": "mcp", "description": "", "tools": []}),
    ("responses", "input.+", {"type": "custom_tool_call", "call_id": "c", "name": "x", "input": "y"}),
    ("responses", "input.+", {"type": "custom_tool_call_output", "call_id": "c", "output": "y"}),
    ("responses", "input.+", {"type": "local_shell_call", "call_id": "c", **SHELL}),
    ("responses", "input.+", {"type": "compaction", "encrypted_content": "x"}),
    ("responses", "input.1.content.+", {"type": "input_image", "image_url": PIXEL}),
    ("responses", "input.5.namespace", "mcp"), ("responses", "previous_response_id", "resp_1"),
    ("responses", "include.+", "file_search_call.results"),
    ("chat/completions", "messages.1.content.+", {"type": "image_url", "image_url": {"url": PIXEL}}),
    ("chat/completions", "tools.+", {"type": "web_search"}),
]  # fmt: skip
"""Route, path in the body of an agent, and the features that no model here has."""


@pytest.mark.parametrize(("route", "path", "value"), REFUSED)
def test_what_no_model_here_can_do_is_refused_by_name(route: str, path: str, value: Any, agent: Running) -> None:
    at: Any = BODIES[route]
    for part in path.split(".")[:-1]:
        at = at[int(part) if part.isdigit() else part]
    answer = agent.post(f"/v1/{route}", **changed(BODIES[route], path, value))
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(path.replace("+", str(len(at))))
