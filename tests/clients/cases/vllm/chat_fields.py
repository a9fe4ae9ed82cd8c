"""Chat completions: fields that are checked, reasoning, and routes of their own."""

from __future__ import annotations

from clients.cases.bodies import HELLO, chat, post
from clients.cases.case import NO_ROUTE, Request, cases, different, refused
from clients.cases.expect import count, differs, each, error, fails, has, integer, same, text
from clients.cases.vllm.chats import CONTENT, SCHEMA, SCORED, structured

BIAS = cases({
    "a bias of a token id": (chat(max_tokens=5, logit_bias={"263": 1.0}), text(CONTENT)),
    "a bias of an id beyond the vocabulary": (chat(max_tokens=5, logit_bias={"265": 1.0}), error(400, "265")),
    "the error of an id beyond the vocabulary has its size": (chat(logit_bias={"265": 1.0}),
        error(400, "265", "264"), different("The message names the least and the greatest id instead of the size.")),
    "a bias of a key that is no id": (chat(logit_bias={"not_a_token_id": 50}),
        error(400, "not_a_token_id", "logit_bias")),
    "a bias that is no number": (chat(logit_bias={"1": "not_a_number"}), error(400, "logit_bias")),
    "two keys that are no ids": (chat(logit_bias={"bad1": 50.0, "bad2": 20.0}), error(400, "bad1", "bad2"),
        different("The error names the first wrong key.")),
})  # fmt: skip
STOPS = cases({
    "a token id that ends the output": (chat(max_tokens=5, stop_token_ids=[263]), text(CONTENT)),
    "an id beyond the vocabulary": (chat(stop_token_ids=[265]), error(400, "265")),
    "a negative id": (chat(stop_token_ids=[-1]), error(400)),
})  # fmt: skip
SAYING = "An apple a day, keeps"
SAID = [{"role": "user", "content": "a saying?"}, {"role": "assistant", "content": SAYING}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 8}
ECHO = cases({
    "a message that is continued and repeated": (chat(SAID, echo=True, **CONTINUED), refused("echo")),
    "a message that is continued": (chat(SAID, echo=False, **CONTINUED), text(CONTENT)),
    "log-probabilities of all tokens of the prompt": (chat(prompt_logprobs=-1), refused("prompt_logprobs")),
    "log-probabilities of all tokens": (chat(max_tokens=1, top_logprobs=-1, logprobs=True), refused("top_logprobs")),
    "log-probabilities that are a text": (chat(max_tokens=1, top_logprobs=1, logprobs="true"), refused("logprobs")),
})  # fmt: skip
CUT = {"max_tokens": 1, "truncate_prompt_tokens": 4, "truncation_side": "right"}
BAD = {**SCHEMA, "properties": {"foo": "bar"}}
OTHER = cases({
    "a prompt that is cut": (chat(**CUT), refused("truncate_prompt_tokens")),
    "a schema with a wrong property": (structured(json=BAD), fails()),
    "a response format with a wrong property": (chat(response_format={"type": "json_schema",
        "json_schema": {"name": "a", "schema": BAD}}), fails()),
    "a wrong regular expression": (chat(structured_outputs={"regex": "[.*"}, stop=["\n"]), fails()),
    "a wrong grammar": (structured(grammar="root ::= select_statementinvalidsyntax"), fails()),
    "an empty grammar": (structured(grammar=""), fails()),
})  # fmt: skip
BODIES = cases({
    "a body that is no JSON": (Request(path="/v1/chat/completions", body=b"this is not valid json{{{",
        headers={"Content-Type": "application/json"}), fails()),
    "a body that is a list": (post("/v1/chat/completions", ["not", "an", "object"]), fails()),
    "a body that is a number": (post("/v1/chat/completions", 42), fails()),
    "a body that is null": (Request(path="/v1/chat/completions", body=b"null",
        headers={"Content-Type": "application/json"}), fails()),
    "an empty cache salt": (chat(cache_salt=""), error(400, "cache_salt")),
    "a cache salt": (chat(cache_salt="a", max_tokens=4), text(CONTENT)),
})  # fmt: skip
ERRORS = cases({
    "a system message of parts": (chat([{"role": "system", "content": [{"type": "text", "text": "Help."}]}],
        max_tokens=4), text(CONTENT)),
    "a system message alone": (chat([{"role": "system", "content": "Help."}], max_tokens=4), text(CONTENT)),
    **{f"a message with {kind}": (chat([{"role": "user",
        "content": [{"type": kind, kind: {"url": "https://a.example/b"}}]}], max_tokens=4),
        refused("messages.content.type")) for kind in ("image_url", "video_url", "input_audio")},
    "a JSON schema that is missing": (chat(response_format={"type": "json_schema"}), error(400, "json_schema")),
})  # fmt: skip
THINKING = cases({
    **{f"a budget of {value} thinking tokens": (chat(HELLO, thinking_token_budget=value),
        error(400, "thinking_token_budget")) for value in (-2, 0.6, 10.5)},
    "a budget of thinking tokens": chat(HELLO, thinking_token_budget=10, max_tokens=4),
    "an unlimited budget of thinking tokens": chat(HELLO, thinking_token_budget=-1, max_tokens=4),
})  # fmt: skip
REASONED = "choices.0.message.reasoning_content"
REASONING = cases({
    "reasoning is included": (chat(include_reasoning=True, temperature=0), text(REASONED), text(CONTENT), "thinks"),
    "reasoning is left out": (chat(include_reasoning=False, temperature=0), refused("include_reasoning"), "thinks"),
    "reasoning is left out of a stream": (chat(include_reasoning=False, temperature=0, stream=True),
        refused("include_reasoning"), "thinks"),
    "reasoning by default": (chat(temperature=0), text(REASONED), text(CONTENT), "thinks"),
    "a stream of reasoning by default": (chat(temperature=0, stream=True), text("reasoning"), text("texts.0"),
        "thinks"),
    "reasoning tokens in the usage": (chat(temperature=0),
        integer("usage.completion_tokens_details.reasoning_tokens", 1), "thinks"),
})  # fmt: skip
IDS = [100, 200, 210]
PINNED = {"max_tokens": 1, "temperature": 0, "logprobs": True}
NUMBERED = cases({
    "log-probabilities of chosen ids": (chat(**PINNED, top_logprobs=3, logprob_token_ids=IDS),
        refused("logprob_token_ids")),
    "likeliest tokens without chosen ids": (chat(**PINNED, top_logprobs=5), count(SCORED, 5),
        each(f"{SCORED}.*.logprob", "<= 0", lambda one: one <= 0)),
})  # fmt: skip
LANGUAGES = [{"role": "user", "content": [{"type": "text", "text": "A fox.", "source_lang_code": "en"}]}]
EXTRA = cases({
    "a field of a part that only a template reads": (chat(LANGUAGES, max_tokens=4),
        refused("messages.content.source_lang_code")),
})  # fmt: skip
WITHOUT = cases({
    "chosen ids that are an empty list": (chat(HELLO, logprob_token_ids=[]), error(400), refused("logprob_token_ids")),
    "chosen ids without log-probabilities": (chat(HELLO, logprob_token_ids=[100]), error(400),
        refused("logprob_token_ids")),
    "chosen ids that are a number": (chat(HELLO, logprob_token_ids=123), error(400), refused("logprob_token_ids")),
})  # fmt: skip
TWO = [HELLO, [{"role": "user", "content": "Bye"}]]
BATCH = cases({
    f"conversations of one request{name}": (post("/v1/chat/completions/batch", {"messages": TWO, **more}),
        count("choices", 2), refused("/v1/chat/completions/batch")) for name, more
        in (("", {}), (" with a format", {"response_format": {"type": "json_object"}}),
        (" with ids", {"return_token_ids": True}))
})  # fmt: skip
FORCED = cases({
    "usage without a request for it": (chat(stream=True, max_tokens=4), has("events.-1.usage"),
        different("A stream has its usage if `stream_options` requests it; no setting of the server adds it.")),
})  # fmt: skip
ROOTS = cases({
    "a chat with a wrong key": (post("/v1/chat/completions", {"messages": HELLO},
        headers={"Authorization": "Bearer abc"}), error(401), "keys"),
    "a path before the routes": (post("/llm/v1/chat/completions", {"messages": HELLO}), NO_ROUTE),
})  # fmt: skip
EFFORTS = cases({
    **{f"an effort of {effort}": (chat(HELLO, reasoning_effort=effort, max_tokens=4), text(CONTENT), "efforts")
        for effort in ("none", "low", "medium", "high")},
    "no effort": (chat(HELLO, max_tokens=4), text(CONTENT), "efforts"),
    "an effort of none of a model that does not reason": (chat(HELLO, reasoning_effort="none", max_tokens=4),
        text(CONTENT)),
    "an effort and the keyword of the template": ([chat(HELLO, reasoning_effort="none", max_tokens=1),
        chat(HELLO, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}, max_tokens=1)],
        differs("usage.prompt_tokens"), "efforts"),
    "an effort and a keyword that no template reads": (chat(HELLO, reasoning_effort="none",
        chat_template_kwargs={"custom_key": "value"}, max_tokens=4), refused("chat_template_kwargs"), "efforts"),
    "an effort of none turns thoughts off": ([chat(HELLO, reasoning_effort="none", max_tokens=1),
        chat(HELLO, reasoning_effort="none", chat_template_kwargs={"enable_thinking": False}, max_tokens=1)],
        same("usage.prompt_tokens"), "efforts"),
})  # fmt: skip
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
