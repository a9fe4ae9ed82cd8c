"""OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import chat, post
from clients.cases.case import Case, Request, different, refused
from clients.cases.expect import (
    at_least,
    contains,
    equals,
    error,
    fails,
    has,
    integer,
    lacks,
    ok,
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


def _last(body: Any) -> Any:
    return body["events"][-1]["response"]


def _delta_text(body: Any) -> str:
    return "".join(one["delta"] for one in body["events"] if one["type"] == "response.output_text.delta")


ENDED = that("the last event", lambda bodies: bodies[-1]["kinds"][-1] in ("response.completed", "response.incomplete"))
RESPONSES = [
    Case(
        "a schema",
        respond(**_format(type="json_schema", name="test", schema={"const": "foooooo"})),
        ok(text(OUTPUT, '^"foooooo"$')),
    ),
    Case("a JSON object", respond(**_format(type="json_object")), ok(text(OUTPUT, r"^\s*\{"))),
    Case("text as a format", respond(**_format(type="text")), ok(text(OUTPUT))),
    Case("a schema that is missing", respond(**_format(type="json_schema", name="test")), error(400)),
    Case(
        "a conversation",
        respond(BOOK, max_output_tokens=16, temperature=0.8),
        ok(text("id", "^resp_"), text("output.0.id", "^msg_"), text(OUTPUT)),
    ),
    Case("at most 8 tokens", respond(BOOK, max_output_tokens=8), ok(equals("usage.output_tokens", 8))),
    Case("any name of a model is accepted", respond(BOOK, model="gpt-4.1"), ok(text(OUTPUT)), refused("model")),
    Case(
        "ids in a stream",
        respond(BOOK, max_output_tokens=16, temperature=0.8, stream=True),
        ok(
            text("events.0.response.id", "^resp_"),
            that("one response", lambda bodies: _last(bodies[-1])["id"] == bodies[-1]["events"][0]["response"]["id"]),
            that(
                "one item",
                lambda bodies: len({one["item_id"] for one in bodies[-1]["events"] if "item_id" in one}) == 1,
            ),
            that("kinds of events", lambda bodies: set(KINDS) <= set(bodies[-1]["kinds"])),
            ENDED,
        ),
    ),
    Case(
        "the text of a stream",
        respond(BOOK, max_output_tokens=16, stream=True),
        ok(
            that(
                "equal texts",
                lambda bodies: _delta_text(bodies[-1]) == _last(bodies[-1])["output"][0]["content"][0]["text"],
            )
        ),
    ),
    Case("timings of each token", respond(stream=True, timings_per_token=True), ok(), refused("timings_per_token")),
    Case("progress of the prompt", respond(stream=True, return_progress=True), ok(), refused("return_progress")),
    Case(
        "the route without the prefix v1", post("/responses", {"input": "Hi"}), ok(text(OUTPUT)), refused("/responses")
    ),
]
HELLO = [{"role": "user", "content": "Say hello"}]
WEATHER = {
    "name": "get_current_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def message(messages: Any = HELLO, **fields: Any) -> Request:
    return post("/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": messages, **fields})


def counted(messages: Any = HELLO, **fields: Any) -> Request:
    return post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages, **fields})


def turns(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(contents)]


USED = [{"type": "tool_use", "id": "test123", "name": "get_current_weather", "input": {"city": "Paris"}}]
RESULT = {"type": "tool_result", "tool_use_id": "test123", "content": "The weather is sunny, 25°C"}
BLOCK = [equals("type", "message"), at_least("content", 1), equals("content.0.type", "text")]
BASIC = [
    Case(
        "a message",
        message(),
        ok(
            *BLOCK,
            equals("role", "assistant"),
            has("content.0.text"),
            within("stop_reason", "end_turn", "max_tokens"),
            integer("usage.input_tokens"),
            integer("usage.output_tokens", 1),
            integer("usage.cache_read_input_tokens"),
            lacks("timings"),
        ),
    ),
    Case("a system prompt", message(system="You are a helpful assistant."), ok(*BLOCK)),
    Case(
        "a content of blocks",
        message([{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]}]),
        ok(*BLOCK),
    ),
    Case("a conversation", message(turns("Hello", "Hi there!", "How are you?")), ok(*BLOCK)),
    Case("any name of a model is accepted", message(model="test"), ok(*BLOCK), refused("model")),
]
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


def _of(body: Any, kind: str) -> list[Any]:
    return [one for one in body["events"] if one["type"] == kind]


STREAMS = [
    *(
        Case(
            f"a stream has {kind}",
            message(stream=True, max_tokens=30),
            ok(contains("kinds", kind)),
        )
        for kind in EVENTS
    ),
    Case(
        "the first event of a stream",
        message(stream=True, max_tokens=30),
        ok(
            equals("kinds.0", "message_start"),
            equals("events.0.message.type", "message"),
            equals("events.0.message.role", "assistant"),
            equals("events.0.message.content", []),
            that("prompt tokens", lambda bodies: _prompt_tokens(bodies[-1]["events"][0]["message"]) > 0),
        ),
    ),
    Case(
        "blocks of a stream",
        message(stream=True, max_tokens=30),
        ok(
            that("index", lambda bodies: _of(bodies[-1], "content_block_start")[0]["index"] == 0),
            that("text", lambda bodies: _of(bodies[-1], "content_block_start")[0]["content_block"]["type"] == "text"),
            that(
                "deltas",
                lambda bodies: all(
                    one["delta"]["type"] == "text_delta" for one in _of(bodies[-1], "content_block_delta")
                ),
            ),
            that("stop", lambda bodies: _of(bodies[-1], "content_block_stop")[0]["index"] == 0),
        ),
    ),
    Case(
        "the end of a stream",
        message(stream=True, max_tokens=30),
        ok(
            that(
                "reason",
                lambda bodies: (
                    _of(bodies[-1], "message_delta")[0]["delta"]["stop_reason"] in ("end_turn", "max_tokens")
                ),
            ),
            that("usage", lambda bodies: _of(bodies[-1], "message_delta")[0]["usage"]["output_tokens"] > 0),
            equals("kinds.-1", "message_stop"),
            lacks("events.-1.timings"),
        ),
    ),
]
COUNTS = [
    Case("tokens of a message", counted(), ok(integer("input_tokens", 1), lacks("output_tokens"))),
    Case(
        "tokens of a message and a system prompt",
        [counted(), counted(system="Help.")],
        ok(that("more", lambda bodies: bodies[1]["input_tokens"] > bodies[0]["input_tokens"])),
    ),
    Case(
        "tokens that a message counts",
        [counted(), message()],
        ok(that("equal counts", lambda bodies: bodies[0]["input_tokens"] == _prompt_tokens(bodies[1]))),
    ),
]
BLOCKS = that(
    "blocks have indices in their order",
    lambda bodies: (
        [one["index"] for one in _of(bodies[-1], "content_block_start")]
        == [one["index"] for one in _of(bodies[-1], "content_block_stop")]
        == list(range(len(_of(bodies[-1], "content_block_start"))))
    ),
)
TOOLS = [
    Case(
        "a call",
        message(tools=[WEATHER], max_tokens=200, temperature=0),
        ok(
            equals("stop_reason", "tool_use"),
            equals("content.-1.type", "tool_use"),
            has("content.-1.id"),
            equals("content.-1.name", "get_current_weather"),
            equals("content.-1.input", {"city": "Dallas", "state": "TX"}),
        ),
        server="calls",
    ),
    Case(
        "tools that the model does not call",
        message(tools=[WEATHER], temperature=0),
        ok(*BLOCK, equals("stop_reason", "end_turn")),
        server="answers",
    ),
    Case("the result of a call", message(turns("What's the weather?", USED, [RESULT])), ok(*BLOCK), server="tools"),
    Case(
        "the result of a call, and a text",
        message(turns("What's the weather?", USED, [{"type": "text", "text": "Here:"}, RESULT])),
        ok(*BLOCK),
        server="tools",
    ),
    Case(
        "the result of a call that failed",
        message(turns("What's the weather?", USED, [{**RESULT, "is_error": True}])),
        ok(*BLOCK),
        server="tools",
    ),
    Case(
        "a stream of a call",
        message(tools=[WEATHER], stream=True, temperature=0),
        ok(
            that(
                "a call",
                lambda bodies: (
                    _of(bodies[-1], "content_block_start")[-1]["content_block"]["name"] == "get_current_weather"
                ),
            ),
            BLOCKS,
        ),
        server="calls",
    ),
    Case("indices of blocks", message(tools=[WEATHER], stream=True, temperature=0), ok(BLOCKS), server="calls_twice"),
]
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
FIELDS = [
    Case(
        "an image", message([{"role": "user", "content": [PIXEL, {"type": "text", "text": "What is this?"}]}]), fails()
    ),
    Case("stop sequences", message(stop_sequences=["\n", "END"], max_tokens=100), ok(*BLOCK)),
    Case("temperature", message(temperature=0.5), ok(*BLOCK)),
    Case("top_p", message(top_p=0.9), ok(*BLOCK)),
    Case("top_k", message(top_k=40), ok(*BLOCK)),
    Case("no messages", post("/v1/messages", {"model": "tiny", "max_tokens": 50}), fails()),
    Case("an empty list of messages", message([]), ok(equals("type", "message")), refused("messages")),
    Case(
        "a budget of thinking tokens",
        message(thinking={"type": "enabled", "budget_tokens": 50}, max_tokens=100),
        ok(equals("type", "message")),
    ),
    Case("metadata", message(metadata={"user_id": "test_user_123"}), ok(*BLOCK)),
    Case(
        "another form than a chat's",
        [chat(HELLO, max_tokens=50), message()],
        ok(
            equals("object", "chat.completion", 0),
            equals("type", "message"),
            has("choices", 0),
            has("content"),
            that("equal counts", lambda bodies: bodies[0]["usage"]["prompt_tokens"] == _prompt_tokens(bodies[1])),
            has("usage.completion_tokens", 0),
            has("usage.output_tokens"),
        ),
    ),
]
THINKING = [
    Case(
        "thoughts are a block of their own",
        message(temperature=0),
        ok(
            equals("content.0.type", "thinking"),
            text("content.0.thinking", "Let me think"),
            has("content.0.signature"),
            equals("content.1.type", "text"),
        ),
        server="thinks",
    ),
    Case(
        "thoughts in a stream",
        message(temperature=0, stream=True),
        ok(
            that(
                "first", lambda bodies: _of(bodies[-1], "content_block_start")[0]["content_block"]["type"] == "thinking"
            ),
            that("second", lambda bodies: _of(bodies[-1], "content_block_start")[1]["content_block"]["type"] == "text"),
            that(
                "deltas",
                lambda bodies: (
                    {"thinking_delta", "text_delta"}
                    <= {one["delta"]["type"] for one in _of(bodies[-1], "content_block_delta")}
                ),
            ),
        ),
        server="thinks",
    ),
    Case(
        "the signature of thoughts in a stream",
        message(temperature=0, stream=True),
        ok(
            that(
                "signature",
                lambda bodies: (
                    "signature_delta" in {one["delta"]["type"] for one in _of(bodies[-1], "content_block_delta")}
                ),
            )
        ),
        different(
            "The signature is empty and part of the first event of the block, since none is needed to send thoughts back."
        ),
        server="thinks",
    ),
]
SUITES = {
    "test_compat_oai_responses.py": RESPONSES,
    "test_compat_anthropic.py": [*BASIC, *STREAMS, *COUNTS, *TOOLS, *FIELDS, *THINKING],
}
