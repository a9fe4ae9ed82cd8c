"""Completions, as OpenAI's route takes them and as llama.cpp's own route does."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import complete, get, post
from clients.cases.case import NO_ROUTE, From, Request, cases, different, refused, together
from clients.cases.expect import count, differs, each, equals, error, ok, same, status, text, that

LIFE = "I believe the meaning of life is"
TEXT = "choices.0.text"
OWN = "/completion"
JOKE = "Write a joke about AI from a very long prompt which will not be truncated"


def own(prompt: Any = LIFE, **fields: Any) -> Request:
    return post(OWN, {"prompt": prompt, **fields})


def counted(prompt: str, **fields: Any) -> list[Request]:
    return [post("/tokenize", {"prompt": prompt}), complete(prompt, **fields)]


LENGTH = equals("choices.0.finish_reason", "length")
WHOLE = cases({
    "8 tokens after a prompt": (counted(LIFE, max_tokens=8), same("count", "usage.prompt_tokens"),
        equals("usage.completion_tokens", 8), text(TEXT), LENGTH),
    "64 tokens after a longer prompt": (counted(JOKE, max_tokens=64), same("count", "usage.prompt_tokens"),
        equals("usage.completion_tokens", 64), text(TEXT), LENGTH),
    "8 tokens by the own route": (own(n_predict=8), NO_ROUTE),
    "token ids by the own route": (own(JOKE, return_tokens=True), NO_ROUTE),
    "the number of tokens under its own name": (complete(LIFE, n_predict=8), refused("n_predict")),
    "token ids of the text": (complete(LIFE, return_tokens=True, max_tokens=8), refused("return_tokens")),
    "a stream": (complete(LIFE, max_tokens=8, stream=True), text("texts.0"),
        equals("finish_reasons", ["length"]), equals("done", True)),
    "a stream of 64 tokens with its usage": ([*counted(JOKE, max_tokens=1),
        complete(JOKE, max_tokens=64, stream=True, stream_options={"include_usage": True})],
        same("usage.prompt_tokens", "events.-1.usage.prompt_tokens", 1, 2),
        equals("events.-1.usage.completion_tokens", 64)),
    "a stream by the own route": (own(stream=True), NO_ROUTE),
    "a stream has the text of a whole response": ([complete(LIFE, max_tokens=8, temperature=0),
        complete(LIFE, max_tokens=8, temperature=0, stream=True)], same(TEXT, "texts.0")),
    "any name of a model is accepted": (complete(LIFE, model="davinci-002", max_tokens=8), refused("model")),
    "a fingerprint and the reason of the end": (complete(LIFE, model="tiny", max_tokens=8),
        text("system_fingerprint"), LENGTH, text(TEXT)),
    "stop strings in a stream": (complete("User:\nTell me a joke.\nAssistant:\n",
        stop=["User:\n", "Assistant:\n"], max_tokens=200, stream=True), text("texts.0"),
        that("no stop string", lambda bodies: "Assistant:\n" not in bodies[-1]["texts"]["0"])),
})  # fmt: skip
SEEDED = complete(LIFE, seed=42, temperature=0, cache_prompt=False)
SEEDS = cases({
    "equal seeds, one after another": ([SEEDED] * 4, same(TEXT), same(TEXT, None, 0, 2), same(TEXT, None, 0, 3)),
    "equal seeds at the same time": (together([SEEDED] * 4), same(TEXT), same(TEXT, None, 0, 2),
        same(TEXT, None, 0, 3)),
    "different seeds": ([complete(LIFE, seed=seed, temperature=1.0, cache_prompt=False) for seed in range(4)],
        differs(TEXT), differs(TEXT, 1, 2), differs(TEXT, 2, 3)),
    "a cached prompt gives the text of one that is not cached": ([complete(LIFE, seed=42, temperature=1.0,
        cache_prompt=True), complete(LIFE, seed=42, temperature=1.0, cache_prompt=False)], same(TEXT)),
    "a prompt longer than the context": (complete(LIFE * 32, seed=42, temperature=1.0, cache_prompt=False),
        error(400), "small"),
    "prompts at the same time": (together([complete(one, seed=42, temperature=1.0) for one
        in (LIFE, JOKE, "What is LLM?", "The sky is blue.")]),
        [check for reply in range(4) for check in ok(text(TEXT, ".{10}", reply), reply=reply)]),
    "slots at work": (get("/slots"), NO_ROUTE),
})  # fmt: skip
IDS = post("/tokenize", {"prompt": LIFE})
PROMPTS = cases({
    "token ids": ([IDS, complete(From(0, "tokens"), temperature=0)], text(TEXT)),
    "two lists of token ids": ([IDS, complete([From(0, "tokens"), From(0, "tokens")], temperature=0)],
        count("choices", 2), that("equal", lambda bodies: bodies[1]["choices"][0]["text"]
        == bodies[1]["choices"][1]["text"])),
    "token ids and a text": ([IDS, complete([From(0, "tokens"), LIFE], temperature=0)], count("choices", 2),
        that("equal", lambda bodies: bodies[1]["choices"][0]["text"] == bodies[1]["choices"][1]["text"])),
    "texts among token ids of one prompt": (complete([1, 2, 3, LIFE, 7, 8, LIFE]), refused("prompt")),
    "the tokenizer's own fields": (post("/tokenize", {"content": LIFE, "add_special": True}), refused("content")),
    "chosen fields of the response": (own(response_fields=["content"]), NO_ROUTE),
    "chosen fields of the response, by OpenAI's route": (complete(LIFE, response_fields=["content"]),
        refused("response_fields")),
})  # fmt: skip
TOP = {"temperature": 0, "max_tokens": 5, "logprobs": 10}
PROBABILITIES = cases({
    "likeliest tokens": (complete(LIFE, **TOP), count("choices.0.logprobs.tokens", 5),
        each("choices.0.logprobs.token_logprobs.*", "<= 0", lambda one: one <= 0),
        each("choices.0.logprobs.top_logprobs.*", "has 10 tokens", lambda one: len(one) == 10)),
    "likeliest tokens of a stream": (complete(LIFE, stream=True, **TOP),
        each("events.*.choices.0.logprobs.top_logprobs.*", "has 10 tokens", lambda one: len(one) == 10)),
    "their number under its own name": (complete(LIFE, n_probs=10, max_tokens=5), refused("n_probs")),
    "their number by the own route": (own(n_probs=10, n_predict=5, temperature=0), NO_ROUTE),
    "their number in a stream of the own route": (own(n_probs=10, stream=True), NO_ROUTE),
    "probabilities after sampling": (complete(LIFE, n_probs=10, post_sampling_probs=True), refused("n_probs")),
    "probabilities after sampling, without their number": (complete(LIFE, post_sampling_probs=True),
        refused("post_sampling_probs")),
})  # fmt: skip
PLAIN = complete("What is the best book", max_tokens=16, temperature=0)


def biased(bias: Any) -> list[Request]:
    return [PLAIN, complete("What is the best book", max_tokens=16, temperature=0, logit_bias=bias)]


BIASES = cases({
    "a bias against token ids, as an object": (biased({str(token): -100 for token in range(4, 150)}),
        text(TEXT), differs(TEXT)),
    "a bias against token ids, as a list": (biased([[token, -100] for token in range(4, 150)]), refused("logit_bias")),
    "a bias against texts, as an object": (biased({" the ": -100, " The ": -100}), refused("logit_bias")),
    "a bias against texts, as a list": (biased([[" the ", -100]]), refused("logit_bias")),
    "a cancelled request makes room": ([Request(path="/v1/completions",
        body={"prompt": LIFE, "max_tokens": 4000}, give_up_s=0.1), complete(LIFE, max_tokens=4)], status(0, 0),
        text(TEXT)),
})  # fmt: skip
EOS = cases({
    "the bias of ignored end tokens": (own(ignore_eos=True), NO_ROUTE),
    "an ignored end token": ([complete(LIFE, max_tokens=12, temperature=0, ignore_eos=True),
        complete(LIFE, max_tokens=12)], equals("usage.completion_tokens", 12, 0)),
    "an end token that is not ignored": (complete(LIFE, ignore_eos=False, max_tokens=8), text(TEXT)),
})  # fmt: skip
LONG = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore. " * 4
SHIFT = cases({
    "a prompt longer than the context, with a shift": (complete(LONG, max_tokens=64), refused("prompt"), "small"),
    "a short prompt": (complete("Hi how are you", max_tokens=64), equals("usage.completion_tokens", 64), "small"),
    "a short prompt without a limit": (complete("Hi how are you", max_tokens=-1), refused("max_tokens"), "small"),
    "a limit beyond the context": (complete("Hi how are you", max_tokens=1000, ignore_eos=True),
        equals("usage.total_tokens", 128), LENGTH, "small"),
    "a prompt longer than the context, without a shift": (complete(LONG, max_tokens=64), error(400, "context"),
        "small"),
    "the message of a prompt longer than the context": (complete(LONG),
        error(400, "exceeds the available context size"),
        different("The error has another message, with both numbers of tokens."), "small"),
    "a stream up to the end of the context": (complete("Once", max_tokens=256, stream=True), text("texts.0"),
        equals("finish_reasons", ["length"]), "small"),
    "a stream with the own name of the limit": (complete("Once", n_predict=256, stream=True), refused("n_predict"),
        "small"),
})  # fmt: skip
GREEDY = {"temperature": 0.0, "top_k": 1, "max_tokens": 32}


def drafted(length: int) -> Request:
    return complete(LIFE, **GREEDY, foresay={"drafter": "suffix", "length": length})


SPECULATIVE = cases({
    "with and without drafts": ([complete(LIFE, **GREEDY),
        Request(path="/v1/completions", body={"prompt": LIFE, **GREEDY}, server="undrafted")], same(TEXT)),
    "different lengths of drafts": ([drafted(length) for length in (1, 2, 4, 8)], same(TEXT),
        same(TEXT, None, 0, 2), same(TEXT, None, 0, 3)),
    "a prompt that nearly fills the context": (complete("Hello " * 16, **GREEDY), text(TEXT), "small"),
    "the least probability of a draft token": (complete("Hello", **{"speculative.p_min": 0.0}),
        refused("speculative.p_min")),
    "requests at the same time": (together([complete(LIFE, **GREEDY)] * 2), same(TEXT)),
    "a shift of the context": (complete("Hello " * 56, **GREEDY), refused("prompt"), "small"),
})  # fmt: skip
SUITES = {
    "test_completion.py": [*WHOLE, *SEEDS, *PROMPTS, *PROBABILITIES, *BIASES],
    "test_ignore_eos.py": EOS,
    "test_ctx_shift.py": SHIFT,
    "test_speculative.py": SPECULATIVE,
}
