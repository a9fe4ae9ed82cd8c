"""Tokens, texts to fill in, slots, and routes of other kinds of models."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import HELLO, chat, complete, get, post
from clients.cases.case import Case, Check, From, different, refused
from clients.cases.expect import (
    at_least,
    count,
    equals,
    error,
    fails,
    has,
    integer,
    ok,
    status,
    text,
    that,
)

FRANCE = "What is the capital of France ?"
TOKENIZE = [
    Case(
        "there and back",
        [post("/tokenize", {"prompt": FRANCE}), post("/detokenize", {"tokens": From(0, "tokens")})],
        [*ok(at_least("tokens", 6, 0), reply=0), *ok(equals("prompt", FRANCE))],
    ),
    Case("the name of the text", post("/tokenize", {"content": FRANCE}), ok(at_least("tokens", 6)), refused("content")),
    Case(
        "the name of the text that comes back",
        post("/detokenize", {"tokens": [5, 6, 7]}),
        ok(text("content")),
        different("The text is in `prompt`, as in vLLM's response."),
    ),
    Case(
        "a token of the beginning",
        post("/tokenize", {"content": FRANCE, "add_special": True}),
        ok(integer("tokens.0")),
        refused("content"),
    ),
    Case(
        "a token of the beginning of a named text",
        post("/tokenize", {"prompt": FRANCE, "add_special": True}),
        ok(integer("tokens.0")),
        refused("add_special"),
    ),
    Case(
        "texts of tokens",
        post("/tokenize", {"prompt": "unicode 媽 and emoji 🤗", "with_pieces": True}),
        ok(has("tokens.0.piece")),
        refused("with_pieces"),
    ),
    Case(
        "a text of many bytes, there and back",
        [post("/tokenize", {"prompt": "unicode 媽 and emoji 🤗"}), post("/detokenize", {"tokens": From(0, "tokens")})],
        ok(equals("prompt", "unicode 媽 and emoji 🤗")),
    ),
]
INFILL: dict[str, Any] = {"input_prefix": "int main() {\n", "prompt": "    int n = llama_", "input_suffix": "}\n"}
EXTRA = [{}, {"filename": "ok"}, {"filename": 123}, {"filename": 123, "text": "abc"}, {"filename": 123, "text": 456}]
FILL_IN = [
    Case("a text to fill in", post("/infill", INFILL), ok(text("content")), refused("/infill")),
    Case(
        "other files of the text",
        post("/infill", {**INFILL, "input_extra": [{"filename": "a.h", "text": "b"}]}),
        ok(text("content")),
        refused("/infill"),
    ),
    *(
        Case(
            f"wrong other files, number {number}",
            post("/infill", {**INFILL, "input_extra": [one]}),
            error(400),
            refused("/infill"),
        )
        for number, one in enumerate(EXTRA)
    ),
    Case(
        "a suffix by OpenAI's route",
        complete("int main() {\n", suffix="}\n", temperature=0, max_tokens=8),
        ok(equals("choices.0.text", "return 0;")),
        server="fills",
    ),
]
ALL = [
    Case("one text", post("/v1/embeddings", {"input": "I believe"}), ok(has("data.0.embedding"))),
    Case("texts", post("/v1/embeddings", {"input": ["I believe", "Write a joke"]}), ok(count("data", 2))),
    Case("the route without the prefix", post("/embeddings", {"input": "hello hello"}), ok(has("0.embedding"))),
    Case("token ids", post("/v1/embeddings", {"input": [12, 34, 56]}), ok(has("data.0.embedding"))),
    Case(
        "base64", post("/v1/embeddings", {"input": "Test", "encoding_format": "base64"}), ok(text("data.0.embedding"))
    ),
    Case("usage", post("/v1/embeddings", {"input": "This is a test"}), ok(integer("usage.prompt_tokens", 1))),
]
EMBEDDINGS = [
    Case(one.name, one.requests, one.expected, refused("/embeddings")) if "without" in one.name else one for one in ALL
] + [Case("an empty list", post("/v1/embeddings", {"input": []}), error(400))]
RERANK = [
    Case(
        "documents in the order of their relevance",
        post("/rerank", {"query": "Learning is", "documents": ["a", "b"]}),
        ok(count("results", 2)),
        refused("/rerank"),
    ),
    Case(
        "texts in the order of their relevance",
        post("/rerank", {"query": "Learning is", "texts": ["a", "b"]}),
        ok(count("", 2)),
        refused("/rerank"),
    ),
    Case("no documents", post("/rerank", {"query": "Learning is", "documents": []}), error(400), refused("/rerank")),
    Case(
        "the most relevant documents",
        post("/v1/rerank", {"query": "Learning is", "documents": ["a", "b"], "top_n": 1}),
        ok(count("results", 1)),
        refused("/v1/rerank"),
    ),
    Case(
        "embeddings of a model for ranking",
        post("/v1/embeddings", {"input": "hello"}),
        error(400, "rerank"),
        different("Every model is a language model, whose hidden states are embeddings."),
    ),
]
FOX = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
SLOTS = [
    Case("a request chooses a slot", complete("What is", id_slot=1, max_tokens=4), ok(), refused("id_slot")),
    Case(
        "a slot is saved",
        post("/slots/1?action=save", {"filename": "slot1.bin"}),
        ok(integer("n_saved")),
        refused("/slots/1"),
    ),
    Case(
        "a slot is restored",
        post("/slots/0?action=restore", {"filename": "slot1.bin"}),
        ok(integer("n_restored")),
        refused("/slots/0"),
    ),
    Case("a slot is erased", post("/slots/1?action=erase", {}), ok(), refused("/slots/1")),
    Case(
        "only the new part of a prompt is computed",
        [complete(FOX, max_tokens=4, cache_prompt=True), complete(FOX + " Still.", max_tokens=4, cache_prompt=True)],
        ok(
            that(
                "cached",
                lambda bodies: (
                    bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
                    >= bodies[0]["usage"]["prompt_tokens"] - 1
                ),
            )
        ),
    ),
    Case(
        "another prompt between leaves the first cached",
        [complete(FOX, max_tokens=4), complete("Another text", max_tokens=4), complete(FOX, max_tokens=4)],
        ok(that("cached", lambda bodies: bodies[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)),
    ),
]
KEPT = [
    Case(
        "a prompt that was cached is continued",
        [complete(FOX, max_tokens=4), complete("Once", max_tokens=4), complete(FOX + " It ran.", max_tokens=4)],
        ok(that("cached", lambda bodies: bodies[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)),
    ),
    Case("the slot of a request", complete(FOX, id_slot=0), ok(), refused("id_slot")),
]
LORA = [
    Case("adapters are listed", get("/lora-adapters"), ok(), refused("/lora-adapters")),
    Case("adapters are scaled", post("/lora-adapters", [{"id": 0, "scale": 0.5}]), ok(), refused("/lora-adapters")),
    Case("adapters of a request", complete("Look", lora=[{"id": 0, "scale": 1.0}]), ok(), refused("lora")),
    Case("adapters of a chat", chat(HELLO, lora=[{"id": 0, "scale": 1.0}]), ok(), refused("lora")),
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VISION = [
    Case(
        "an image in a message",
        chat([{"role": "user", "content": [{"type": "text", "text": "What"}, IMAGE]}]),
        ok(text("choices.0.message.content")),
        refused("messages.content.type"),
    ),
    Case(
        "an image that is not one",
        chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "malformed"}}]}]),
        [status(400)],
        refused("messages.content.type"),
    ),
    Case(
        "an image in a prompt",
        complete({"prompt_string": "What: <__media__>", "multimodal_data": ["AAAA"]}),
        ok(),
        refused("prompt"),
    ),
    Case(
        "capabilities of a model",
        get("/v1/models"),
        ok(has("models.0.capabilities")),
        different("The list has OpenAI's fields and the context length, and no capabilities."),
    ),
]
SPEECH = "/v1/audio/transcriptions"
KNOWN = Check("status is not 404", lambda replies: replies[0].status != 404)
AUDIO = [
    Case("a transcription without a file", post(SPEECH, {}), [status(400)], refused(SPEECH)),
    Case(
        "a transcription of an empty body",
        post(SPEECH, b"", headers={"Content-Type": "application/json"}),
        fails(),
        refused(SPEECH),
    ),
    Case(
        "a transcription of base64",
        post(SPEECH, {"file": "UklGRg==", "format": "wav", "language": "en"}),
        [KNOWN],
        refused(SPEECH),
    ),
    Case("the route of transcriptions exists", post(SPEECH, {"file": "dGVzdA=="}), [KNOWN], refused(SPEECH)),
]
INSTANCE = {"@requestFormat": "chatCompletions", "max_tokens": 8, "messages": HELLO}
CLOUD = [
    Case(
        "one instance",
        post("/predict", {"instances": [INSTANCE]}),
        ok(count("predictions", 1)),
        refused("instances"),
    ),
    Case(
        "two instances",
        post("/predict", {"instances": [INSTANCE, INSTANCE]}),
        ok(count("predictions", 2)),
        refused("instances"),
    ),
]
NAMES = ("../evil.bin", "sub/evil.bin", "..", "")
SLOT_FILES = [
    Case("slots that are not enabled", get("/slots"), [status(501), has("error.message")], refused("/slots")),
    Case("slots that are all at work", get("/slots?fail_on_no_slot=0"), [status(503)], refused("/slots")),
    *(
        Case(
            f"a slot is saved to {name!r}",
            post("/slots/0?action=save", {"filename": name}),
            error(400),
            refused("/slots/0"),
        )
        for name in NAMES
    ),
    Case(
        "a slot with a wrong number",
        post("/slots/abc?action=save", {"filename": "x.bin"}),
        error(400),
        refused("/slots/abc"),
    ),
    Case(
        "an unknown action", post("/slots/0?action=frobnicate", {"filename": "x.bin"}), error(400), refused("/slots/0")
    ),
]
SUITES = {
    "test_slots.py": SLOT_FILES,
    "test_tokenize.py": TOKENIZE,
    "test_infill.py": FILL_IN,
    "test_embedding.py": EMBEDDINGS,
    "test_rerank.py": RERANK,
    "test_slot_save.py": SLOTS,
    "test_kv_keep_only_active.py": KEPT,
    "test_lora.py": LORA,
    "test_vision_api.py": VISION,
    "test_audio_transcription.py": AUDIO,
    "test_compat_gcp.py": CLOUD,
}
