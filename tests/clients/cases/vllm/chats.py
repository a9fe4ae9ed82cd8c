"""Chat completions: log-probabilities, streams, formats and choices."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import HELLO, TALK, chat, post, shape
from clients.cases.case import NO_ROUTE, Request, cases, different, refused
from clients.cases.expect import count, each, equals, error, has, integer, json_text, lacks, same, text, that

CONTENT = "choices.0.message.content"
FIVE = {"max_completion_tokens": 5, "temperature": 0.0}
TURNS = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won in 2020?"},
    {"role": "assistant", "content": "The Dodgers."},
    {"role": "user", "content": "Where was it played?"},
]
SCORED = "choices.0.logprobs.content.0.top_logprobs"
LOGPROBS = cases({
    "no log-probabilities": (chat(**FIVE, logprobs=False), lacks("choices.0.logprobs")),
    "log-probabilities without likeliest tokens": (chat(**FIVE, logprobs=True, top_logprobs=0), count(SCORED, 0)),
    "5 likeliest tokens": (chat(**FIVE, logprobs=True, top_logprobs=5), count(SCORED, 5)),
    "21 likeliest tokens in a stream": (chat(logprobs=True, top_logprobs=21, stream=True), error(400, "top_logprobs")),
    "30 likeliest tokens": (chat(logprobs=True, top_logprobs=30), error(400, "top_logprobs")),
    "a chat after a refused one": ([chat(logprobs=True, top_logprobs=30), chat(max_completion_tokens=10)],
        text(CONTENT)),
    **{f"log-probabilities of the prompt: {number}": (chat(TURNS, max_tokens=4, prompt_logprobs=number),
        has("prompt_logprobs.0"), refused("prompt_logprobs")) for number in (1, 0, 2)},
    "log-probabilities of the prompt: -1": (chat(TURNS, prompt_logprobs=-1), error(400), refused("prompt_logprobs")),
    "log-probabilities of the prompt: null": (chat(TURNS, max_tokens=4, prompt_logprobs=None),
        lacks("prompt_logprobs")),
})  # fmt: skip
SESSION = cases({
    "an answer of 5 tokens": ([post("/tokenize", {"messages": TALK}),
        chat(max_completion_tokens=5, logprobs=True, top_logprobs=5)], has("id"), count("choices", 1),
        equals("choices.0.finish_reason", "length"), equals("usage.completion_tokens", 5),
        same("count", "usage.prompt_tokens"), that("total", lambda bodies: bodies[1]["usage"]["total_tokens"]
        == bodies[0]["count"] + 5), text(CONTENT, ".{5}"), equals("choices.0.message.role", "assistant")),
    "a second turn": (chat([*TALK, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "as JSON"}], max_completion_tokens=5), text(CONTENT)),
    "a stream has the text and the reason of a whole response": ([chat(max_completion_tokens=10, temperature=0),
        chat(max_completion_tokens=10, temperature=0, stream=True)], same(CONTENT, "texts.0"),
        count("finish_reasons", 1), same("choices.0.finish_reason", "finish_reasons.0"),
        has("events.-1.choices.0.finish_reason")),
    "the last event of a stream has content": (chat(max_completion_tokens=10, stream=True),
        text("events.-1.choices.0.delta.content"),
        different("The last event has the finish reason alone, as OpenAI's has.")),
})  # fmt: skip


def _streamed(**options: Any) -> Request:
    return chat(max_completion_tokens=10, min_tokens=10, temperature=0, stream=True, stream_options=options)


def _whole(**options: Any) -> Request:
    return chat(max_completion_tokens=10, temperature=0, stream=False, stream_options=options)


def _usage_sum(body: Any) -> bool:
    return all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in body["usages"])


OPTIONS = cases({
    "no usage in a stream": (_streamed(include_usage=False), equals("usages", [])),
    "usage in the last event only": (_streamed(include_usage=True, continuous_usage_stats=False),
        count("usages", 1), equals("events.-1.choices", []), integer("events.-1.usage.completion_tokens", 10),
        that("sum", lambda bodies: _usage_sum(bodies[-1]))),
    "stream options without a stream, null": (_whole(include_usage=None), error(400),
        different("A field that is null counts as absent, so the options are empty and accepted.")),
    "stream options without a stream": (_whole(include_usage=True), error(400)),
    "usage so far in each event": (_streamed(include_usage=True, continuous_usage_stats=True),
        that("each event", lambda bodies: len(bodies[-1]["usages"]) == len(bodies[-1]["events"])),
        that("sum", lambda bodies: _usage_sum(bodies[-1])),
        that("never less", lambda bodies: (sorted(one["completion_tokens"] for one in bodies[-1]["usages"])
        == [one["completion_tokens"] for one in bodies[-1]["usages"]])), equals("usages.-1.completion_tokens", 10)),
    "the least number of characters": (chat(min_characters=10, max_tokens=10), refused("min_characters")),
})  # fmt: skip
SCHEMA = shape({"name": {"type": "string", "maxLength": 8}, "age": {"enum": [20, 30]}})
RESULT = shape({"result": {"enum": [2, 3]}})


def structured(**kind: Any) -> Request:
    return chat(max_completion_tokens=100, structured_outputs=kind)


STRUCTURED = cases({
    "a choice of texts": (structured(choice=["Python", "Rust"]), text(CONTENT, "^(Python|Rust)$")),
    "a schema among structured outputs": (structured(json=SCHEMA),
        json_text(CONTENT, lambda found: set(found) == {"name", "age"})),
    "a regular expression": (structured(regex=r"\d{1,3}"), text(CONTENT, r"^\d{1,3}$")),
    "a regular expression that is an object": (structured(regex={"1": "Python"}), error(400)),
    "log-probabilities of a choice of texts": (chat(structured_outputs={"choice": ["a"]}, logprobs=True),
        has("choices.0.logprobs.content")),
    "a JSON object": (chat(response_format={"type": "json_object"}, temperature=0, max_tokens=200),
        text(CONTENT, r"^\s*\{")),
    "a JSON schema": (chat(response_format={"type": "json_schema",
        "json_schema": {"name": "foo_test", "schema": RESULT}}, max_tokens=100),
        json_text(CONTENT, lambda found: found["result"] in (2, 3))),
    "text as a format": (chat(response_format={"type": "text"}, max_completion_tokens=10), text(CONTENT)),
})  # fmt: skip
CUSTOM = [{"role": "my-custom-role", "content": "what is 1+1?"}]
FIELDS = cases({
    "an unknown field of a message": (chat([{**HELLO[0], "extra_field": "0"}], max_tokens=4),
        refused("messages.extra_field")),
    "a content in parts": (chat([{"role": "user", "content": [{"type": "text", "text": "what is 1+1?"}]}],
        max_tokens=4), text(CONTENT)),
    "a content in parts has the tokens of a text": ([chat([{"role": "user",
        "content": [{"type": "text", "text": "1+1?"}]}], temperature=0, max_tokens=8),
        chat([{"role": "user", "content": "1+1?"}], temperature=0, max_tokens=8)], same(CONTENT),
        same("usage.prompt_tokens")),
    "an unknown role": (chat(CUSTOM, max_tokens=4), refused("messages.role")),
    **{f"a seed of {name} 64 bits": (chat(seed=seed), error(400, "seed")) for name, seed
        in (("less than", -(2**63) - 1), ("more than", 2**63))},
    "another name of the route": (post("/invocations", {"messages": TALK}), NO_ROUTE),
})  # fmt: skip
OPPOSITE = [{"role": "user", "content": "What is the opposite of big?"}]
CHOICES = cases({
    "three choices": (chat(OPPOSITE, max_completion_tokens=20, temperature=0.7, n=3),
        that("indices", lambda bodies: [one["index"] for one in bodies[-1]["choices"]] == [0, 1, 2]),
        that("different texts", lambda bodies: len({one["message"]["content"] for one in bodies[-1]["choices"]})
        > 1), each("choices.*.message.content", "is a text", bool)),
    "a stream of two choices": (chat(OPPOSITE, max_completion_tokens=15, temperature=0.7, n=2, stream=True),
        text("texts.0"), text("texts.1")),
    "two choices with a seed": (chat(HELLO, max_completion_tokens=10, temperature=0.8, n=2, seed=42),
        count("choices", 2), each("choices.*.message.content", "is a text", bool)),
    "one choice": (chat(HELLO, max_completion_tokens=10, temperature=0.7, n=1), count("choices", 1),
        equals("choices.0.index", 0)),
    "one choice by default": (chat(HELLO, max_completion_tokens=10), count("choices", 1)),
})  # fmt: skip
SUITES = {"openai/chat_completion/test_chat.py": [*LOGPROBS, *SESSION, *OPTIONS, *STRUCTURED, *FIELDS, *CHOICES]}
