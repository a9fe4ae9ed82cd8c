"""OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import WEATHER_OF_MESSAGES, chat, post
from clients.cases.case import NO_ROUTE, Request, cases, different, refused
from clients.cases.expect import (
    at_least,
    contains,
    each,
    equals,
    error,
    fails,
    has,
    integer,
    lacks,
    same,
    text,
    that,
    within,
)

OUTPUT = "output.0.content.0.text"
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
KINDS = ("response.created", "response.output_item.added", "response.content_part.added", "response.output_text.delta")


def respond(given: Any = "Write an example", **fields: Any) -> Request:
    return post("/v1/responses", {"input": given, "max_output_tokens": 40, **fields})


def _format(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}, "temperature": 0}


ENDED = within("kinds.-1", "response.completed", "response.incomplete")
RESPONSES = cases({
    "a schema": (respond(**_format(type="json_schema", name="test", schema={"const": "foooooo"})),
        text(OUTPUT, '^"foooooo"$')),
    "a JSON object": (respond(**_format(type="json_object")), text(OUTPUT, r"^\s*\{")),
    "text as a format": (respond(**_format(type="text")), text(OUTPUT)),
    "a schema that is missing": (respond(**_format(type="json_schema", name="test")), error(400)),
    "a conversation": (respond(BOOK, max_output_tokens=16, temperature=0.8), text("id", "^resp_"),
        text("output.0.id", "^msg_"), text(OUTPUT)),
    "at most 8 tokens": (respond(BOOK, max_output_tokens=8), equals("usage.output_tokens", 8)),
    "any name of a model is accepted": (respond(BOOK, model="gpt-4.1"), refused("model")),
    "ids in a stream": (respond(BOOK, max_output_tokens=16, temperature=0.8, stream=True),
        text("events.0.response.id", "^resp_"), same("events.0.response.id", "events.-1.response.id", -1, -1),
        that("one item", lambda bodies: len({one["item_id"] for one in bodies[-1]["events"] if "item_id" in one}) == 1),
        *(contains("kinds", kind) for kind in KINDS), ENDED),
    "the text of a stream": (respond(BOOK, max_output_tokens=16, stream=True),
        same("output_text", "events.-1.response.output.0.content.0.text", -1, -1)),
    "timings of each token": (respond(stream=True, timings_per_token=True), refused("timings_per_token")),
    "progress of the prompt": (respond(stream=True, return_progress=True), refused("return_progress")),
    "the route without the prefix v1": (post("/responses", {"input": "Hi"}), NO_ROUTE),
})  # fmt: skip
HELLO = [{"role": "user", "content": "Say hello"}]


def message(messages: Any = HELLO, **fields: Any) -> Request:
    return post("/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": messages, **fields})


def counted(messages: Any = HELLO, **fields: Any) -> Request:
    return post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages, **fields})


def turns(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(contents)]


USED = [{"type": "tool_use", "id": "test123", "name": "get_current_weather", "input": {"city": "Paris"}}]
RESULT = {"type": "tool_result", "tool_use_id": "test123", "content": "The weather is sunny, 25°C"}
BLOCK = [equals("type", "message"), at_least("content", 1), equals("content.0.type", "text")]
BASIC = cases({
    "a message": (message(), *BLOCK, equals("role", "assistant"), has("content.0.text"),
        within("stop_reason", "end_turn", "max_tokens"), integer("usage.input_tokens"),
        integer("usage.output_tokens", 1), integer("usage.cache_read_input_tokens"), lacks("timings")),
    "a system prompt": (message(system="You are a helpful assistant."), *BLOCK),
    "a content of blocks": (message([{"role": "user", "content": [{"type": "text", "text": "What is"},
        {"type": "text", "text": " it?"}]}]), *BLOCK),
    "a conversation": (message(turns("Hello", "Hi there!", "How are you?")), *BLOCK),
    "any name of a model is accepted": (message(model="test"), refused("model")),
})  # fmt: skip
EVENTS = (
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
)


def _prompt_tokens(body: Any) -> int:
    """Return the tokens of a prompt: those that were computed, and those that were cached."""
    return int(body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"])


STREAMS = cases({
    **{f"a stream has {kind}": (message(stream=True, max_tokens=30), contains("kinds", kind)) for kind in EVENTS},
    "the first event of a stream": (message(stream=True, max_tokens=30), equals("kinds.0", "message_start"),
        equals("events.0.message.type", "message"), equals("events.0.message.role", "assistant"),
        equals("events.0.message.content", []), that("prompt tokens",
        lambda bodies: _prompt_tokens(bodies[-1]["events"][0]["message"]) > 0)),
    "blocks of a stream": (message(stream=True, max_tokens=30), equals("of.content_block_start.0.index", 0),
        equals("of.content_block_start.0.content_block.type", "text"), equals("of.content_block_stop.0.index", 0),
        each("of.content_block_delta.*.delta.type", "is of a text", lambda one: one == "text_delta")),
    "the end of a stream": (message(stream=True, max_tokens=30), equals("kinds.-1", "message_stop"),
        within("of.message_delta.0.delta.stop_reason", "end_turn", "max_tokens"), lacks("events.-1.timings"),
        integer("of.message_delta.0.usage.output_tokens", 1)),
})  # fmt: skip
COUNTS = cases({
    "tokens of a message": (counted(), integer("input_tokens", 1), lacks("output_tokens")),
    "tokens of a message and a system prompt": ([counted(), counted(system="Help.")],
        that("more", lambda bodies: bodies[1]["input_tokens"] > bodies[0]["input_tokens"])),
    "tokens that a message counts": ([counted(), message()],
        that("equal counts", lambda bodies: bodies[0]["input_tokens"] == _prompt_tokens(bodies[1]))),
})  # fmt: skip
BLOCKS = that("blocks have indices in their order", lambda bodies: all(
    [one["index"] for one in bodies[-1]["of"][f"content_block_{end}"]]
    == [*range(len(bodies[-1]["of"]["content_block_start"]))] for end in ("start", "stop")))  # fmt: skip
TOOLS = cases({
    "a call": (message(tools=[WEATHER_OF_MESSAGES], max_tokens=200, temperature=0), equals("stop_reason", "tool_use"),
        equals("content.-1.type", "tool_use"), has("content.-1.id"),
        equals("content.-1.name", "get_current_weather"), equals("content.-1.input",
        {"city": "Dallas", "state": "TX"}), "calls"),
    "tools that the model does not call": (message(tools=[WEATHER_OF_MESSAGES], temperature=0), *BLOCK,
        equals("stop_reason", "end_turn"), "answers"),
    "the result of a call": (message(turns("What's the weather?", USED, [RESULT])), *BLOCK, "tools"),
    "the result of a call, and a text": (message(turns("What's the weather?", USED,
        [{"type": "text", "text": "Here:"}, RESULT])), *BLOCK, "tools"),
    "the result of a call that failed": (message(turns("What's the weather?", USED, [{**RESULT, "is_error": True}])),
        *BLOCK, "tools"),
    "a stream of a call": (message(tools=[WEATHER_OF_MESSAGES], stream=True, temperature=0),
        equals("of.content_block_start.-1.content_block.name", "get_current_weather"), BLOCKS, "calls"),
    "indices of blocks": (message(tools=[WEATHER_OF_MESSAGES], stream=True, temperature=0), BLOCKS, "calls_twice"),
})  # fmt: skip
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
FIELDS = cases({
    "an image": (message([{"role": "user", "content": [PIXEL, {"type": "text", "text": "What is this?"}]}]), fails()),
    "stop sequences": (message(stop_sequences=["\n", "END"], max_tokens=100), *BLOCK),
    "temperature": (message(temperature=0.5), *BLOCK),
    "top_p": (message(top_p=0.9), *BLOCK),
    "top_k": (message(top_k=40), *BLOCK),
    "no messages": (post("/v1/messages", {"model": "tiny", "max_tokens": 50}), fails()),
    "an empty list of messages": (message([]), refused("messages")),
    "a budget of thinking tokens": (message(thinking={"type": "enabled", "budget_tokens": 50}, max_tokens=100),
        equals("type", "message")),
    "metadata": (message(metadata={"user_id": "test_user_123"}), *BLOCK),
    "another form than a chat's": ([chat(HELLO, max_tokens=50), message()],
        equals("object", "chat.completion", 0), equals("type", "message"), has("choices", 0), has("content"),
        that("equal counts", lambda bodies: bodies[0]["usage"]["prompt_tokens"] == _prompt_tokens(bodies[1])),
        has("usage.completion_tokens", 0), has("usage.output_tokens")),
})  # fmt: skip
THINKING = cases({
    "thoughts are a block of their own": (message(temperature=0), equals("content.0.type", "thinking"),
        text("content.0.thinking", "Let me think"), has("content.0.signature"),
        equals("content.1.type", "text"), "thinks"),
    "thoughts in a stream": (message(temperature=0, stream=True),
        equals("of.content_block_start.0.content_block.type", "thinking"),
        equals("of.content_block_start.1.content_block.type", "text"), that("deltas", lambda bodies: (
        {"thinking_delta", "text_delta"} <= {one["delta"]["type"] for one in bodies[-1]["of"]["content_block_delta"]})),
        "thinks"),
    "the signature of thoughts in a stream": (message(temperature=0, stream=True), that("signature", lambda bodies: any(
        one["delta"]["type"] == "signature_delta" for one in bodies[-1]["of"]["content_block_delta"])),
        different("The signature is empty and part of the first event of the block, since none is needed to send thoughts back.")
        , "thinks"),
})  # fmt: skip
SUITES = {
    "test_compat_oai_responses.py": RESPONSES,
    "test_compat_anthropic.py": [*BASIC, *STREAMS, *COUNTS, *TOOLS, *FIELDS, *THINKING],
}
