"""Tokens, texts to fill in, slots, and routes of other kinds of models."""

from __future__ import annotations

from typing import Any

from clients.cases.bodies import HELLO, chat, complete, get, post
from clients.cases.case import NO_ROUTE, From, cases, different, refused
from clients.cases.expect import at_least, count, equals, error, has, integer, ok, status, text, that

FRANCE = "What is the capital of France ?"
TOKENIZE = cases({
    "there and back": ([post("/tokenize", {"prompt": FRANCE}), post("/detokenize", {"tokens": From(0, "tokens")})],
        ok(at_least("tokens", 6, 0), reply=0), equals("prompt", FRANCE)),
    "the name of the text": (post("/tokenize", {"content": FRANCE}), refused("content")),
    "the name of the text that comes back": (post("/detokenize", {"tokens": [5, 6, 7]}), text("content"),
        different("The text is in `prompt`, as in vLLM's response.")),
    "a token of the beginning": (post("/tokenize", {"content": FRANCE, "add_special": True}), refused("content")),
    "a token of the beginning of a named text": (post("/tokenize", {"prompt": FRANCE, "add_special": True}),
        refused("add_special")),
    "texts of tokens": (post("/tokenize", {"prompt": "unicode 媽 and emoji 🤗", "with_pieces": True}),
        refused("with_pieces")),
    "a text of many bytes, there and back": ([post("/tokenize", {"prompt": "unicode 媽 and emoji 🤗"}),
        post("/detokenize", {"tokens": From(0, "tokens")})], equals("prompt", "unicode 媽 and emoji 🤗")),
})  # fmt: skip
INFILL: dict[str, Any] = {"input_prefix": "int main() {\n", "prompt": "    int n = llama_", "input_suffix": "}\n"}
EXTRA = [{}, {"filename": "ok"}, {"filename": 123}, {"filename": 123, "text": "abc"}, {"filename": 123, "text": 456}]
FILL_IN = cases({
    "a text to fill in": (post("/infill", INFILL), NO_ROUTE),
    "other files of the text": (post("/infill", {**INFILL, "input_extra": [{"filename": "a.h", "text": "b"}]}),
        NO_ROUTE),
    **{f"wrong other files, number {number}": (post("/infill", {**INFILL, "input_extra": [one]}), NO_ROUTE)
        for number, one in enumerate(EXTRA)},
    "a suffix by OpenAI's route": (complete("int main() {\n", suffix="}\n", temperature=0, max_tokens=8),
        equals("choices.0.text", "return 0;"), "fills"),
})  # fmt: skip
EMBEDDINGS = cases({
    "one text": (post("/v1/embeddings", {"input": "I believe"}), has("data.0.embedding")),
    "texts": (post("/v1/embeddings", {"input": ["I believe", "Write a joke"]}), count("data", 2)),
    "the route without the prefix": (post("/embeddings", {"input": "hello hello"}), NO_ROUTE),
    "token ids": (post("/v1/embeddings", {"input": [12, 34, 56]}), has("data.0.embedding")),
    "base64": (post("/v1/embeddings", {"input": "Test", "encoding_format": "base64"}), text("data.0.embedding")),
    "usage": (post("/v1/embeddings", {"input": "This is a test"}), integer("usage.prompt_tokens", 1)),
    "an empty list": (post("/v1/embeddings", {"input": []}), error(400)),
})  # fmt: skip
RERANK = cases({
    "documents in the order of their relevance": (post("/rerank", {"query": "Learning is", "documents": ["a", "b"]}),
        NO_ROUTE),
    "texts in the order of their relevance": (post("/rerank", {"query": "Learning is", "texts": ["a", "b"]}), NO_ROUTE),
    "no documents": (post("/rerank", {"query": "Learning is", "documents": []}), NO_ROUTE),
    "the most relevant documents": (post("/v1/rerank", {"query": "Learning is", "documents": ["a", "b"], "top_n": 1}),
        NO_ROUTE),
    "embeddings of a model for ranking": (post("/v1/embeddings", {"input": "hello"}), error(400, "rerank"),
        different("Every model is a language model, whose hidden states are embeddings.")),
})  # fmt: skip
FOX = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
SLOTS = cases({
    "a request chooses a slot": (complete("What is", id_slot=1, max_tokens=4), refused("id_slot")),
    "a slot is saved": (post("/slots/1?action=save", {"filename": "slot1.bin"}), NO_ROUTE),
    "a slot is restored": (post("/slots/0?action=restore", {"filename": "slot1.bin"}), NO_ROUTE),
    "a slot is erased": (post("/slots/1?action=erase", {}), NO_ROUTE),
    "only the new part of a prompt is computed": ([complete(FOX, max_tokens=4, cache_prompt=True),
        complete(FOX + " Still.", max_tokens=4, cache_prompt=True)],
        that("cached", lambda bodies: (bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= bodies[0]["usage"]["prompt_tokens"] - 1))),
    "another prompt between leaves the first cached": ([complete(FOX, max_tokens=4),
        complete("Another text", max_tokens=4), complete(FOX, max_tokens=4)],
        that("cached", lambda bodies: bodies[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)),
})  # fmt: skip
KEPT = cases({
    "a prompt that was cached is continued": ([complete(FOX, max_tokens=4), complete("Once", max_tokens=4),
        complete(FOX + " It ran.", max_tokens=4)], that("cached",
        lambda bodies: bodies[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)),
    "the slot of a request": (complete(FOX, id_slot=0), refused("id_slot")),
})  # fmt: skip
LORA = cases({
    "adapters are listed": (get("/lora-adapters"), NO_ROUTE),
    "adapters are scaled": (post("/lora-adapters", [{"id": 0, "scale": 0.5}]), NO_ROUTE),
    "adapters of a request": (complete("Look", lora=[{"id": 0, "scale": 1.0}]), refused("lora")),
    "adapters of a chat": (chat(HELLO, lora=[{"id": 0, "scale": 1.0}]), refused("lora")),
})  # fmt: skip
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VISION = cases({
    "an image in a message": (chat([{"role": "user", "content": [{"type": "text", "text": "What"}, IMAGE]}]),
        refused("messages.content.type")),
    "an image that is not one": (chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url":
        "malformed"}}]}]), status(400), refused("messages.content.type")),
    "an image in a prompt": (complete({"prompt_string": "What: <__media__>", "multimodal_data": ["AAAA"]}),
        refused("prompt")),
    "capabilities of a model": (get("/v1/models"), has("models.0.capabilities"),
        different("The list has OpenAI's fields and the context length, and no capabilities.")),
})  # fmt: skip
SPEECH = "/v1/audio/transcriptions"
AUDIO = cases({
    "a transcription without a file": (post(SPEECH, {}), NO_ROUTE),
    "a transcription of an empty body": (post(SPEECH, b"", headers={"Content-Type": "application/json"}), NO_ROUTE),
    "a transcription of base64": (post(SPEECH, {"file": "UklGRg==", "format": "wav", "language": "en"}), NO_ROUTE),
    "the route of transcriptions exists": (post(SPEECH, {"file": "dGVzdA=="}), NO_ROUTE),
})  # fmt: skip
INSTANCE = {"@requestFormat": "chatCompletions", "max_tokens": 8, "messages": HELLO}
CLOUD = cases({
    "one instance": (post("/predict", {"instances": [INSTANCE]}), refused("instances")),
    "two instances": (post("/predict", {"instances": [INSTANCE, INSTANCE]}), refused("instances")),
})  # fmt: skip
NAMES = ("../evil.bin", "sub/evil.bin", "..", "")
SLOT_FILES = cases({
    "slots that are not enabled": (get("/slots"), NO_ROUTE),
    "slots that are all at work": (get("/slots?fail_on_no_slot=0"), NO_ROUTE),
    **{f"a slot is saved to {name!r}": (post("/slots/0?action=save", {"filename": name}), NO_ROUTE)
        for name in NAMES},
    "a slot with a wrong number": (post("/slots/abc?action=save", {"filename": "x.bin"}), NO_ROUTE),
    "an unknown action": (post("/slots/0?action=frobnicate", {"filename": "x.bin"}), NO_ROUTE),
})  # fmt: skip
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
