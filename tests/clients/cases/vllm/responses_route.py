"""OpenAI's responses."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import WEATHER_OF_RESPONSES, post, shape
from clients.cases.case import From, Request, cases, refused
from clients.cases.expect import (
    at_least,
    contains,
    count,
    each,
    equals,
    has,
    integer,
    json_text,
    lacks,
    same,
    text,
    that,
)

QUESTION = "What is 13 * 24?"
LAST = "output.-1.content.0.text"


def respond(given: Any = QUESTION, **fields: Any) -> Request:
    return post("/v1/responses", {"input": given, "max_output_tokens": 60, **fields})


def user(words: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]}


def assistant(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}], **fields}


REASONED: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
DONE = equals("status", "completed")
BASIC = cases({
    "a question": (respond(), equals("output.-1.type", "message"), text(LAST, "98"),
        equals("output.0.type", "reasoning"), text("output.0.content.0.text", "Let me think"), "thinks"),
    "instructions": (respond(instructions="End with QED."), text(LAST)),
    "a conversation": (respond([{"role": "system", "content": "End with QED."},
        {"role": "user", "content": "What is 5 * 3?"}, {"role": "assistant", "content": "15. QED."},
        {"role": "user", "content": "Times 2."}]), text(LAST)),
    "a content with its type": (respond([{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]),
        DONE, "answers"),
    "log-probabilities": (respond(include=["message.output_text.logprobs"], top_logprobs=5),
        count("output.-1.content.-1.logprobs.0.top_logprobs", 5)),
    "a stream": (respond(stream=True), equals("kinds.0", "response.created"),
        contains("kinds", "response.output_text.delta"),
        equals("kinds.-1", "response.completed"), "answers"),
})  # fmt: skip


def _closed(body: Any) -> bool:
    """Return True if each part that is added is done, and the innermost first."""
    stack: list[str] = []
    for kind in body["kinds"]:
        name, _, end = kind.rpartition(".")
        if end == "added":
            stack.append(name)
        elif end == "done" and name in ("response.output_item", "response.content_part", "response.reasoning_part"):
            last = stack.pop() if stack else ""
            if last != name:
                return False
    return not stack


SIMPLE = cases({
    "no effort of reasoning": (respond(reasoning={"effort": "none"}), DONE, lacks("incomplete_details"), "answers"),
    "the prompt in the response": (respond(enable_response_messages=True), refused("enable_response_messages")),
    "an earlier reasoning with its text": (respond([{"type": "message", "role": "user", "content": "Hello."},
        {"type": "reasoning", "id": "lol", "content": [{"type": "reasoning_text", "text": "A greeting."}],
        "summary": []}]), equals("output.0.type", "reasoning"), equals("output.1.type", "message"),
        text("output.1.content.0.text"), "thinks"),
    "earlier items with ids": (respond([user("Be short."), assistant("Yes.", id="msg_1", status="completed"),
        {**REASONED, "id": "rs_1", "status": "completed"}, user("Go.")]), DONE, text(LAST), "answers"),
    "earlier items without ids": (respond([user("Be short."), assistant("Yes."), REASONED, user("Go.")]), DONE,
        text(LAST), "answers"),
    "a second turn": ([respond("Remember 729."), respond([user("Remember 729."), assistant("Yes."), REASONED,
        user("Which number?")])], text(LAST), "answers"),
    "a second turn with the items of the first": ([respond("Remember 729."),
        respond([From(0, "output.0"), user("Which number?")])], text(LAST), "answers"),
    "a stream has the text of its last event": (respond("Say hello.", stream=True),
        same("output_text", "events.-1.response.output.-1.content.0.text", -1, -1), "answers"),
    "log-probabilities in a stream": (respond(stream=True, top_logprobs=3,
        include=["message.output_text.logprobs"]), has("events.4.logprobs")),
    "reasoning tokens": (respond(temperature=0), integer("usage.output_tokens_details.reasoning_tokens", 1), "thinks"),
    "reasoning tokens of a stream": (respond(temperature=0, stream=True),
        integer("events.-1.response.usage.output_tokens_details.reasoning_tokens", 1), "thinks"),
    "an effort of low, which the template does not read": (respond(reasoning={"effort": "low"}), DONE, "thinks"),
    "an output that is cut": (respond(max_output_tokens=20), equals("status", "incomplete"),
        equals("incomplete_details.reason", "max_output_tokens")),
    "fields of sampling": (respond(temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.2, seed=42),
        refused("top_k")),
    "parts of a stream are closed": (respond(stream=True, tools=[], background=False),
        that("closed", lambda bodies: _closed(bodies[-1])), "thinks"),
})  # fmt: skip
DATE = shape({"date": {"enum": ["Friday", "Monday"]}})
EVENT = {"type": "json_schema", "name": "calendar_event", "schema": DATE, "description": "An event.", "strict": True}
STRUCTURED = cases({
    "a schema": (respond(text={"format": EVENT}), json_text(LAST, lambda found: found["date"] in ("Friday", "Monday"))),
    "a schema and instructions": (respond(text={"format": EVENT}, instructions="Extract it."),
        json_text(LAST, lambda found: set(found) == {"date"})),
    "a stream of a schema": (respond(text={"format": EVENT}, stream=True),
        text("output_text", "date")),
})  # fmt: skip
TOOLS = [WEATHER_OF_RESPONSES]
NAMED = {"type": "function", "name": "get_current_weather"}


CITY = that("a call of a city", lambda bodies: '"city"' in next(
    one["arguments"] for one in bodies[-1]["output"] if one["type"] == "function_call"))  # fmt: skip
CALLS = cases({
    "a call": (respond(tools=TOOLS, tool_choice="auto", temperature=0), CITY,
        equals("output.0.type", "reasoning"), "calls"),
    "a required call": (respond(tools=TOOLS, tool_choice="required", temperature=0,
        max_output_tokens=200, parallel_tool_calls=False), CITY, "tools"),
    "a named call": (respond(tools=TOOLS, tool_choice=NAMED, temperature=0, max_output_tokens=200), CITY, "tools"),
    "a required call that is cut": (respond(tools=TOOLS, tool_choice="required", max_output_tokens=1),
        at_least("output", 1), each("output.*.type", "is no call", lambda one: one != "function_call"),
        equals("incomplete_details.reason", "max_output_tokens"), "tools"),
    "a result": ([respond(tools=TOOLS, tool_choice=NAMED, temperature=0, max_output_tokens=200),
        respond([{"role": "user", "content": "The weather?"},
        {"type": "function_call", "call_id": "call_1", "name": "get_current_weather",
        "arguments": '{"city": "Paris"}'}, {"type": "function_call_output", "call_id": "call_1",
        "output": "20 degrees"}], tools=TOOLS)], text(LAST), "tools"),
    "arguments of a stream": (respond(tools=TOOLS, stream=True, temperature=0),
        equals("of.response:output_item:done.-1.item.arguments", '{"city": "Dallas", "state": "TX"}'),
        that("equal arguments", lambda bodies: "".join(
        one["delta"] for one in bodies[-1]["of"]["response:function_call_arguments:delta"])
        == bodies[-1]["of"]["response:output_item:done"][-1]["item"]["arguments"]), "calls"),
    "parts of a stream of a call are closed": (respond(tools=TOOLS, stream=True, temperature=0),
        that("closed", lambda bodies: _closed(bodies[-1])), "calls"),
})  # fmt: skip
SUITES = {
    "openai/responses/test_basic.py": BASIC,
    "openai/responses/test_simple.py": SIMPLE,
    "openai/responses/test_structured_output.py": STRUCTURED,
    "openai/responses/test_function_call.py": CALLS,
}
