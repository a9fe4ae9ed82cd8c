"""Anthropic's messages."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import post
from clients.cases.case import Case, Request, different, refused
from clients.cases.expect import equals, fails, integer, ok, that

HELLO = [{"role": "user", "content": "how are you!"}]
TOOL = {
    "name": "get_current_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def message(messages: Any = HELLO, **fields: Any) -> Request:
    return post("/v1/messages", {"model": "tiny", "max_tokens": 1024, "messages": messages, **fields})


ENDED = [equals("stop_reason", "end_turn"), equals("role", "assistant")]
MESSAGES = [
    Case("a message", message(), ok(*ENDED), server="answers"),
    Case("a system prompt", message(system="you are a helpful assistant"), ok(*ENDED), server="answers"),
    Case(
        "a stream",
        message(stream=True),
        ok(equals("kinds.0", "message_start"), equals("kinds.-1", "message_stop")),
        server="answers",
    ),
    Case(
        "a call",
        message(tools=[TOOL], temperature=0),
        ok(equals("stop_reason", "tool_use"), equals("role", "assistant")),
        server="calls",
    ),
    Case(
        "a stream of a call",
        message(tools=[TOOL], temperature=0, stream=True),
        ok(
            that(
                "arguments",
                lambda bodies: (
                    "".join(
                        one["delta"]["partial_json"]
                        for one in bodies[-1]["events"]
                        if one.get("delta", {}).get("type") == "input_json_delta"
                    )
                    == '{"city": "Dallas", "state": "TX"}'
                ),
            )
        ),
        server="calls",
    ),
]
USED = {"type": "tool_use", "id": "toolu_01", "name": "get_weather", "input": {"city": "NYC"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_01", "content": "sunny"}


def _without(block: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != name}


def _said(*blocks: Any) -> Request:
    """Return a conversation whose second message has these blocks."""
    return message([*HELLO, {"role": "assistant", "content": list(blocks)}, *HELLO], max_tokens=8)


def _answered(block: Any) -> Request:
    used = {"role": "assistant", "content": [USED]}
    return message([*HELLO, used, {"role": "user", "content": [block]}], max_tokens=8)


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "sig_123"}
IS_MESSAGE = equals("type", "message")
BLOCKS = [
    *(
        Case(f"a call without its {name}", _said(_without(USED, name)), fails(), server="tools")
        for name in ("id", "name", "input")
    ),
    Case("a call with an empty name", _said({**USED, "name": ""}), fails(), server="tools"),
    Case("a call with an empty id", _said({**USED, "id": ""}), fails(), server="tools"),
    Case("a call", _answered(RESULT), ok(IS_MESSAGE), server="tools"),
    Case("a call without arguments", _said({**USED, "input": {}}), ok(IS_MESSAGE), server="tools"),
    Case("a result without the id of its call", _answered(_without(RESULT, "tool_use_id")), fails(), server="tools"),
    Case("a result without content", _answered(_without(RESULT, "content")), ok(IS_MESSAGE), server="tools"),
    Case("a text block without its text", _said({"type": "text"}), fails(), server="tools"),
    Case("an empty text block", _said({"type": "text", "text": ""}), ok(IS_MESSAGE), server="tools"),
    Case("a thought without its text", _said({"type": "thinking", "signature": "abc"}), fails(), server="tools"),
    Case("a thought", _said(THOUGHT, {"type": "text", "text": "a"}), ok(IS_MESSAGE), server="tools"),
    Case(
        "a thought without a signature",
        _said(_without(THOUGHT, "signature"), {"type": "text", "text": "a"}),
        ok(IS_MESSAGE),
        server="tools",
    ),
    Case(
        "a hidden thought",
        _said({"type": "redacted_thinking", "data": "opaque"}, {"type": "text", "text": "a"}),
        ok(IS_MESSAGE),
        server="tools",
    ),
    Case("a hidden thought without its data", _said({"type": "redacted_thinking"}), fails(), server="tools"),
    Case("an image without its source", message([{"role": "user", "content": [{"type": "image"}]}]), fails()),
]


def _tokens(system: Any, messages: Any = HELLO) -> Request:
    body = {"model": "tiny", "messages": messages} | ({} if system is None else {"system": system})
    return post("/v1/messages/count_tokens", body)


def _block(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


INSIDE = {"role": "system", "content": "Be kind."}
SAME = that("equal counts", lambda bodies: bodies[0]["input_tokens"] == bodies[1]["input_tokens"])
SYSTEM = [
    Case(
        "a system prompt among the messages",
        [_tokens("Be kind."), _tokens(None, [INSIDE, *HELLO])],
        ok(SAME),
    ),
    Case(
        "a system prompt of blocks among the messages",
        [_tokens("Be kind."), _tokens(None, [{"role": "system", "content": [_block("Be kind.")]}, *HELLO])],
        ok(SAME),
    ),
    Case(
        "two system prompts",
        [_tokens("Be short."), _tokens("Be short.", [INSIDE, *HELLO])],
        ok(that("more tokens", lambda bodies: bodies[1]["input_tokens"] > bodies[0]["input_tokens"])),
    ),
    Case("a message of a tool's role", message([{"role": "tool", "content": "x"}]), fails()),
]
BILLING = _block("x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli;")
CONVERSION = [
    Case(
        "blocks of a system prompt",
        [_tokens("Be kind. Be short."), _tokens([_block("Be kind."), _block(" Be short.")])],
        ok(SAME),
    ),
    Case(
        "a block of a client's billing",
        [_tokens([_block("Be kind.")]), _tokens([_block("Be kind."), BILLING])],
        ok(SAME),
        different("Every block of the system prompt reaches the model."),
    ),
    Case(
        "a result of blocks",
        _answered({**RESULT, "content": [_block("line 1"), _block("line 2")]}),
        ok(IS_MESSAGE),
        server="tools",
    ),
    Case("a result that is null", _answered({**RESULT, "content": None}), ok(IS_MESSAGE), server="tools"),
    Case("extra arguments of the engine", message(vllm_xargs={"a": 7}), ok(IS_MESSAGE), refused("vllm_xargs")),
]
CACHED: dict[str, Any] = {"system": "You answer questions about capitals.", "max_tokens": 5}
CACHE = [
    Case(
        "a second message reads the cache",
        [message(**CACHED), message(**CACHED)],
        ok(integer("usage.cache_read_input_tokens", 1)),
    ),
    Case(
        "a stream reads the cache",
        [message(**CACHED), message(**CACHED, stream=True)],
        ok(
            that(
                "cached",
                lambda bodies: any(
                    one.get("usage", {}).get("cache_read_input_tokens", 0) > 0 for one in bodies[1]["events"]
                ),
            )
        ),
    ),
]
SUITES = {
    "anthropic/test_messages.py": MESSAGES,
    "anthropic/test_content_block_validation.py": BLOCKS,
    "anthropic/test_system_hoist.py": SYSTEM,
    "anthropic/test_anthropic_messages_conversion.py": CONVERSION,
    "anthropic/test_cache_accounting.py": CACHE,
}
