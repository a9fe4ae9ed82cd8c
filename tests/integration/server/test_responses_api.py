"""OpenAI's Responses API: the same texts, calls and reasoning as chat completions, in its own format."""

from __future__ import annotations

import json
from typing import Any

import httpx

from helpers.serving import Running, choice_of, named_events
from helpers.tool_chats import TALK, TIME, WEATHER

WEATHER_TOOL = {"type": "function", **WEATHER["function"]}
TIME_TOOL = {"type": "function", **TIME["function"]}
SCHEMA = {
    "type": "json_schema",
    "name": "day",
    "schema": {
        "type": "object",
        "properties": {"day": {"enum": ["monday", "friday"]}},
        "required": ["day"],
        "additionalProperties": False,
    },
}


def post(running: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/responses", json={"temperature": 0, **body}, timeout=60)


def test_a_text_is_that_of_a_chat(server: Running) -> None:
    answer = server.client().responses.create(
        model="tiny", input="hello there", instructions="be brief", max_output_tokens=9, temperature=0
    )
    talk = [{"role": "system", "content": "be brief"}, *TALK]
    assert (
        answer.output_text
        == choice_of(server.chat(messages=talk, temperature=0, max_tokens=9))["message"]["content"]
        != ""
    )
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert answer.usage is not None and answer.usage.output_tokens == 9
    assert answer.instructions == "be brief" and answer.max_output_tokens == 9


def test_a_conversation_of_items(server: Running) -> None:
    """Parts, calls, results and reasoning become the messages of a chat; items of a response can be sent back."""
    call = {"call_id": "call_1", "name": "time", "arguments": '{"zone": "utc"}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "content": [
            {"type": "output_text", "text": "one moment", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "status": "completed", **call},
        {"type": "function_call", "id": "fc_2", "status": "completed", **call, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "9"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "10"}]},
        {"role": "user", "content": "and now"},
    ]  # fmt: skip

    def sent(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "time", "arguments": '{"zone": "utc"}'}}

    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "hm", "tool_calls": [sent("call_1"), sent("call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "9"},
        {"role": "tool", "tool_call_id": "call_2", "content": "10"},
        {"role": "user", "content": "and now"},
    ]  # fmt: skip
    body = post(server, input=items, max_output_tokens=12).json()
    assert (
        body["output"][0]["content"][0]["text"]
        == choice_of(server.chat(messages=talk, temperature=0, max_tokens=12))["message"]["content"]
    )
    counted = server.post("/tokenize", messages=talk).json()["count"]
    assert body["usage"]["input_tokens"] == counted


def test_reasoning_text_and_calls(chain: Running) -> None:
    body = post(chain, input="hello there", tools=[WEATHER_TOOL, TIME_TOOL]).json()
    reasoning, message, first, second = body["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "What is asked?"
    assert message["content"][0]["text"] == "Let me look." and message["status"] == "completed"
    assert [one["name"] for one in (first, second)] == ["weather", "time"]
    assert [json.loads(one["arguments"]) for one in (first, second)] == [{"city": "Rome"}, {}]
    assert body["status"] == "completed" and body["tools"][0]["name"] == "weather"
    counts = {
        post(chain, input="hello there", tools=[WEATHER_TOOL], foresay={"drafter": "suffix", "length": n}).json()[
            "usage"
        ]["output_tokens_details"]["reasoning_tokens"]
        for n in (1, 4, 8)
    }
    assert counts == {body["usage"]["output_tokens_details"]["reasoning_tokens"]} == {3}, "whatever the drafts"


def events(running: Running, **body: Any) -> list[dict[str, Any]]:
    return named_events(f"{running.url}/v1/responses", {"temperature": 0, **body})


def test_the_events_of_a_stream_build_the_whole_response(chain: Running) -> None:
    found = events(chain, input="hello there", tools=[WEATHER_TOOL, TIME_TOOL])
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [one["type"] for one in found]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for one in found:
        index = one.get("output_index")
        if one["type"] == "response.output_item.added":
            assert index == len(items) and not items.get(index)
            items[index], texts[index] = one["item"], ""
        elif one["type"].endswith(".delta"):
            assert one["item_id"] == items[index]["id"]
            texts[index] += one["delta"]
        elif one["type"] == "response.output_item.done":
            assert one["item"]["id"] == items[index]["id"]
            items[index] = one["item"]
    begun = [one for one in found if one["type"] in ("response.output_item.added", "response.content_part.added")]
    assert all(
        not any((one.get("item") or one["part"]).get(name) for name in ("text", "arguments", "content"))
        for one in begun
    )
    whole = found[-1]["response"]
    assert [items[i] for i in sorted(items)] == whole["output"]
    assert list(texts.values()) == ["What is asked?", "Let me look.", '{"city": "Rome"}', "{}"]
    again = post(chain, input="hello there", tools=[WEATHER_TOOL, TIME_TOOL]).json()

    def stripped(response: dict[str, Any]) -> Any:
        hidden = {"id", "call_id", "created_at", "input_tokens_details"}
        if isinstance(response, dict):
            return {name: stripped(value) for name, value in response.items() if name not in hidden}
        return [stripped(one) for one in response] if isinstance(response, list) else response

    assert stripped(whole) == stripped(again)


def test_required_calls_and_schemas(server: Running) -> None:
    body = post(server, input="hello", tools=[WEATHER_TOOL], tool_choice={"type": "function", "name": "weather"}).json()
    (call,) = body["output"]
    arguments = json.loads(call["arguments"])
    assert call["name"] == "weather" and set(arguments) == {"city", "days"}
    assert body["tool_choice"] == {"type": "function", "name": "weather"}
    shaped = post(server, input="hello", text={"format": SCHEMA}).json()
    assert json.loads(shaped["output"][0]["content"][0]["text"])["day"] in ("monday", "friday")
    assert shaped["text"]["format"]["schema"] == SCHEMA["schema"]


def test_statistics_and_numbers_that_are_not_finite(server: Running, chain: Running) -> None:
    body = post(server, input="hello", max_output_tokens=4, foresay={"stats": True}).json()
    assert body["foresay"]["passes"] > 0
    for raw in ('{"input": "x", "metadata": {"a": 1e999}}', '{"input": "x", "metadata": {"a": NaN}}'):
        answer = httpx.post(
            f"{server.url}/v1/responses", content=raw, headers={"Content-Type": "application/json"}, timeout=60
        )
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    options = {"include": ["message.output_text.logprobs"], "tools": [WEATHER_TOOL, TIME_TOOL]}
    (text,) = [one for one in post(chain, input="hello there", **options).json()["output"] if one["type"] == "message"]
    tokens = "".join(one["token"] for one in text["content"][0]["logprobs"])
    assert tokens.startswith("<think>\nWhat is") and "Let me look." in tokens, "of all tokens of the output"


def test_log_probabilities(server: Running) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    part = post(server, input="hello", **options).json()["output"][0]["content"][0]
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    last = [one for one in events(server, input="hello", **options) if one["type"] == "response.output_text.done"]
    assert last[0]["logprobs"] == part["logprobs"]


def test_labels_change_nothing(server: Running) -> None:
    labels = {
        "store": True, "user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s",
        "service_tier": "flex", "truncation": "disabled", "background": False, "previous_response_id": None,
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"},
    }  # fmt: skip
    plain, labelled = (post(server, input="hello", max_output_tokens=5, **more).json() for more in ({}, labels))
    assert plain["output"][0]["content"] == labelled["output"][0]["content"]
    assert labelled["store"] is False, "nothing is stored"
