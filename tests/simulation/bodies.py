"""Requests of a simulation, and their outputs in a form that responses of every route and streams have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from simulation.client import Call

START = list(range(40, 60))
"""A common beginning of prompts, long enough to be shared."""
TALK = [{"role": "user", "content": "hello there"}]
_SAMPLED = {"temperature": 1.0, "max_tokens": 6}
_JSON = {"type": "json_object"}


def _completion(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, **_SAMPLED, "ignore_eos": True, **more}


BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    _completion([*START, 61], seed=1),
    _completion([*START, 62], seed=2, stream=True),
    _completion([*START[:18], 70, 71], seed=3, max_tokens=12),
    _completion([*START, 61, 63], seed=4, n=2),
    _completion([80, 81], seed=5, stream=True, n=2),
    _completion([[80, 81], [82]], seed=6, max_tokens=4),
    _completion([83], temperature=0, max_tokens=9, stream=True, stream_options={"include_usage": True}),
    _completion([84, 85], seed=7, n=1, best_of=2, max_tokens=3),
    _completion([*START, 64], seed=8, echo=True, logprobs=1, max_tokens=3),
    _completion([86, 87, 88], seed=9, stop_token_ids=list(range(100, 230))),
    _completion("hello and hello and hello", seed=10, presence_penalty=0.5, logit_bias={"70": 2.0}),
    ("/v1/chat/completions", {"messages": TALK, "seed": 11, **_SAMPLED, "ignore_eos": True}),
    _completion([90, 91], seed=15, max_tokens=60),
    _completion([90, 92], seed=16, max_tokens=60, stream=True),
    ("/v1/chat/completions", {"messages": [*TALK, {"role": "assistant", "content": "x"}, *TALK], "seed": 12, "stream": True,
                              "ignore_eos": True, "prediction": {"type": "content", "content": "hello there"}, **_SAMPLED}),
    ("/v1/chat/completions", {"messages": TALK, "seed": 13, **_SAMPLED, "response_format": _JSON}),
    ("/v1/chat/completions", {"messages": TALK, "seed": 14, **_SAMPLED, "response_format": _JSON, "stream": True}),
    ("/v1/responses", {"input": "hello there", "temperature": 0.0, "max_output_tokens": 5, "stream": True, "ignore_eos": True}),
    ("/v1/messages", {"messages": TALK, "temperature": 0.0, "max_tokens": 5, "stream": True}),
    ("/v1/messages", {"messages": TALK, "temperature": 0.0, "max_tokens": 5}),
)  # fmt: skip


def outputs(call: Call) -> Any:
    """The texts and finish reasons of a complete response."""
    if not call.body.get("stream"):
        return _whole(json.loads(call.data))
    events = call.events()
    if call.path == "/v1/responses":
        assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
        return _whole(events[-1]["response"])
    if call.path == "/v1/messages":
        assert events[-1]["type"] == "message_stop", events[-1]
        text = "".join(one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta")
        return [(text, events[-2]["delta"]["stop_reason"])]
    assert events[-1] == "[DONE]", events[-1]
    return _of_choices(events[:-1])


def _of_choices(events: Sequence[Mapping[str, Any]]) -> Any:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons, "an event after the finish reason"
            texts[index] = texts.get(index, "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return [(texts[index], reasons.get(index)) for index in sorted(texts)]


def _whole(body: Mapping[str, Any]) -> Any:
    if "choices" in body:
        return [
            (one.get("text", one.get("message", {}).get("content")), one["finish_reason"]) for one in body["choices"]
        ]
    if body.get("object") == "response":
        return [(body["output"][0]["content"][0]["text"], body["status"])]
    return [(body["content"][0]["text"], body["stop_reason"])]


def error_of(call: Call) -> str | None:
    """The error code of a response, None if it has none."""
    if call.status >= 400:
        return str(json.loads(call.data)["error"].get("code"))
    if call.body.get("stream"):
        for event in call.events():
            if isinstance(event, dict):
                if event.get("type") == "response.failed":
                    return str(event["response"]["error"]["code"])
                if "error" in event:
                    return str(event["error"].get("code") or event["error"]["type"])
    return None
