"""Completions: prompts, log-probabilities, streams, choices, and fields that are checked."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import HELLO, PROMPT, chat, complete, post
from clients.cases.case import Case, Request, cases, different, refused
from clients.cases.expect import count, each, equals, error, fails, has, integer, lacks, ok, same, text, that

TEXT = "choices.0.text"
IDS = [0, 0, 0, 0, 0]
FIVE = {"max_tokens": 5, "temperature": 0.0}
LLM = "What is an LLM?"
SINGLE = cases({
    "5 tokens after a text": ([post("/tokenize", {"prompt": PROMPT}), complete(**FIVE)], has("id"),
        count("choices", 1), text(TEXT, ".{5}"), equals("choices.0.finish_reason", "length"),
        equals("usage.completion_tokens", 5), same("count", "usage.prompt_tokens"),
        that("total", lambda bodies: bodies[1]["usage"]["total_tokens"] == bodies[0]["count"] + 5),
        integer("usage.prompt_tokens_details.cached_tokens")),
    "5 tokens after token ids": (complete(IDS, **FIVE), text(TEXT), lacks("choices.0.prompt_logprobs")),
    "a prompt that is cut on the right": (complete([4, 5, 6], max_tokens=1, truncate_prompt_tokens=2,
        truncation_side="right"), refused("truncate_prompt_tokens")),
    "a prompt that is cut on the left": (complete([4, 5, 6], max_tokens=1, truncate_prompt_tokens=2,
        truncation_side="left"), refused("truncate_prompt_tokens")),
    "no log-probabilities": (complete(IDS, **FIVE, logprobs=None), lacks("choices.0.logprobs")),
    "log-probabilities without likeliest tokens": (complete(IDS, **FIVE, logprobs=0),
        has("choices.0.logprobs.token_logprobs.0"), count("choices.0.logprobs.top_logprobs.0", 1)),
    "5 likeliest tokens": (complete(IDS, **FIVE, logprobs=5),
        that("5 or 6", lambda bodies: 5 <= len(bodies[-1]["choices"][0]["logprobs"]["top_logprobs"][0]) <= 6)),
    "21 likeliest tokens": (complete(IDS, **FIVE, logprobs=21), error(400, "logprobs")),
    "30 likeliest tokens in a stream": (complete(IDS, **FIVE, logprobs=30, stream=True), error(400, "logprobs")),
    "a completion after a refused one": ([complete(IDS, **FIVE, logprobs=30), complete(IDS, **FIVE)], text(TEXT)),
    **{f"log-probabilities of the prompts: {number}": (complete(["A robot", "My name is"], prompt_logprobs=number),
        has("choices.1.prompt_logprobs.0"), refused("prompt_logprobs")) for number in (0, 1)},
    "log-probabilities of the prompts: -1": (complete(["A robot", "My name is"], prompt_logprobs=-1), error(400),
        refused("prompt_logprobs")),
    "log-probabilities of the prompts: null": (complete(["A robot", "My name is"], prompt_logprobs=None),
        lacks("choices.0.prompt_logprobs")),
})  # fmt: skip
FIFTY: dict[str, Any] = {"max_tokens": 50, "n": 3, "temperature": 1.0, "seed": 42}
STREAMS = cases({
    "a stream has the text of a whole response": ([complete(LLM, **FIVE), complete(LLM, **FIVE, stream=True)],
        same(TEXT, "texts.0"), equals("finish_reasons", ["length"]), has("events.-1.choices.0.finish_reason")),
    "three outputs of a prompt": (complete(LLM, **FIFTY, logprobs=0),
        that("indices", lambda bodies: [one["index"] for one in bodies[-1]["choices"]] == [0, 1, 2]),
        each("choices.*.finish_reason", "is a text", bool),
        that("different texts", lambda bodies: len({one["text"] for one in bodies[-1]["choices"]}) == 3)),
    "a stream of three outputs": (complete(LLM, **FIFTY, stream=True), count("finish_reasons", 3),
        that("different texts", lambda bodies: len(set(bodies[-1]["texts"].values())) == 3)),
})  # fmt: skip


def _streamed(**options: Any) -> Request:
    return complete(LLM, **FIVE, stream=True, stream_options=options)


NULL = different("A field that is null counts as absent, so the options are empty and accepted.")
OPTIONS = cases({
    "no usage in a stream": (_streamed(include_usage=False, continuous_usage_stats=False), equals("usages", [])),
    "usage so far without usage": (_streamed(include_usage=False, continuous_usage_stats=True),
        refused("stream_options.continuous_usage_stats")),
    "usage in the last event only": (_streamed(include_usage=True, continuous_usage_stats=False),
        count("usages", 1), equals("events.-1.choices", []), equals("events.-1.usage.completion_tokens", 5)),
    "usage so far in each event": (_streamed(include_usage=True, continuous_usage_stats=True),
        that("each event", lambda bodies: len(bodies[-1]["usages"]) == len(bodies[-1]["events"])),
        equals("events.-1.choices", []), each("usages.*.completion_tokens", "> 0", lambda one: one > 0),
        each("usages.*", "is a sum", lambda one: one["total_tokens"] == one["prompt_tokens"]
        + one["completion_tokens"])),
    "empty stream options": (_streamed(), equals("usages", [])),
    **{f"stream options without a stream: {name}": (complete(LLM, **FIVE, stream_options={name: True}), error(400))
        for name in ("include_usage", "continuous_usage_stats")},
    **{f"stream options without a stream: {name} null": (complete(LLM, **FIVE, stream_options={name: None}),
        error(400), NULL) for name in ("include_usage", "continuous_usage_stats")},
})  # fmt: skip
EQUAL = that("equal texts", lambda bodies: bodies[-1]["choices"][0]["text"] == bodies[-1]["choices"][1]["text"])
BATCHES = [
    case
    for name, prompts in (("texts", [PROMPT] * 2), ("token ids", [IDS] * 2))
    for case in (
        Case(f"two {name}", complete(prompts, **FIVE), ok(count("choices", 2), EQUAL)),
        Case(
            f"beam search of two {name}",
            complete(prompts, **FIVE, n=2, use_beam_search=True),
            ok(count("choices", 4)),
            refused("use_beam_search"),
        ),
        Case(
            f"a stream of two {name}",
            complete(prompts, **FIVE, stream=True),
            ok(same("texts.0", "texts.1", -1, -1), each("events.*.choices", "has one", lambda one: len(one) == 1)),
        ),
    )
]


def _echoed(prompt: Any, number: int) -> list[Any]:
    scores = "choices.0.logprobs"
    return ok(
        that("more than 5 tokens", lambda bodies: len(bodies[-1]["choices"][0]["logprobs"]["tokens"]) > 5),
        equals(f"{scores}.token_logprobs.0", None),
        equals(f"{scores}.top_logprobs.0", None),
        that(
            "likeliest tokens",
            lambda bodies: all(
                max(number, 1) <= len(one) <= number + 1
                for one in bodies[-1]["choices"][0]["logprobs"]["top_logprobs"][1:]
            ),
        ),
        *([text(TEXT, "^" + prompt)] if isinstance(prompt, str) else []),
    )


ECHOES = cases({
    f"{name} repeated, with {number} likeliest tokens": (complete(prompt, **FIVE, echo=True, logprobs=number),
        _echoed(prompt, number)) for name, prompt in (("a text", PROMPT), ("token ids", IDS)) for number in (1, 0)
})  # fmt: skip
WRONG = cases({
    name: (complete(LLM, structured_outputs=kind), fails()) for name, kind
        in (("a schema with a wrong property", {"json": {"properties": {"foo": "bar"}}}),
        ("a wrong regular expression", {"regex": "[.*"}), ("a wrong grammar",
        {"grammar": "root ::= select_statementinvalidsyntax"}))
})  # fmt: skip
VALIDATION = cases({
    "no prompt": (complete(None, **FIVE), error(400, "prompt")),
    "a token id beyond the vocabulary": (complete([999999], **FIVE), error(400)),
    "the message of a token id beyond the vocabulary": (complete([999999], **FIVE),
        error(400, "out of vocabulary"), different("The error has another message, with the range of ids.")),
    "embeddings as a prompt that are empty": (complete(None, prompt_embeds=[]), error(400), refused("prompt_embeds")),
    "hidden states of a completion": (complete(max_tokens=1, kv_transfer_params={"return_last_hidden_state": True}),
        refused("kv_transfer_params")),
    "hidden states of a chat": (chat(HELLO, max_tokens=1, kv_transfer_params={"return_last_hidden_state": True}),
        refused("kv_transfer_params")),
})  # fmt: skip
ERRORS = cases({
    "a JSON schema that is missing": (complete(response_format={"type": "json_schema"}), error(400)),
    "a negative token id among lists": (complete([[-1]]), error(400)),
    "a negative token id": (complete([-1]), error(400)),
})  # fmt: skip
LISTS = cases({
    "an empty list of prompts": (complete([]), error(400, "prompt")),
    "a list of one prompt": (complete(["hello"], max_tokens=4), count("choices", 1)),
})  # fmt: skip
ROCKET = "Complete with emojis: I love coding 🚀"
AS_IDS = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "return_tokens_as_token_ids": True}
NUMBERS = cases({
    "token ids of a completion": (complete(ROCKET, max_tokens=10, return_token_ids=True), refused("return_token_ids")),
    "no token ids of a completion": (complete(ROCKET, max_tokens=10, return_token_ids=False),
        lacks("choices.0.token_ids"), lacks("prompt_token_ids")),
    "token ids of a chat": (chat(HELLO, max_tokens=10, return_token_ids=True), refused("return_token_ids")),
    "no token ids of a chat": (chat(HELLO, max_tokens=10, return_token_ids=False), lacks("choices.0.token_ids")),
    "token ids of a stream": (chat(HELLO, max_tokens=10, return_token_ids=True, stream=True),
        refused("return_token_ids")),
})  # fmt: skip
TOKENS = cases({
    "tokens of a completion as ids": (complete("Hi 🎉", **AS_IDS), refused("return_tokens_as_token_ids")),
    "tokens of a chat as ids": (chat(HELLO, max_tokens=8, logprobs=True, return_tokens_as_token_ids=True),
        refused("return_tokens_as_token_ids")),
})  # fmt: skip
IN_AND_OUT = cases({
    "token ids in and out": (complete([5, 6, 7], max_tokens=8, echo=True, return_token_ids=True),
        refused("return_token_ids")),
})  # fmt: skip
SCORED = complete("Hi", max_tokens=8, logprobs=0, temperature=0, stop=["zz"])
OFFSETS = cases({
    "offsets of a stream are those of a whole response": ([SCORED,
        complete("Hi", max_tokens=8, logprobs=0, temperature=0, stop=["zz"], stream=True)],
        that("equal offsets", lambda bodies: ([one for event in bodies[1]["events"] for one
        in event["choices"][0]["logprobs"]["text_offset"]] == bodies[0]["choices"][0]["logprobs"]["text_offset"]))),
})  # fmt: skip
EMBEDS = cases({
    "embeddings as a prompt": (complete(None, **FIVE, prompt_embeds="AAAA"), refused("prompt_embeds")),
    "embeddings that are no base64": (complete(None, **FIVE, prompt_embeds="invalid_base64"), error(400),
        refused("prompt_embeds")),
    "no embeddings next to a prompt": (complete("Hello", **FIVE, prompt_embeds=[]), refused("prompt_embeds")),
})  # fmt: skip
BUDGETS = cases({
    **{f"a budget of {value} thinking tokens": (complete(thinking_token_budget=value),
        error(400, "thinking_token_budget")) for value in (0.6, 3.14, -2)},
    "a budget of thinking tokens": complete(thinking_token_budget=5),
})  # fmt: skip
BASE = "openai/completion/"
SUITES = {
    f"{BASE}test_completion.py": [*SINGLE, *STREAMS, *OPTIONS, *BATCHES, *ECHOES, *WRONG],
    f"{BASE}test_prompt_validation.py": VALIDATION,
    f"{BASE}test_completion_error.py": ERRORS,
    f"{BASE}test_empty_prompt_list.py": LISTS,
    f"{BASE}test_token_in_token_out.py": IN_AND_OUT,
    f"{BASE}test_completion_text_offset.py": OFFSETS,
    f"{BASE}test_completion_with_prompt_embeds.py": EMBEDS,
    "openai/basic/test_return_token_ids.py": NUMBERS,
    "openai/test_return_tokens_as_ids.py": TOKENS,
    "openai/completion/test_thinking_token_budget_validation.py": BUDGETS,
}
