"""Anthropic's Messages API: the same texts, calls and reasoning as chat completions, in its own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from foresay.server import hints
from helpers import tiny
from helpers.serving import Running, choice_of, named_events
from helpers.tool_chats import TALK, TEMPLATE, WEATHER

WEATHER_TOOL = {"name": "weather", "description": "d", "input_schema": WEATHER["function"]["parameters"]}
TIME_TOOL = {"name": "time", "input_schema": {"type": "object", "properties": {}}}


def post(running: Running, path: str = "", **body: Any) -> httpx.Response:
    given = {"messages": TALK, **body} if path else {"messages": TALK, "max_tokens": 40, "temperature": 0, **body}
    return httpx.post(f"{running.url}/v1/messages{path}", json=given, timeout=60)


def chat(running: Running, messages: list[Any], **body: Any) -> dict[str, Any]:
    return choice_of(running.chat(messages=messages, temperature=0, **body))


def test_a_text_is_that_of_a_chat(server: Running) -> None:
    body = post(server, system=[{"type": "text", "text": "be brief"}], max_tokens=7).json()
    talk = [{"role": "system", "content": "be brief"}, *TALK]
    assert body["content"] == [{"type": "text", "text": chat(server, talk, max_tokens=7)["message"]["content"]}]
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert body["usage"]["output_tokens"] == 7


def test_a_stop_sequence_is_named(server: Running) -> None:
    text = post(server).json()["content"][0]["text"]
    stop = text[5:8]
    body = post(server, stop_sequences=["not in the text", stop]).json()
    assert body["content"][0]["text"] == text[: text.index(stop)]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    assert chat(server, TALK, stop=[stop], max_tokens=40)["stop_reason"] == stop


def test_a_conversation_of_blocks(server: Running) -> None:
    """Texts, thinking, calls and results become the messages of a chat."""
    call = {"type": "tool_use", "name": "time", "input": {"zone": "utc"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "one moment"},
            {**call, "id": "a"}, {**call, "id": "b"}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "9"},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "10"}], "is_error": False},
            {"type": "text", "text": "and now"}]},
    ]  # fmt: skip

    def sent(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "time", "arguments": '{"zone": "utc"}'}}

    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "hm", "tool_calls": [sent("a"), sent("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "9"},
        {"role": "tool", "tool_call_id": "b", "content": "10"},
        {"role": "user", "content": "and now"},
    ]
    body = post(server, messages=messages, max_tokens=12).json()
    assert body["content"][0]["text"] == chat(server, talk, max_tokens=12)["message"]["content"]
    counted = server.post("/tokenize", messages=talk).json()["count"]
    assert post(server, "/count_tokens", messages=messages).json() == {"input_tokens": counted}
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    with_tools = post(server, "/count_tokens", messages=messages, tools=[WEATHER_TOOL]).json()["input_tokens"]
    assert with_tools > counted + 20


def test_reasoning_text_and_calls(chain: Running) -> None:
    body = post(chain, tools=[WEATHER_TOOL, TIME_TOOL]).json()
    thinking, text, first, second = body["content"]
    assert thinking == {"type": "thinking", "thinking": "What is asked?", "signature": ""}
    assert text == {"type": "text", "text": "Let me look."}
    assert [(one["type"], one["name"], one["input"]) for one in (first, second)] == [
        ("tool_use", "weather", {"city": "Rome"}),
        ("tool_use", "time", {}),
    ]
    assert body["stop_reason"] == "tool_use" and first["id"] != second["id"]


def events(running: Running, **body: Any) -> list[dict[str, Any]]:
    given = {"messages": TALK, "max_tokens": 40, "temperature": 0, **body}
    return named_events(f"{running.url}/v1/messages", given)


def test_the_events_of_a_stream_build_the_message(chain: Running) -> None:
    found = events(chain, tools=[WEATHER_TOOL, TIME_TOOL])
    assert found[0]["type"] == "message_start" and found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["input_tokens"] > 0 and found[0]["message"]["stop_reason"] is None
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    open_index = None
    for one in found[1:-2]:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks) and open_index is None
            blocks.append(one["content_block"])
            texts.append("")
            open_index = one["index"]
        elif one["type"] == "content_block_delta":
            assert one["index"] == open_index
            ((_, added),) = [pair for pair in one["delta"].items() if pair[0] != "type"]
            texts[-1] += added
        else:
            assert one["type"] == "content_block_stop" and one["index"] == open_index
            open_index = None
    whole = post(chain, tools=[WEATHER_TOOL, TIME_TOOL]).json()
    assert [one["type"] for one in blocks] == [one["type"] for one in whole["content"]]
    assert texts[:2] == ["What is asked?", "Let me look."] and json.loads(texts[2]) == {"city": "Rome"}
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_schema_and_turns_of_other_servers(server: Running) -> None:
    """A schema in output_config, turns of the role system, and encrypted reasoning, which is left out."""
    schema = {
        "type": "object",
        "properties": {"day": {"enum": ["monday"]}},
        "required": ["day"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(post(server, output_config=config).json()["content"][0]["text"]) == {"day": "monday"}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "so"},
    ]
    plain = post(server, "/count_tokens", messages=turns, system="a\n\nb").json()
    hidden = {"type": "redacted_thinking", "data": "x"}
    turns[1] = {"role": "assistant", "content": [hidden, {"type": "text", "text": "ho"}]}
    turns.insert(1, {"role": "system", "content": "b"})
    assert (
        post(server, "/count_tokens", messages=turns, system="a", cache_control={"type": "ephemeral"}).json() == plain
    )


def test_an_error_in_a_stream_has_its_type(serve: Any) -> None:
    running = serve(timeout_s=0.3)
    found = events(running, max_tokens=4000)
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "timeout_error"


def test_required_calls(server: Running) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        (call,) = post(server, tools=[WEATHER_TOOL], tool_choice=choice, max_tokens=200).json()["content"]
        assert call["name"] == "weather" and set(call["input"]) == {"city", "days"}
    assert post(server, tools=[WEATHER_TOOL], tool_choice={"type": "none"}).json()["content"][0]["type"] == "text"


def test_the_last_message_of_the_assistant_is_continued(server: Running) -> None:
    talk = [*TALK, {"role": "assistant", "content": "well"}]
    body = post(server, messages=talk, max_tokens=9).json()
    again = chat(server, talk, max_tokens=9, continue_final_message=True, add_generation_prompt=False)
    assert body["content"][0]["text"] == again["message"]["content"]
    assert body["content"][0]["text"] != chat(server, talk, max_tokens=9)["message"]["content"]


def test_keys_and_unknown_methods(serve: Any) -> None:
    running = serve(keys=frozenset({"secret"}))
    denied = post(running)
    assert denied.status_code == 401 and denied.json()["error"]["type"] == "authentication_error"
    body = {"messages": TALK, "max_tokens": 3}
    allowed = httpx.post(f"{running.url}/v1/messages", json=body, headers={"x-api-key": "secret"}, timeout=60)
    assert allowed.status_code == 200
    wrong = httpx.get(f"{running.url}/v1/messages", headers={"x-api-key": "secret"})
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"


def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    """Known ones reach the template, others are refused; disabled thinking is one of them."""
    folder = tiny.save(tmp_path)
    tokenizer = tiny.tokenizer()
    extra = "{% if enable_thinking is defined %}{{ 'long' if enable_thinking else 'quick' }}{% endif %}"
    extra += "{{ reasoning_effort or '' }}"
    tokenizer.chat_template = extra + TEMPLATE
    tokenizer.save_pretrained(folder)
    running = Running(foresay.load(str(folder)))

    def prompt_tokens(**fields: Any) -> int:
        answer = running.chat(max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    def encoded(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    try:
        base = prompt_tokens()
        assert prompt_tokens(reasoning_effort="high") == base + encoded("high")
        assert prompt_tokens(chat_template_kwargs={"enable_thinking": False}) == base + encoded("quick")
        counts = [
            post(running, "/count_tokens", **more).json()["input_tokens"]
            for more in (
                {},
                {"thinking": {"type": "disabled"}},
                {"thinking": {"type": "adaptive"}},
                {"thinking": {"type": "enabled", "budget_tokens": 2000}},
                {"output_config": {"effort": "max"}},
            )
        ]
        assert counts == [base, base + encoded("quick"), base, base + encoded("long"), base + encoded("max")]
        for name in ("mood", "messages", "tokenize", "bos_token"):
            answer = running.chat(chat_template_kwargs={name: 1})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"
            assert (
                f"no variable {name!r}; it has: enable_thinking, reasoning_effort" in answer.json()["error"]["message"]
            )
    finally:
        running.close()


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens, thinking"),
        ("messages", {"thinking": {"type": "adaptive", "display": "summarized"}}, "thinking.display"),
        ("messages", {"output_config": {"effort": "high"}}, "output_config.effort"),
        ("messages", {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ("messages", {"thinking": {"type": "disabled"}, "metadata": {"user_id": "x"}}, None),
        ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("chat/completions", {"reasoning_effort": "none", "verbosity": "medium", "store": True}, None),
        (
            "chat/completions",
            {"verbosity": "low", "prompt_cache_retention": "24h"},
            "verbosity, prompt_cache_retention",
        ),
        ("responses", {"reasoning": {"effort": "xhigh", "summary": "detailed"}}, "reasoning.summary, reasoning.effort"),
        ("responses", {"text": {"verbosity": "low"}, "client_metadata": {"a": "b"}}, "client_metadata, text.verbosity"),
        ("responses", {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_hints_are_ignored_by_name(
    path: str, fields: dict[str, Any], ignored: str | None, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Efforts and budgets of Claude Code and Codex: the answer is that without them, and a header names them."""
    hints._log.cache_clear()
    given = {"input": "hello"} if path == "responses" else {"messages": [{"role": "user", "content": "hello"}]}
    limit = {"max_output_tokens": 16} if path == "responses" else {"max_tokens": 3}
    for _ in range(2):
        answer = httpx.post(f"{server.url}/v1/{path}", json={**given, **limit, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        named = answer.headers.get("x-foresay-ignored")
        assert sorted((named or "").split(", ")) == sorted((ignored or "").split(", "))
    for name in (ignored or "").split(", ") if ignored else ():
        assert len([one for one in caplog.messages if f"the hint {name}," in one]) == 1, "once in the log"
    plain = httpx.post(f"{server.url}/v1/{path}", json={**given, **limit}, timeout=60)
    assert "x-foresay-ignored" not in plain.headers
