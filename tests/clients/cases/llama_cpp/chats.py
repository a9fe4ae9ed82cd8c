"""Chat completions."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import TALK, chat, post
from clients.cases.case import NO_ROUTE, Check, From, Request, cases, different, refused
from clients.cases.expect import count, each, equals, error, fails, has, integer, lacks, same, status, text, that

BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
PARTS = [
    BOOK[0],
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]},
]
JOINED = [BOOK[0], {"role": "user", "content": "What isthe best book"}]
WHOLE = [
    text("id", "cmpl"),
    text("system_fingerprint"),
    equals("usage.completion_tokens", 8),
    equals("choices.0.message.role", "assistant"),
    text("choices.0.message.content"),
    equals("choices.0.finish_reason", "length"),
]


def _counted(messages: Any, **fields: Any) -> list[Request]:
    return [post("/tokenize", {"messages": messages}), chat(messages, max_tokens=8, **fields)]


def _chat_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": one} for one in contents]


PROMPT_TOKENS = same("count", "usage.prompt_tokens")
STREAMED = [
    equals("events.0.choices.0.delta.role", "assistant"),
    each("events.*.id", "is that of the first event", lambda one: one.startswith("chatcmpl-")),
    that("one id", lambda bodies: len({one["id"] for one in bodies[-1]["events"]}) == 1),
    that(
        "no second role",
        lambda bodies: (
            not any("role" in choice["delta"] for event in bodies[-1]["events"][1:] for choice in event["choices"])
        ),
    ),
    each("events.*.system_fingerprint", "is a text", lambda one: bool(one)),
    each("events.*.model", "is the model", lambda one: one == "tiny"),
    that("no content with the finish reason", lambda bodies: not bodies[-1]["events"][-1]["choices"][0]["delta"]),
    equals("finish_reasons", ["length"]),
    text("texts.0"),
]
PLAIN = cases({
    "a chat of two messages": (_counted([BOOK[0], {"role": "user", "content": "Hey"}]), *WHOLE, PROMPT_TOKENS),
    "a question of a user": (_counted(BOOK), *WHOLE, PROMPT_TOKENS),
    "a question in two parts": (_counted(PARTS), *WHOLE, PROMPT_TOKENS),
    "parts of a content are separate lines": ([post("/tokenize", {"messages": PARTS}),
        post("/tokenize", {"messages": JOINED})], that("more tokens", lambda bodies: bodies[0]["count"]
        > bodies[1]["count"]),
        different("Parts are joined without a separator; llama.cpp puts a line break between them.")),
    "the route without the prefix v1": (post("/chat/completions", {"messages": BOOK, "max_tokens": 8}), NO_ROUTE),
    "an answer of 128 tokens": (chat(BOOK, max_tokens=128), equals("usage.completion_tokens", 128),
        equals("choices.0.finish_reason", "length")),
    "a stream": (chat(BOOK, max_tokens=8, stream=True), *STREAMED),
    "a stream of 128 tokens": (chat(BOOK, max_tokens=128, stream=True), *STREAMED),
    "the first event of a stream has null content": (chat(BOOK, max_tokens=8, stream=True),
        has("events.0.choices.0.delta.content"), lacks("events.0.choices.0.delta.content"),
        different("The first event has an empty content, as OpenAI's and vLLM's have.")),
    "usage at the end of a stream": ([post("/tokenize", {"messages": BOOK}),
        chat(BOOK, max_tokens=8, stream=True, stream_options={"include_usage": True})],
        equals("events.-1.choices", []), same("count", "events.-1.usage.prompt_tokens"),
        equals("events.-1.usage.completion_tokens", 8)),
    "any name of a model is accepted": (chat(BOOK, model="gpt-3.5-turbo-instruct", max_tokens=8), refused("model")),
    "a sampled chat with a seed": (chat(BOOK, model="tiny", max_tokens=8, seed=42, temperature=0.8), *WHOLE),
    "the prompt by the template": (post("/apply-template", {"messages": [{"role": "system", "content":
        "You are a test."}, {"role": "user", "content": "Hi there"}]}), NO_ROUTE),
    "the prompt by the template as token ids": ([post("/tokenize", {"messages": TALK}),
        post("/detokenize", {"tokens": From(0, "tokens")})],
        equals("prompt", "<bos><user>You are helpful.<user>What is 1+1?<assistant>")),
    "a last message of the assistant is continued": ([post("/tokenize",
        {"messages": [*BOOK, {"role": "assistant", "content": "Whill"}]}),
        post("/detokenize", {"tokens": From(0, "tokens")})], text("prompt", "Whill$"),
        different("A last message of the assistant is a complete turn unless `continue_final_message` is true.")),
    "a last message of the assistant in parts": (chat([*BOOK,
        {"role": "assistant", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]}],
        max_tokens=8), text("choices.0.message.content")),
    "two last messages of the assistant": (chat([{"role": "user", "content": "test"},
        {"role": "assistant", "content": "test"}, {"role": "assistant", "content": "test"}], max_tokens=4),
        fails(),
        different("Messages of the assistant may follow each other; the chat template decides whether they can be rendered.")
        ),
    "two choices": (chat(BOOK, max_tokens=8, n=2), count("choices", 2),
        each("choices.*.finish_reason", "length", lambda one: one == "length"),
        each("choices.*.message.role", "assistant", lambda one: one == "assistant")),
})  # fmt: skip


def _constrained(response_format: Any, **fields: Any) -> Request:
    return chat(TALK, max_tokens=40, temperature=0, response_format=response_format, **fields)


FORTY_TWO: dict[str, Any] = {"const": "42"}
FORMATS = cases({
    "a JSON object with a schema next to it": (_constrained({"type": "json_object", "schema": FORTY_TWO}),
        text("choices.0.message.content", '^"42"$')),
    "a JSON object with a schema of items": (_constrained({"type": "json_object",
        "schema": {"items": [{"type": "integer"}]}}), text("choices.0.message.content")),
    "a JSON schema without a name": (_constrained({"type": "json_schema",
        "json_schema": {"schema": {"const": "foooooo"}}}), text("choices.0.message.content", '^"foooooo"$')),
    "a JSON schema with a name": (_constrained({"type": "json_schema",
        "json_schema": {"name": "a", "schema": {"const": "foooooo"}}}),
        text("choices.0.message.content", '^"foooooo"$')),
    "a JSON object": (_constrained({"type": "json_object"}), text("choices.0.message.content", r"^\s*\{")),
    "an unknown type of a format": (_constrained({"type": "sound"}), error(400)),
    "a schema that is a number": (_constrained({"type": "json_object", "schema": 123}), error(400)),
    "a schema whose type is a number": (_constrained({"type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": 123}}}), error(400)),
    "a schema of an unknown type": (_constrained({"type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "hiccup"}}}), error(400)),
    "a schema in its own field": (chat(TALK, max_tokens=8, json_schema=FORTY_TWO),
        text("choices.0.message.content", '"42"')),
    "a grammar": (chat(TALK, max_tokens=8, grammar='root ::= "a"{5,5}'), text("choices.0.message.content", "a{5}")),
})  # fmt: skip
INVALID = cases({
    name: (chat(messages, max_tokens=4), fails()) for name, messages
        in (("messages that are null", None), ("messages that are a text", "string"),
        ("a message that is a number", [123]), ("an empty message", [{}]),
        ("a role that is a number", [{"role": 123}]), ("a content that is a number",
        [{"role": "system", "content": 123}]), ("an empty message after another",
        [{"role": "system", "content": "test"}, {}]))
})  # fmt: skip
LONG = _chat_of("What is the best book") * 100
TOP = {"temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 10}


def _entries(path: str) -> list[Check]:
    """Return the expectations of log-probabilities with 10 likeliest tokens."""
    return [
        each(f"{path}.*.logprob", "<= 0", lambda one: one <= 0),
        each(f"{path}.*.bytes", "is a list", lambda one: isinstance(one, list)),
        each(f"{path}.*.top_logprobs", "has 10 items", lambda one: len(one) == 10),
    ]


TIMINGS = {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
PROGRESS = {"stream": True, "return_progress": True}
OTHERS = cases({
    "timings of each token": (chat(TALK, max_tokens=10, **TIMINGS), refused("timings_per_token")),
    "progress of the prompt": (chat(TALK, max_tokens=10, **PROGRESS), refused("return_progress")),
    "progress of a cached prompt": ([chat(TALK, max_tokens=10), chat(TALK, max_tokens=10, **PROGRESS)],
        refused("return_progress")),
    "log-probabilities of tokens that make up the text": (chat(BOOK, **TOP),
        *_entries("choices.0.logprobs.content"), that("the text",
        lambda bodies: ("".join(one["token"] for one in bodies[-1]["choices"][0]["logprobs"]["content"])
        == bodies[-1]["choices"][0]["message"]["content"]))),
    "log-probabilities of a stream": (chat(BOOK, stream=True, **TOP),
        *_entries("events.*.choices.0.logprobs.content"), that("the text",
        lambda bodies: ("".join(one["token"] for event in bodies[-1]["events"] for one
        in (event["choices"][0]["logprobs"] or {"content": []})["content"]) == bodies[-1]["texts"]["0"]))),
    "a bias against tokens": ([chat(BOOK, temperature=0, max_tokens=16, logprobs=True),
        chat(BOOK, temperature=0, max_tokens=16, logit_bias={str(token): -100 for token in range(4, 150)})],
        text("choices.0.message.content"), that("another text",
        lambda bodies: (bodies[0]["choices"][0]["message"]["content"] != bodies[1]["choices"][0]["message"]["content"]))),
    "a prompt longer than the context": (chat(LONG), error(400), text("error.code", "context_length_exceeded"),
        "small"),
    "the error's type and numbers of a prompt longer than the context": (chat(LONG), status(400),
        equals("error.type", "exceed_context_size_error"), integer("error.n_prompt_tokens", 1),
        integer("error.n_ctx", 1),
        different("The error has OpenAI's type and code; its message has both numbers of tokens."), "small"),
    "a stream of a prompt longer than the context": (chat(LONG, stream=True), error(400),
        text("error.code", "context_length_exceeded"), "small"),
})  # fmt: skip
SUITES = {"test_chat_completion.py": [*PLAIN, *FORMATS, *INVALID, *OTHERS]}
