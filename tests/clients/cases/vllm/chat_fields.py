"""Chat completions: fields that are checked, reasoning, and routes of their own."""

from __future__ import annotations

from clients.cases.bodies import HELLO, chat, post
from clients.cases.case import Case, Request, different, refused
from clients.cases.expect import (
    count,
    differs,
    each,
    empty,
    error,
    fails,
    has,
    integer,
    ok,
    same,
    text,
)
from clients.cases.vllm.chats import CONTENT, SCHEMA, SCORED, structured

BIAS = [
    Case("a bias of a token id", chat(max_tokens=5, logit_bias={"263": 1.0}), ok(text(CONTENT))),
    Case("a bias of an id beyond the vocabulary", chat(max_tokens=5, logit_bias={"265": 1.0}), error(400, "265")),
    Case(
        "the error of an id beyond the vocabulary has its size",
        chat(logit_bias={"265": 1.0}),
        error(400, "265", "264"),
        different("The message names the least and the greatest id instead of the size."),
    ),
    Case(
        "a bias of a key that is no id",
        chat(logit_bias={"not_a_token_id": 50}),
        error(400, "not_a_token_id", "logit_bias"),
    ),
    Case("a bias that is no number", chat(logit_bias={"1": "not_a_number"}), error(400, "logit_bias")),
    Case(
        "two keys that are no ids",
        chat(logit_bias={"bad1": 50.0, "bad2": 20.0}),
        error(400, "bad1", "bad2"),
        different("The error names the first wrong key."),
    ),
]
STOPS = [
    Case("a token id that ends the output", chat(max_tokens=5, stop_token_ids=[263]), ok(text(CONTENT))),
    Case("an id beyond the vocabulary", chat(stop_token_ids=[265]), error(400, "265")),
    Case("a negative id", chat(stop_token_ids=[-1]), error(400)),
]
SAYING = "An apple a day, keeps"
SAID = [{"role": "user", "content": "a saying?"}, {"role": "assistant", "content": SAYING}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 8}
ECHO = [
    Case(
        "a message that is continued and repeated",
        chat(SAID, echo=True, **CONTINUED),
        ok(text(CONTENT, SAYING)),
        refused("echo"),
    ),
    Case(
        "a message that is continued",
        chat(SAID, echo=False, **CONTINUED),
        ok(text(CONTENT)),
    ),
    Case(
        "log-probabilities of all tokens of the prompt",
        chat(prompt_logprobs=-1),
        ok(has("prompt_logprobs.0")),
        refused("prompt_logprobs"),
    ),
    Case(
        "log-probabilities of all tokens",
        chat(max_tokens=1, top_logprobs=-1, logprobs=True),
        ok(has(SCORED)),
        refused("top_logprobs"),
    ),
    Case(
        "log-probabilities that are a text",
        chat(max_tokens=1, top_logprobs=1, logprobs="true"),
        ok(has(SCORED)),
        refused("logprobs"),
    ),
]
CUT = {"max_tokens": 1, "truncate_prompt_tokens": 4, "truncation_side": "right"}
BAD = {**SCHEMA, "properties": {"foo": "bar"}}
OTHER = [
    Case("a prompt that is cut", chat(**CUT), ok(), refused("truncate_prompt_tokens")),
    Case("a schema with a wrong property", structured(json=BAD), fails()),
    Case(
        "a response format with a wrong property",
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}),
        fails(),
    ),
    Case(
        "a wrong regular expression",
        chat(structured_outputs={"regex": "[.*"}, stop=["\n"]),
        fails(),
    ),
    Case(
        "a wrong grammar",
        structured(grammar="root ::= select_statementinvalidsyntax"),
        fails(),
    ),
    Case("an empty grammar", structured(grammar=""), fails()),
]
BODIES = [
    Case(
        "a body that is no JSON",
        Request(
            path="/v1/chat/completions", body=b"this is not valid json{{{", headers={"Content-Type": "application/json"}
        ),
        fails(),
    ),
    Case("a body that is a list", post("/v1/chat/completions", ["not", "an", "object"]), fails()),
    Case("a body that is a number", post("/v1/chat/completions", 42), fails()),
    Case(
        "a body that is null",
        Request(path="/v1/chat/completions", body=b"null", headers={"Content-Type": "application/json"}),
        fails(),
    ),
    Case("an empty cache salt", chat(cache_salt=""), error(400, "cache_salt")),
    Case("a cache salt", chat(cache_salt="a", max_tokens=4), ok(text(CONTENT))),
]
ERRORS = [
    Case(
        "a system message of parts",
        chat([{"role": "system", "content": [{"type": "text", "text": "Help."}]}], max_tokens=4),
        ok(text(CONTENT)),
    ),
    Case("a system message alone", chat([{"role": "system", "content": "Help."}], max_tokens=4), ok(text(CONTENT))),
    *(
        Case(
            f"a message with {kind}",
            chat([{"role": "user", "content": [{"type": kind, kind: {"url": "https://a.example/b"}}]}], max_tokens=4),
            ok(),
            refused("messages.content.type"),
        )
        for kind in ("image_url", "video_url", "input_audio")
    ),
    Case("a JSON schema that is missing", chat(response_format={"type": "json_schema"}), error(400, "json_schema")),
]
THINKING = [
    *(
        Case(
            f"a budget of {value} thinking tokens",
            chat(HELLO, thinking_token_budget=value),
            error(400, "thinking_token_budget"),
        )
        for value in (-2, 0.6, 10.5)
    ),
    Case(
        "a budget of thinking tokens",
        chat(HELLO, thinking_token_budget=10, max_tokens=4),
        ok(),
    ),
    Case(
        "an unlimited budget of thinking tokens",
        chat(HELLO, thinking_token_budget=-1, max_tokens=4),
        ok(),
    ),
]
REASONED = "choices.0.message.reasoning_content"
REASONING = [
    Case(
        "reasoning is included",
        chat(include_reasoning=True, temperature=0),
        ok(text(REASONED), text(CONTENT)),
        server="thinks",
    ),
    Case(
        "reasoning is left out",
        chat(include_reasoning=False, temperature=0),
        ok(empty(REASONED), text(CONTENT)),
        refused("include_reasoning"),
        server="thinks",
    ),
    Case(
        "reasoning is left out of a stream",
        chat(include_reasoning=False, temperature=0, stream=True),
        ok(empty("reasoning"), text("texts.0")),
        refused("include_reasoning"),
        server="thinks",
    ),
    Case("reasoning by default", chat(temperature=0), ok(text(REASONED), text(CONTENT)), server="thinks"),
    Case(
        "a stream of reasoning by default",
        chat(temperature=0, stream=True),
        ok(text("reasoning"), text("texts.0")),
        server="thinks",
    ),
    Case(
        "reasoning tokens in the usage",
        chat(temperature=0),
        ok(integer("usage.completion_tokens_details.reasoning_tokens", 1)),
        server="thinks",
    ),
]
IDS = [100, 200, 210]
PINNED = {"max_tokens": 1, "temperature": 0, "logprobs": True}
NUMBERED = [
    Case(
        "log-probabilities of chosen ids",
        chat(**PINNED, top_logprobs=3, logprob_token_ids=IDS),
        ok(count(SCORED, 3)),
        refused("logprob_token_ids"),
    ),
    Case(
        "likeliest tokens without chosen ids",
        chat(**PINNED, top_logprobs=5),
        ok(count(SCORED, 5), each(f"{SCORED}.*.logprob", "<= 0", lambda one: one <= 0)),
    ),
]
LANGUAGES = [{"role": "user", "content": [{"type": "text", "text": "A fox.", "source_lang_code": "en"}]}]
EXTRA = [
    Case(
        "a field of a part that only a template reads",
        chat(LANGUAGES, max_tokens=4),
        ok(text(CONTENT)),
        refused("messages.content.source_lang_code"),
    ),
]
WITHOUT = [
    Case(
        "chosen ids that are an empty list", chat(HELLO, logprob_token_ids=[]), error(400), refused("logprob_token_ids")
    ),
    Case(
        "chosen ids without log-probabilities",
        chat(HELLO, logprob_token_ids=[100]),
        error(400),
        refused("logprob_token_ids"),
    ),
    Case("chosen ids that are a number", chat(HELLO, logprob_token_ids=123), error(400), refused("logprob_token_ids")),
]
TWO = [HELLO, [{"role": "user", "content": "Bye"}]]
BATCH = [
    Case(
        f"conversations of one request{name}",
        post("/v1/chat/completions/batch", {"messages": TWO, **more}),
        ok(count("choices", 2)),
        refused("/v1/chat/completions/batch"),
    )
    for name, more in (
        ("", {}),
        (" with a format", {"response_format": {"type": "json_object"}}),
        (" with ids", {"return_token_ids": True}),
    )
]
FORCED = [
    Case(
        "usage without a request for it",
        chat(stream=True, max_tokens=4),
        ok(has("events.-1.usage")),
        different("A stream has its usage if `stream_options` requests it; no setting of the server adds it."),
    )
]
ROOTS = [
    Case(
        "a chat with a wrong key",
        post("/v1/chat/completions", {"messages": HELLO}, headers={"Authorization": "Bearer abc"}),
        error(401),
        server="keys",
    ),
    Case(
        "a path before the routes",
        post("/llm/v1/chat/completions", {"messages": HELLO}),
        ok(),
        refused("/llm/v1/chat/completions"),
    ),
]
EFFORTS = [
    *(
        Case(
            f"an effort of {effort}",
            chat(HELLO, reasoning_effort=effort, max_tokens=4),
            ok(text(CONTENT)),
            server="efforts",
        )
        for effort in ("none", "low", "medium", "high")
    ),
    Case("no effort", chat(HELLO, max_tokens=4), ok(text(CONTENT)), server="efforts"),
    Case(
        "an effort of none of a model that does not reason",
        chat(HELLO, reasoning_effort="none", max_tokens=4),
        ok(text(CONTENT)),
    ),
    Case(
        "an effort and the keyword of the template",
        [
            chat(HELLO, reasoning_effort="none", max_tokens=1),
            chat(HELLO, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}, max_tokens=1),
        ],
        ok(differs("usage.prompt_tokens")),
        server="efforts",
    ),
    Case(
        "an effort and a keyword that no template reads",
        chat(HELLO, reasoning_effort="none", chat_template_kwargs={"custom_key": "value"}, max_tokens=4),
        ok(text(CONTENT)),
        refused("chat_template_kwargs"),
        server="efforts",
    ),
    Case(
        "an effort of none turns thoughts off",
        [
            chat(HELLO, reasoning_effort="none", max_tokens=1),
            chat(HELLO, reasoning_effort="none", chat_template_kwargs={"enable_thinking": False}, max_tokens=1),
        ],
        ok(same("usage.prompt_tokens")),
        server="efforts",
    ),
]
BASE = "openai/chat_completion/"
SUITES = {
    f"{BASE}test_chat_logit_bias_validation.py": BIAS,
    f"{BASE}test_chat_stop_token_ids_validation.py": STOPS,
    f"{BASE}test_chat_echo.py": ECHO,
    f"{BASE}test_chat_completion.py": OTHER,
    f"{BASE}test_non_object_body_validation.py": BODIES,
    f"{BASE}test_chat_error.py": ERRORS,
    f"{BASE}test_thinking_token_budget_validation.py": THINKING,
    f"{BASE}test_include_reasoning.py": REASONING,
    f"{BASE}test_logprob_token_ids.py": NUMBERED,
    f"{BASE}test_logprob_token_ids_validation.py": WITHOUT,
    f"{BASE}test_extra_content_fields.py": EXTRA,
    f"{BASE}test_batched_chat_completions.py": BATCH,
    f"{BASE}test_enable_force_include_usage.py": FORCED,
    f"{BASE}test_root_path.py": ROOTS,
    f"{BASE}test_reasoning_effort.py": EFFORTS,
}
