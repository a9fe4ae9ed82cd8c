"""Tools: calls that a model writes or must write, their results, and requests that contradict themselves."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import HELLO, SEARCH, TALK, WEATHER, call, chat, choice, tool
from clients.cases.case import Request, cases, different
from clients.cases.expect import count, each, empty, equals, error, json_text, lacks, no_more, same, text, that

CALLS = "choices.0.message.tool_calls"
CONTENT = "choices.0.message.content"
ARGUMENTS = f"{CALLS}.0.function.arguments"
BOTH = [WEATHER, SEARCH]
DALLAS = {"city": "Dallas", "state": "TX"}
ORLANDO = {"city": "Orlando", "state": "FL"}
NO_CALL = [lacks(CALLS), text(CONTENT, "98")]
RESULT = [
    {"role": "user", "content": "What is the weather in Dallas?"},
    {"role": "assistant", "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "call_6789", "content": "98 degrees"},
]
TWO_RESULTS = [
    RESULT[0],
    {"role": "assistant", "tool_calls": [call(id="call_a"), call(id="call_b")]},
    {"role": "tool", "tool_call_id": "call_a", "content": "98 degrees"},
    {"role": "tool", "tool_call_id": "call_b", "content": "78 degrees"},
]


WRITTEN = cases({
    "a call": (chat(TALK, tools=BOTH, temperature=0, max_completion_tokens=100), count(CALLS, 1),
        equals(f"{CALLS}.0.type", "function"), text(f"{CALLS}.0.id", ".{9}"),
        equals(f"{CALLS}.0.function.name", "get_current_weather"),
        json_text(ARGUMENTS, lambda found: found == DALLAS), equals("choices.0.finish_reason", "tool_calls"),
        equals("choices.0.message.role", "assistant"), "calls"),
    "a stream of a call": (chat(TALK, tools=BOTH, temperature=0, stream=True),
        equals("finish_reasons", ["tool_calls"]), count("calls", 1), count("calls.0.ids", 1),
        equals("calls.0.names", ["get_current_weather"]), json_text("calls.0.arguments", lambda found: found
        == DALLAS), that("one role", lambda bodies: sum("role" in one["choices"][0]["delta"] for one
        in bodies[-1]["events"]) == 1), each("events.*.choices.*.delta.tool_calls", "has one", lambda one: len(one)
        == 1), "calls"),
    "a stream has the call of a whole response": ([chat(TALK, tools=BOTH, temperature=0),
        chat(TALK, tools=BOTH, temperature=0, stream=True)], same(ARGUMENTS, "calls.0.arguments"),
        same(f"{CALLS}.0.function.name", "calls.0.names.0"), "calls"),
    "an answer to a result": (chat(RESULT, tools=BOTH, temperature=0), *NO_CALL, "answers"),
    "a stream of an answer to a result": ([chat(RESULT, tools=BOTH, temperature=0),
        chat(RESULT, tools=BOTH, temperature=0, stream=True)], same(CONTENT, "texts.0"), equals("calls", []),
        same("choices.0.finish_reason", "finish_reasons.0"), "answers"),
})  # fmt: skip
PLAIN = cases({
    "no tools": (chat(TALK, temperature=0), *NO_CALL, "answers"),
    "tools that the model does not call": (chat(TALK, temperature=0, tools=[WEATHER]), *NO_CALL,
        equals("choices.0.finish_reason", "stop"), "answers"),
    "a stream without tools": ([chat(TALK, temperature=0), chat(TALK, temperature=0, stream=True)],
        same(CONTENT, "texts.0"), count("finish_reasons", 1), equals("calls", []), "answers"),
    "a stream with tools that the model does not call": ([chat(TALK, temperature=0, tools=[WEATHER]),
        chat(TALK, temperature=0, tools=[WEATHER], stream=True)], same(CONTENT, "texts.0"),
        count("finish_reasons", 1), equals("calls", []), "answers"),
})  # fmt: skip
PARALLEL = cases({
    "two calls": (chat(TALK, tools=BOTH, temperature=0, max_tokens=200), count(CALLS, 2),
        each(f"{CALLS}.*.id", "is long", lambda one: len(one) > 16),
        json_text(ARGUMENTS, lambda found: found == DALLAS),
        json_text(f"{CALLS}.1.function.arguments", lambda found: found == ORLANDO),
        equals("choices.0.finish_reason", "tool_calls"), "calls_twice"),
    "a stream of two calls": ([chat(TALK, tools=BOTH, temperature=0),
        chat(TALK, tools=BOTH, temperature=0, stream=True)], count("calls", 2),
        same(ARGUMENTS, "calls.0.arguments"), same(f"{CALLS}.1.function.arguments", "calls.1.arguments"),
        equals("finish_reasons", ["tool_calls"]), "calls_twice"),
    "at most one call": (chat(TALK, tools=BOTH, temperature=0, parallel_tool_calls=False),
        count(CALLS, 1), "calls_twice"),
    "a stream of at most one call": (chat(TALK, tools=BOTH, temperature=0, parallel_tool_calls=False,
        stream=True), count("calls", 1), "calls_twice"),
    "an answer to two results": (chat(TWO_RESULTS, tools=BOTH, temperature=0), *NO_CALL, "answers"),
    "a stream of an answer to two results": (chat(TWO_RESULTS, tools=BOTH, temperature=0, stream=True),
        text("texts.0", "98"), equals("calls", []), "answers"),
})  # fmt: skip
VALID = {"max_tokens": 4}
REQUESTS = cases({
    "no tools at all": (chat(HELLO, **VALID), lacks(CALLS), "tools"),
    "tools that are null": (chat(HELLO, tools=None, **VALID), lacks(CALLS), "tools"),
    "an empty list of tools": (chat(HELLO, tools=[], **VALID), error(400),
        different("An empty list offers no tools, as an absent one does."), "tools"),
    "a choice of auto without tools": (chat(HELLO, tool_choice="auto", **VALID), error(400),
        different("Without tools the choice of auto changes nothing, so it is accepted."), "tools"),
    "a required call without tools": (chat(HELLO, tool_choice="required", **VALID), error(400), "tools"),
    "a required call with tools that are null": (chat(HELLO, tool_choice="required", tools=None, **VALID),
        error(400), "tools"),
    "reasoning of an earlier message": (chat([HELLO[0],
        {"role": "assistant", "content": "4", "reasoning_content": "2+2"}, HELLO[0]], **VALID), text(CONTENT), "tools"),
    "reasoning of an earlier message under its newer name": (chat([HELLO[0],
        {"role": "assistant", "content": "4", "reasoning": "2+2"}, HELLO[0]], **VALID), text(CONTENT), "tools"),
    "structured outputs and a named tool": (chat(HELLO, tools=[WEATHER],
        tool_choice=choice("get_current_weather"), structured_outputs={"json": {}}), error(400), "tools"),
    "structured outputs and a choice of auto": (chat(HELLO, tools=[WEATHER], tool_choice="auto",
        structured_outputs={"json": {"type": "object"}}), "tools"),
    "two kinds of structured outputs": (chat(HELLO, structured_outputs={"json": {"type": "object"},
        "regex": ".*"}), error(400)),
    "structured outputs that are a number": (chat(HELLO, structured_outputs=3), error(400, "structured_outputs")),
})  # fmt: skip


def _required(tool_choice: Any, **fields: Any) -> Request:
    return chat(
        TALK, tools=[WEATHER], tool_choice=tool_choice, max_completion_tokens=400, parallel_tool_calls=False, **fields
    )


def _is_weather(found: Any) -> bool:
    return isinstance(found["city"], str) and found["unit"] in ("celsius", "fahrenheit")


NAMED = choice("get_current_weather")
TIME = tool("time", {})
CALLING = cases({
    "a choice of auto": (chat(TALK, tools=BOTH, tool_choice="auto", temperature=0), count(CALLS, 1),
        text("choices.0.message.reasoning_content"), "calls"),
    "a stream of a choice of auto": (chat(TALK, tools=BOTH, tool_choice="auto", temperature=0, stream=True),
        count("calls", 1), text("reasoning"), "calls"),
    "reasoning under its newer name": (chat(TALK, tools=BOTH, temperature=0),
        text("choices.0.message.reasoning"), different("Reasoning is in `reasoning_content`, its older name."),
        "calls"),
    "a required call": (_required("required", temperature=0), count(CALLS, 1), json_text(ARGUMENTS), "tools"),
    "a stream of a required call": (_required("required", temperature=0, stream=True), count("calls", 1),
        json_text("calls.0.arguments"), "tools"),
    "a named call": (_required(NAMED, temperature=0), json_text(ARGUMENTS, _is_weather), empty(CONTENT), "tools"),
    "a stream of a named call": (_required(NAMED, temperature=0, stream=True),
        json_text("calls.0.arguments", _is_weather), empty("texts.0"), count("finish_reasons", 1), "tools"),
    **{f"a call without arguments that comes back as {arguments!r}": (chat([HELLO[0],
        {"role": "assistant", "tool_calls": [call("time", arguments)]},
        {"role": "tool", "tool_call_id": "call_6789", "content": "noon"}], tools=[TIME], max_tokens=8),
        text(CONTENT), "tools") for arguments in ("{}", "")},
    "a named tool without tools": (chat(TALK, tool_choice=choice("a")), error(400), "tools"),
    "a named tool that is not among the tools": (chat(TALK, tools=BOTH, tool_choice=choice("a")), error(400), "tools"),
    "an empty choice": (chat(TALK, tools=BOTH, tool_choice={}), error(400), "tools"),
    "a required call of one token": (chat(TALK, tools=BOTH, tool_choice="required", temperature=0,
        max_completion_tokens=1), equals("choices.0.finish_reason", "length"), empty(CALLS), empty(CONTENT), "tools"),
    "a named call of one token": (chat(TALK, tools=BOTH, tool_choice=NAMED, temperature=0,
        max_completion_tokens=1), equals("choices.0.finish_reason", "length"), "tools"),
    "a choice of null": (chat(TALK, tools=BOTH, tool_choice=None, max_tokens=4), text(CONTENT),
        no_more("choices.*.message.tool_calls"), "tools"),
})  # fmt: skip
SUITES = {
    "tool_use/test_tool_calls.py": WRITTEN,
    "tool_use/test_chat_completions.py": PLAIN,
    "tool_use/test_parallel_tool_calls.py": PARALLEL,
    "tool_use/test_chat_completion_request_validations.py": REQUESTS,
    "openai/chat_completion/test_completion_with_function_calling.py": CALLING,
}
