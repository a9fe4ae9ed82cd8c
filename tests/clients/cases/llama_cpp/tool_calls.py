"""Calls that a model writes or must write, and messages that follow them."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import FLAG, TALK, WEATHER, call, chat, tool
from clients.cases.case import Request, cases, different
from clients.cases.expect import count, each, empty, equals, error, json_text, lacks, no_more, ok, text, that

CODE = tool("python", {"code": {"type": "string", "maxLength": 9}})
CALLS = "choices.0.message.tool_calls"


def required(one: Any, **fields: Any) -> Request:
    return chat(
        TALK, tools=[one], tool_choice="required", parallel_tool_calls=False, max_tokens=300, temperature=0, **fields
    )


def one_call(name: str, argument: str) -> list[Any]:
    arguments = json_text(f"{CALLS}.0.function.arguments", lambda found: argument in found)
    return ok(count(CALLS, 1), equals(f"{CALLS}.0.function.name", name), arguments, empty("choices.0.message.content"))


def one_streamed(name: str, argument: str) -> list[Any]:
    arguments = json_text("calls.0.arguments", lambda found: argument in found)
    return ok(count("calls", 1), equals("calls.0.names", [name]), arguments, empty("texts.0"))


REQUIRED = cases({
    "a required call of a constant": (required(FLAG), one_call("test", "success"), "tools"),
    "a required call of code": (required(CODE), one_call("python", "code"), "tools"),
    "a stream of a required call of a constant": (required(FLAG, stream=True), one_streamed("test", "success"),
        "tools"),
    "a stream of a required call of code": (required(CODE, stream=True), one_streamed("python", "code"), "tools"),
})  # fmt: skip
NO_CALL = cases({
    f"no call: {name}{' in a stream' if stream else ''}": (chat(TALK, max_tokens=64, tools=tools,
        tool_choice=choice, stream=stream), no_more("events.*.choices.*.delta.tool_calls") if stream
        else lacks(CALLS), "tools") for name, tools, choice
        in (("no tools", None, None), ("an empty list", [], None), ("a tool", [FLAG], None),
        ("a choice of none", [CODE], "none")) for stream in (False, True)
})  # fmt: skip
RESULT = [
    {"role": "system", "content": "You are a tools-calling assistant."},
    {"role": "user", "content": "What is the y coordinate at 30 degrees?"},
    {"role": "assistant", "content": None, "tool_calls": [call("calculate", '{"expression":"sin(30 * pi / 180)"}')]},
    {"role": "tool", "name": "calculate", "content": "0.55644242476", "tool_call_id": "call_6789"},
]
LOCATION = equals(f"{CALLS}.0.function.name", "get_current_weather")
MODEL = cases({
    "a call that the model writes": (chat(TALK, tools=[WEATHER], temperature=0), count(CALLS, 1), LOCATION,
        json_text(f"{CALLS}.0.function.arguments", lambda found: found["city"] == "Dallas"), "calls"),
    "a stream of a call that the model writes": (chat(TALK, tools=[WEATHER], temperature=0, stream=True),
        count("calls", 1), json_text("calls.0.arguments", lambda found: found["city"] == "Dallas"), "calls"),
    "an answer to the result of a call": (chat(RESULT, tools=[WEATHER], temperature=0), lacks(CALLS),
        text("choices.0.message.content", "98"), "answers"),
    "a stream of an answer to the result of a call": (chat(RESULT, tools=[WEATHER], temperature=0, stream=True),
        equals("calls", []), text("texts.0", "98"), "answers"),
    "thoughts": (chat(TALK, temperature=0), text("choices.0.message.reasoning_content", "Let me think"),
        text("choices.0.message.content", "^It is 98"), lacks(CALLS), "thinks"),
    "a stream of thoughts": (chat(TALK, temperature=0, stream=True), text("reasoning", "Let me think"),
        text("texts.0", "It is 98"), "thinks"),
    "an answer without thoughts": (chat(TALK, temperature=0), lacks("choices.0.message.reasoning_content"),
        text("choices.0.message.content", "^It is 98"), "answers"),
    "hello world by a tool": (chat([{"role": "user", "content": "print hello world with python"}],
        tools=[CODE], tool_choice="required", max_tokens=300, parallel_tool_calls=False),
        one_call("python", "code"), "tools"),
    "each piece of a call has an index": (chat(TALK, tools=[WEATHER], temperature=0, stream=True),
        each("events.*.choices.*.delta.tool_calls.*.index", "0", lambda one: one == 0),
        that("one id", lambda bodies: len(bodies[-1]["calls"][0]["ids"]) == 1), "calls"),
})  # fmt: skip
BAD = {"role": "assistant", "content": None, "tool_calls": [call("test", "{")]}
SENT = cases({
    "arguments of an earlier call that are no JSON": (chat([TALK[1], BAD, TALK[1]], max_tokens=8), error(400),
        different(
        "The template gets the text that the model wrote, so that a conversation with a cut call can go on."), "tools"),
})  # fmt: skip
SUITES = {"test_tool_call.py": [*REQUIRED, *NO_CALL, *MODEL, *SENT]}
