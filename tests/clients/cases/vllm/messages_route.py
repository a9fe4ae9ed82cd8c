"""Anthropic's messages."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import WEATHER_OF_MESSAGES, post
from clients.cases.case import Request, cases, different, refused
from clients.cases.expect import equals, fails, integer, that

HELLO = [{"role": "user", "content": "how are you!"}]


def message(messages: Any = HELLO, **fields: Any) -> Request:
    return post("/v1/messages", {"model": "tiny", "max_tokens": 1024, "messages": messages, **fields})


ENDED = [equals("stop_reason", "end_turn"), equals("role", "assistant")]
MESSAGES = cases({
    "a message": (message(), *ENDED, "answers"),
    "a system prompt": (message(system="you are a helpful assistant"), *ENDED, "answers"),
    "a stream": (message(stream=True), equals("kinds.0", "message_start"), equals("kinds.-1", "message_stop"),
        "answers"),
    "a call": (message(tools=[WEATHER_OF_MESSAGES], temperature=0), equals("stop_reason", "tool_use"),
        equals("role", "assistant"), "calls"),
    "a stream of a call": (message(tools=[WEATHER_OF_MESSAGES], temperature=0, stream=True),
        that("arguments", lambda bodies: ("".join(one["delta"]["partial_json"] for one in bodies[-1]["events"]
        if one.get("delta", {}).get("type") == "input_json_delta") == '{"city": "Dallas", "state": "TX"}')), "calls"),
})  # fmt: skip
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
BLOCKS = cases({
    **{f"a call without its {name}": (_said(_without(USED, name)), fails(), "tools") for name
        in ("id", "name", "input")},
    "a call with an empty name": (_said({**USED, "name": ""}), fails(), "tools"),
    "a call with an empty id": (_said({**USED, "id": ""}), fails(), "tools"),
    "a call": (_answered(RESULT), IS_MESSAGE, "tools"),
    "a call without arguments": (_said({**USED, "input": {}}), IS_MESSAGE, "tools"),
    "a result without the id of its call": (_answered(_without(RESULT, "tool_use_id")), fails(), "tools"),
    "a result without content": (_answered(_without(RESULT, "content")), IS_MESSAGE, "tools"),
    "a text block without its text": (_said({"type": "text"}), fails(), "tools"),
    "an empty text block": (_said({"type": "text", "text": ""}), IS_MESSAGE, "tools"),
    "a thought without its text": (_said({"type": "thinking", "signature": "abc"}), fails(), "tools"),
    "a thought": (_said(THOUGHT, {"type": "text", "text": "a"}), IS_MESSAGE, "tools"),
    "a thought without a signature": (_said(_without(THOUGHT, "signature"), {"type": "text", "text": "a"}),
        IS_MESSAGE, "tools"),
    "a hidden thought": (_said({"type": "redacted_thinking", "data": "opaque"},
        {"type": "text", "text": "a"}), IS_MESSAGE, "tools"),
    "a hidden thought without its data": (_said({"type": "redacted_thinking"}), fails(), "tools"),
    "an image without its source": (message([{"role": "user", "content": [{"type": "image"}]}]), fails()),
})  # fmt: skip


def _tokens(system: Any, messages: Any = HELLO) -> Request:
    body = {"model": "tiny", "messages": messages} | ({} if system is None else {"system": system})
    return post("/v1/messages/count_tokens", body)


def _block(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


INSIDE = {"role": "system", "content": "Be kind."}
SAME = that("equal counts", lambda bodies: bodies[0]["input_tokens"] == bodies[1]["input_tokens"])
SYSTEM = cases({
    "a system prompt among the messages": ([_tokens("Be kind."), _tokens(None, [INSIDE, *HELLO])], SAME),
    "a system prompt of blocks among the messages": ([_tokens("Be kind."),
        _tokens(None, [{"role": "system", "content": [_block("Be kind.")]}, *HELLO])], SAME),
    "two system prompts": ([_tokens("Be short."), _tokens("Be short.", [INSIDE, *HELLO])],
        that("more tokens", lambda bodies: bodies[1]["input_tokens"] > bodies[0]["input_tokens"])),
    "a message of a tool's role": (message([{"role": "tool", "content": "x"}]), fails()),
})  # fmt: skip
BILLING = _block("x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli;")
CONVERSION = cases({
    "blocks of a system prompt": ([_tokens("Be kind. Be short."),
        _tokens([_block("Be kind."), _block(" Be short.")])], SAME),
    "a block of a client's billing": ([_tokens([_block("Be kind.")]), _tokens([_block("Be kind."), BILLING])],
        SAME, different("Every block of the system prompt reaches the model.")),
    "a result of blocks": (_answered({**RESULT, "content": [_block("line 1"), _block("line 2")]}), IS_MESSAGE, "tools"),
    "a result that is null": (_answered({**RESULT, "content": None}), IS_MESSAGE, "tools"),
    "extra arguments of the engine": (message(vllm_xargs={"a": 7}), refused("vllm_xargs")),
})  # fmt: skip
CACHED: dict[str, Any] = {"system": "You answer questions about capitals.", "max_tokens": 5}
CACHE = cases({
    "a second message reads the cache": ([message(**CACHED), message(**CACHED)],
        integer("usage.cache_read_input_tokens", 1)),
    "a stream reads the cache": ([message(**CACHED), message(**CACHED, stream=True)],
        that("cached", lambda bodies: any(one.get("usage", {}).get("cache_read_input_tokens", 0) > 0 for one
        in bodies[1]["events"]))),
})  # fmt: skip
SUITES = {
    "anthropic/test_messages.py": MESSAGES,
    "anthropic/test_content_block_validation.py": BLOCKS,
    "anthropic/test_system_hoist.py": SYSTEM,
    "anthropic/test_anthropic_messages_conversion.py": CONVERSION,
    "anthropic/test_cache_accounting.py": CACHE,
}
