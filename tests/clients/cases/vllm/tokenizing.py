"""Token ids of texts and messages, and texts of token ids."""

from __future__ import annotations

from clients.cases.bodies import SEARCH, chat, get, post
from clients.cases.case import NO_ROUTE, Case, From, cases, refused
from clients.cases.expect import equals, lacks, ok, same, text, that

PROMPT = "vllm1 This is a test prompt."
TALK = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
    {"role": "user", "content": "May I have a question? vllm1"},
]
SURE = [*TALK, {"role": "assistant", "content": "Sure,"}]
COUNTED = that("the count", lambda bodies: bodies[0]["count"] == len(bodies[0]["tokens"]))


def _chat(name: str, end: str, messages: object = TALK, **fields: object) -> Case:
    """Return a case of token ids of a chat. end: of the prompt that they are the ids of."""
    requests = [
        post("/tokenize", {"model": "tiny", "messages": messages, **fields}),
        post("/detokenize", {"tokens": From(0, "tokens")}),
    ]
    return Case(
        name,
        requests,
        [
            *ok(COUNTED, equals("max_model_len", 4096, 0), lacks("token_strs", 0), reply=0),
            *ok(text("prompt", f"{end}$")),
        ],
    )


TOKENIZATION = [
    *cases({
        "token ids of a text": (post("/tokenize", {"model": "tiny", "prompt": PROMPT}), COUNTED,
            equals("max_model_len", 4096), lacks("token_strs")),
        "token ids of a text with special tokens": (post("/tokenize",
            {"prompt": PROMPT, "add_special_tokens": True}), COUNTED),
        "token ids of a text without special tokens": (post("/tokenize", {"prompt": PROMPT, "add_special_tokens":
            False}), refused("add_special_tokens")),
    }),
    _chat("token ids of messages", "<assistant>"),
    _chat("token ids of messages with the generation prompt", "<assistant>", add_generation_prompt=True),
    _chat("token ids of messages without the generation prompt", "vllm1", add_generation_prompt=False),
    _chat("token ids of messages whose last is continued", "Sure,", SURE,
        continue_final_message=True, add_generation_prompt=False),
    *cases({
        "token ids of messages without special tokens": (post("/tokenize", {"messages": TALK, "add_special_tokens":
            False}), refused("add_special_tokens")),
        "token ids of messages and tools": ([post("/tokenize", {"messages": TALK, "tools": [SEARCH]}),
            chat(TALK, tools=[SEARCH], max_tokens=1)], COUNTED, same("count", "usage.prompt_tokens"), "tools"),
        "texts of tokens": (post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}),
            refused("return_token_strs")),
        "a text of token ids": ([post("/tokenize", {"prompt": PROMPT}),
            post("/detokenize", {"model": "tiny", "tokens": From(0, "tokens")})], equals("prompt", PROMPT)),
        "properties of the tokenizer": (get("/tokenizer_info"), NO_ROUTE),
        "the chat template": (get("/tokenizer_info"), NO_ROUTE),
    }),
]  # fmt: skip
SUITES = {"serve/tokenize/test_tokenization.py": TOKENIZATION}
