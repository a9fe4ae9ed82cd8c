"""OpenAI's Responses API and Anthropic's Messages API: texts, calls and reasoning of chat completions, in their own formats."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.server import hints
from foresay.server.events import Output
from helpers import tiny
from helpers.serving import Running, assert_refused, choice_of, named_events
from helpers.tool_chats import TALK, TEMPLATE, TIME, WEATHER

APIS = pytest.mark.parametrize("api", ["responses", "messages"])
BODY: dict[str, dict[str, Any]] = {
    "responses": {"input": "hello there", "temperature": 0},
    "messages": {"messages": TALK, "max_tokens": 40, "temperature": 0},
}
FUNCTIONS = [WEATHER["function"], TIME["function"]]
TOOLS: dict[str, list[dict[str, Any]]] = {
    "responses": [{"type": "function", **one} for one in FUNCTIONS],
    "messages": [{"name": one["name"], "input_schema": one.get("parameters", {})} for one in FUNCTIONS],
}
DAY = {
    "properties": {"day": {"enum": ["monday"]}}, "type": "object", "required": ["day"], "additionalProperties": False,
}  # fmt: skip
LOGPROBS = {"include": ["message.output_text.logprobs"]}


def post(running: Running, api: str, **body: Any) -> dict[str, Any]:
    return running.answer(f"/v1/{api}", **{**BODY[api], **body})


def limit(api: str, most: int) -> dict[str, int]:
    return {"max_output_tokens" if api == "responses" else "max_tokens": most}


def count(running: Running, **body: Any) -> int:
    return int(running.answer("/v1/messages/count_tokens", **{"messages": TALK, **body})["input_tokens"])


def parts(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Reasoning, texts and calls in their order."""
    out: list[tuple[str, Any]] = []
    for one in body["output"] if "output" in body else body["content"]:
        kind = one["type"]
        if kind == "function_call":
            out.append((one["name"], json.loads(one["arguments"])))
        elif kind == "tool_use":
            out.append((one["name"], one["input"]))
        else:
            text = one["content"][0]["text"] if "content" in one else one.get("thinking", one.get("text"))
            out.append(("text" if kind in ("message", "text") else "reasoning", text))
    return out


def chat(running: Running, messages: list[Any], **body: Any) -> dict[str, Any]:
    return choice_of(running.chat(messages=messages, temperature=0, **body))


CHAIN = [("reasoning", "What is asked?"), ("text", "Let me look."), ("weather", {"city": "Rome"}), ("time", {})]
"""Parts of the output of the model `chain`."""


def test_a_text_is_that_of_a_chat(server: Running) -> None:
    text = chat(server, [{"role": "system", "content": "be brief"}, *TALK], max_tokens=9)["message"]["content"]
    briefly: dict[str, Any] = {"instructions": "be brief", "max_output_tokens": 9}
    answer = server.client.responses.create(model="tiny", **BODY["responses"], **briefly)
    assert answer.output_text == text != ""
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert answer.usage is not None and answer.usage.output_tokens == 9
    assert answer.instructions == "be brief" and answer.max_output_tokens == 9
    body = post(server, "messages", system=[{"type": "text", "text": "be brief"}], max_tokens=9)
    assert body["content"] == [{"type": "text", "text": text}] and body["usage"]["output_tokens"] == 9
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "max_tokens")


SENT: dict[str, dict[str, Any]] = {
    "responses": {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "content": [
            {"type": "output_text", "text": "one moment", "annotations": [], "logprobs": []}]},
        *({"type": "function_call", "id": f"fc_{one}", "status": "completed", "call_id": one, "name": "time",
           "arguments": '{"zone": "utc"}'} for one in "ab"),
        {"type": "function_call_output", "call_id": "a", "output": "9"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "10"}]},
        {"role": "user", "content": "and now"},
    ]},
    "messages": {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "one moment"},
            *({"type": "tool_use", "id": one, "name": "time", "input": {"zone": "utc"}} for one in "ab")]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "9"},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "10"}], "is_error": False},
            {"type": "text", "text": "and now"}]},
    ]},
}  # fmt: skip


@APIS
def test_a_conversation(api: str, server: Running) -> None:
    """Texts, reasoning, calls and results become the messages of a chat; items of a response can be sent back."""
    function = {"name": "time", "arguments": '{"zone": "utc"}'}
    calls = [{"id": one, "type": "function", "function": function} for one in "ab"]
    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "hm", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one, "content": text} for one, text in (("a", "9"), ("b", "10"))),
        {"role": "user", "content": "and now"},
    ]
    body = post(server, api, **SENT[api], **limit(api, 12))
    assert parts(body) == [("text", chat(server, talk, max_tokens=12)["message"]["content"])]
    counted, usage = server.answer("/tokenize", messages=talk)["count"], body["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == counted
    if api == "messages":
        assert count(server, **SENT[api]) == counted < count(server, **SENT[api], tools=TOOLS[api]) - 20


@APIS
def test_reasoning_text_and_calls(api: str, chain: Running) -> None:
    body = post(chain, api, tools=TOOLS[api])
    assert parts(body) == CHAIN
    if api == "messages":
        assert body["stop_reason"] == "tool_use" and body["content"][2]["id"] != body["content"][3]["id"]
        assert body["content"][0]["signature"] == ""
        single = {"type": "auto", "disable_parallel_tool_use": True}
        assert parts(post(chain, api, tools=TOOLS[api], tool_choice=single)) == CHAIN[:3]
        return
    assert body["status"] == "completed" == body["output"][1]["status"] and body["tools"][0]["name"] == "weather"
    counts = set()
    for length in (1, 4, 8):
        usage = post(chain, api, tools=TOOLS[api], foresay={"drafter": "suffix", "length": length})["usage"]
        counts.add(usage["output_tokens_details"]["reasoning_tokens"])
    assert counts == {3}, "whatever the drafts"
    (text,) = [one for one in post(chain, api, tools=TOOLS[api], **LOGPROBS)["output"] if one["type"] == "message"]
    tokens = "".join(one["token"] for one in text["content"][0]["logprobs"])
    assert tokens.startswith("<think>\nWhat is") and "Let me look." in tokens, "of all tokens of the output"


def events(running: Running, api: str, **body: Any) -> list[dict[str, Any]]:
    return named_events(f"{running.url}/v1/{api}", {**BODY[api], **body})


def test_the_events_of_a_stream_build_the_message(chain: Running) -> None:
    found = events(chain, "messages", tools=TOOLS["messages"])
    whole = post(chain, "messages", tools=TOOLS["messages"])
    assert found[0]["type"] == "message_start" and found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["input_tokens"] > 0 and found[0]["message"]["stop_reason"] is None
    steps = [key for key, _ in groupby((one["type"], one["index"]) for one in found[1:-2])]
    assert steps == [(f"content_block_{kind}", i) for i in range(4) for kind in ("start", "delta", "stop")]
    blocks = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert [one["type"] for one in blocks] == [one["type"] for one in whole["content"]]
    texts = [""] * 4
    for one in found[1:-2]:
        texts[one["index"]] += "".join(value for name, value in one.get("delta", {}).items() if name != "type")
    assert texts[:2] == ["What is asked?", "Let me look."] and json.loads(texts[2]) == {"city": "Rome"}
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_events_of_a_stream_build_the_whole_response(chain: Running) -> None:
    found = events(chain, "responses", tools=TOOLS["responses"])
    kinds, whole = [one["type"] for one in found], found[-1]["response"]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    items, texts = dict[int, dict[str, Any]](), [""] * 4
    for one in found[2:-1]:
        index, kind = one["output_index"], one["type"]
        begun = one.get("item") or one.get("part") or {}
        assert not kind.endswith(".added") or not any(begun.get(name) for name in ("text", "arguments", "content"))
        if kind == "response.output_item.added":
            assert index == len(items)
        assert kind.startswith("response.output_item") or one["item_id"] == items[index]["id"]
        if kind.startswith("response.output_item"):
            assert begun["id"] == items.setdefault(index, begun)["id"]
            items[index] = begun
        texts[index] += one["delta"] if kind.endswith(".delta") else ""
    assert [items[i] for i in range(4)] == whole["output"]
    assert texts == ["What is asked?", "Let me look.", '{"city": "Rome"}', "{}"]
    hidden = r'"(id|call_id)": "\w+"|"created_at": \d+|"cached_tokens": \d+'
    same = [re.sub(hidden, "", json.dumps(one)) for one in (whole, post(chain, "responses", tools=TOOLS["responses"]))]
    assert same[0] == same[1]


@APIS
def test_required_calls_and_schemas(api: str, server: Running) -> None:
    form, is_response = {"type": "json_schema", "schema": DAY}, api == "responses"
    choices: list[Any] = ["required", {"type": "function", "name": "weather"}]
    for choice in choices if is_response else [{"type": "any"}, {"type": "tool", "name": "weather"}]:
        body = post(server, api, tools=TOOLS[api][:1], tool_choice=choice, **limit(api, 200))
        ((name, arguments),) = parts(body)
        assert name == "weather" and set(arguments) == {"city", "days"} and body.get("tool_choice", choice) == choice
    shaped = {"text": {"format": {"name": "x", **form}}} if is_response else {"output_config": {"format": form}}
    body = post(server, api, **shaped)
    assert json.loads(parts(body)[0][1]) == {"day": "monday"}
    assert not is_response or body["text"]["format"]["schema"] == DAY
    never = "none" if is_response else {"type": "none"}
    none = post(server, api, tools=TOOLS[api], tool_choice=never, **limit(api, 5))
    assert [kind for kind, _ in parts(none)] == ["text"]


def test_labels_statistics_and_log_probabilities(server: Running) -> None:
    labels = {
        "store": True, "user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s",
        "service_tier": "flex", "truncation": "disabled", "background": False, "previous_response_id": None,
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"},
    }  # fmt: skip
    plain, labelled = (post(server, "responses", max_output_tokens=5, **more) for more in ({}, labels))
    assert plain["output"][0]["content"] == labelled["output"][0]["content"]
    assert labelled["store"] is False, "nothing is stored"
    options = {**LOGPROBS, "top_logprobs": 2, "max_output_tokens": 4, "foresay": {"stats": True}}
    body = post(server, "responses", **options)
    part = body["output"][0]["content"][0]
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"] and body["foresay"]["passes"] > 0
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    last = [one for one in events(server, "responses", **options) if one["type"] == "response.output_text.done"]
    assert last[0]["logprobs"] == part["logprobs"]


def test_a_stop_sequence_is_named(server: Running) -> None:
    text = post(server, "messages")["content"][0]["text"]
    stop = text[5:8]
    body = post(server, "messages", stop_sequences=["not in the text", stop])
    assert body["content"][0]["text"] == text[: text.index(stop)]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    assert chat(server, TALK, stop=[stop], max_tokens=40)["stop_reason"] == stop


def test_turns_of_other_servers(server: Running) -> None:
    """Turns of the role system come first, encrypted reasoning is left out, a last message of the assistant is continued."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, TALK[-1]]
    plain = count(server, messages=turns, system="a\n\nb")
    hidden = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "ho"}]
    turns[1:2] = [{"role": "system", "content": "b"}, {"role": "assistant", "content": hidden}]
    assert count(server, messages=turns, system="a", cache_control={"type": "ephemeral"}) == plain
    talk = [*TALK, {"role": "assistant", "content": "well"}]
    text = post(server, "messages", messages=talk, max_tokens=9)["content"][0]["text"]
    again = chat(server, talk, max_tokens=9, continue_final_message=True, add_generation_prompt=False)
    assert text == again["message"]["content"] != chat(server, talk, max_tokens=9)["message"]["content"]


def test_errors_have_the_shape_of_the_api(serve: Any) -> None:
    running, headers = serve(keys=frozenset({"secret"})), {"x-api-key": "secret"}
    denied = running.post("/v1/messages", **BODY["messages"])
    assert denied.status_code == 401 and denied.json()["error"]["type"] == "authentication_error"
    wrong = running.get("/v1/messages", **headers)
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"


def test_an_error_in_a_stream_is_its_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Output.take

    def broken(self: Output, chunk: Any) -> Any:
        if len(self.steps) == 1:
            raise foresay.ConfigError("broken")
        return take(self, chunk)

    monkeypatch.setattr(Output, "take", broken)
    error = {"message": "broken", "type": "invalid_request_error", "param": "messages", "code": None}
    chunks = server.chat(stream=True, max_tokens=30).text.strip().split("\n\n")
    assert json.loads(chunks[-1].removeprefix("data: ")) == {"error": error} and len(chunks) > 2
    last = {api: events(server, api, **limit(api, 30))[-1] for api in BODY}
    assert last["messages"] == {"type": "error", "error": error}
    response, cause = last["responses"]["response"], {"code": "server_error", "message": "broken"}
    assert last["responses"]["type"] == "response.failed"
    assert (response["status"], response["error"]) == ("failed", cause)
    lines = server.post("/api/chat", messages=TALK, options={"num_predict": 30}).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "messages: broken"} and '"done":true' not in "".join(lines)


def test_variables_of_the_chat_template(serve: Any, chat_folder: Path) -> None:
    """Known ones reach the template, others are refused; disabled thinking is one of them."""
    generator, plain = foresay.load(str(chat_folder)), tiny.tokenizer()
    extra = "{% if enable_thinking is defined %}{{ 'long' if enable_thinking else 'quick' }}{% endif %}"
    generator.tokenizer.chat_template = extra + "{{ reasoning_effort or '' }}" + TEMPLATE  # type: ignore[union-attr]
    running = serve(generator)
    base = count(running)
    for fields, text in (
        ({"reasoning_effort": "high"}, "high"), ({"chat_template_kwargs": {"enable_thinking": False}}, "quick"),
        ({"thinking": {"type": "disabled"}}, "quick"), ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "long"), ({"output_config": {"effort": "max"}}, "max"),
    ):  # fmt: skip
        is_chat = fields.keys() & {"reasoning_effort", "chat_template_kwargs"}
        found = running.answer("/tokenize", messages=TALK, **fields)["count"] if is_chat else count(running, **fields)
        assert found == base + len(plain(text).input_ids), fields
    for name in ("mood", "messages", "tokenize", "bos_token"):
        known = f"no variable {name!r}; it has: enable_thinking, reasoning_effort"
        assert_refused(running.chat(chat_template_kwargs={name: 1}), "chat_template_kwargs", known)


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens, thinking"),
        ("messages", {"output_config": {"effort": "high"}}, "output_config.effort"),
        ("messages", {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ("messages", {"thinking": {"type": "adaptive", "budget_tokens": 2000, "display": "summarized"}, "speed": "fast"},
            "thinking.budget_tokens, thinking.display, speed"),
        ("messages", {"thinking": {"type": "disabled"}, "metadata": {"user_id": "x"}, "service_tier": "auto",
            "context_management": None, "output_config": None}, ""),
        ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("chat/completions", {"reasoning_effort": "none", "verbosity": "medium", "store": True}, ""),
        ("chat/completions", {"verbosity": "low", "prompt_cache_retention": "24h"}, "prompt_cache_retention, verbosity"),
        ("chat/completions", {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("chat/completions", {"thinking_budget_tokens": 5}, "thinking_budget_tokens"),
        ("chat/completions", {"guided_regex": "a", "guided_decoding_backend": "x"}, "guided_decoding_backend"),
        ("responses", {"reasoning": {"effort": "xhigh", "summary": "detailed"}}, "reasoning.effort, reasoning.summary"),
        ("responses", {"text": {"verbosity": "low"}, "client_metadata": {"a": "b"}}, "client_metadata, text.verbosity"),
        ("responses", {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}, ""),
    ],
)  # fmt: skip
def test_hints_are_ignored_by_name(
    path: str, fields: dict[str, Any], ignored: str, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Efforts and budgets of Claude Code and Codex: a header of the answer names them, and once the log."""
    hints._log.cache_clear()
    given = {"input": "hello"} if path == "responses" else {"messages": TALK}
    for more, named in ((fields, ignored), (fields, ignored), ({}, "")):
        answer = server.post(f"/v1/{path}", **given, **limit(path, 16), **more)
        assert answer.status_code == 200, answer.text
        assert sorted(answer.headers.get("x-foresay-ignored", "").split(", ")) == sorted(named.split(", "))
    for name in ignored.split(", ") if ignored else ():
        assert len([one for one in caplog.messages if f"the hint {name}," in one]) == 1, name
