"""Health, version, load, models, metrics, keys, origins, request ids; routes of other tasks."""

from __future__ import annotations

from clients.cases.bodies import AUTHORIZED, HELLO, ORIGIN, chat, complete, get, post
from clients.cases.case import NO_ROUTE, Request, cases, different, refused, together
from clients.cases.expect import count, equals, error, has, header, no_header, status, text, that, written

STORY = [{"role": "user", "content": "Write a long story"}]
LONG = Request(
    path="/v1/chat/completions", body={"messages": STORY, "max_tokens": 4000, "min_tokens": 4000}, give_up_s=0.4
)
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
BASIC = cases({
    "the version": (get("/version"), text("version")),
    "health": get("/health"),
    "a request after cancelled ones": ([LONG, LONG, chat(STORY, max_tokens=10)], status(0, 0), status(0, 1),
        count("choices", 1)),
    "cancelled requests at the same time": (together([*[LONG] * 6, chat(STORY, max_tokens=10)]), count("choices", 1)),
    "a content type that is not JSON": (Request(path="/v1/chat/completions", body=b"a=b", headers=FORM),
        error(415),
        different("A form's type without a page's headers is read as JSON, because `curl -d` sends it; the body is none.")
        ),
    "the load": (get("/load"), NO_ROUTE),
})  # fmt: skip
LISTED = cases({
    "the first model": (get("/v1/models"), equals("data.0.id", "tiny"), equals("object", "list")),
    "the root of a model": (get("/v1/models"), has("data.0.root")),
})  # fmt: skip
NAMES = (
    *("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_bucket"),
    "e2e_request_latency_seconds_sum",
)
OTHERS = (
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
)
METRICS = cases({
    **{f"the metric {name}": ([complete(max_tokens=5), get("/metrics")], written(f"foresay_{name}[ {{]")) for name
        in NAMES},
    **{f"the metric {name}": ([complete(max_tokens=5), get("/metrics")], written(f"foresay_{name}[ {{]"),
        different("The server does not measure it.")) for name in OTHERS},
    "nothing runs and nothing waits after an aborted request": ([LONG, chat(STORY, max_tokens=4),
        get("/metrics")], written(r"foresay_num_requests_running 0\.0"), written(r"foresay_num_requests_waiting 0\.0")),
})  # fmt: skip
ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
WRONG = {"Authorization": "Bearer wrong"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
KEYS = cases({
    **{f"no key: {path}": (post(path, {}), error(401), "keys") for path in ROUTES},
    **{f"a wrong key: {path}": (post(path, {}, headers=WRONG), error(401), "keys") for path in ROUTES},
    "the right key": (get("/v1/models", headers=AUTHORIZED), "keys"),
    "health without a key": (get("/health"), "keys"),
    "health with a slash at its end, without a key": (get("/health/"),
        different("A path with a slash at its end is another path, which needs a key."), "keys"),
    "models with a slash at its end, without a key": (get("/v1/models/"), error(401), "keys"),
    "options of a route are no preflight request": (Request(method="OPTIONS", path="/metrics"), error(401), "keys"),
    "options without an origin": (Request(method="OPTIONS", path="/metrics", headers=PREFLIGHT), error(401), "keys"),
    "a preflight request needs no key": (Request(method="OPTIONS", path="/metrics",
        headers={"Origin": ORIGIN, **PREFLIGHT}), status(200),
        header("access-control-allow-origin", ORIGIN), "origins_and_keys"),
})  # fmt: skip
ATTACKER = {"Origin": "http://attacker.example"}
CORS = cases({
    "no origin may read by default": (get("/v1/models", headers=ATTACKER), no_header("access-control-allow-origin")),
    "no origin may send JSON by default": (Request(method="OPTIONS", path="/v1/chat/completions",
        headers={**ATTACKER, **PREFLIGHT}), status(400), no_header("access-control-allow-origin"),
        different("Without allowed origins OPTIONS is answered with 405, which browsers take as a refusal too.")),
    "an allowed origin reads": (get("/v1/models", headers={"Origin": ORIGIN}),
        header("access-control-allow-origin", ORIGIN), "origins"),
    "an allowed origin sends JSON": (Request(method="OPTIONS", path="/v1/chat/completions",
        headers={"Origin": ORIGIN, **PREFLIGHT}), status(200), header("access-control-allow-origin", ORIGIN),
        "origins"),
})  # fmt: skip
NUMBERS = cases({
    "each response has an id": (get("/health"), header("x-request-id", ".+")),
    "the id of the client comes back": (get("/health", headers={"X-Request-Id": "caller"}),
        header("x-request-id", "caller"),
        different("Ids of requests are the server's own, so that a client cannot choose text in its log.")),
})  # fmt: skip
LONG_VALUE = "A" * 100_000
FAILED = cases({
    "a missing field is named": (post("/v1/chat/completions", {}), error(400), equals("error.param", "messages")),
    "a field of a wrong type is named": (chat("not-a-list"), error(400, "not-a-list"),
        equals("error.param", "messages")),
    "a field of a message is named without names of types": (chat([HELLO[0], {"role": "user", "content": 5}]),
        error(400), equals("error.param", "messages.1.content")),
    "a stop string of a wrong type is named": (chat(HELLO, stop=5), error(400), equals("error.param", "stop")),
    "many wrong values give a short error": (post("/v1/completions", {"prompt": [{"a": 1}] * 1000}), error(400),
        that("short", lambda bodies: len(str(bodies[0])) < 4000)),
    "a long wrong value is cut": (chat(HELLO, max_tokens=LONG_VALUE), error(400),
        that("short", lambda bodies: len(str(bodies[0])) < 4000)),
    "a short wrong value is repeated": (chat(HELLO, max_tokens="five"), error(400, "five")),
    "an error does not name a file of the server": (chat("x"), error(400),
        that("no path", lambda bodies: "/src/" not in str(bodies[0]) and "Traceback" not in str(bodies[0]))),
})  # fmt: skip
POOLING = cases({
    "embeddings": post("/v1/embeddings", {"input": "a"}),
    "pooling": (post("/pooling", {"input": "a"}), NO_ROUTE), "classes": (post("/classify", {"input": "a"}), NO_ROUTE),
    "scores": (post("/score", {"text_1": "a", "text_2": "b"}), NO_ROUTE),
    "ranks": (post("/rerank", {"query": "a", "documents": ["b"]}), NO_ROUTE),
})  # fmt: skip
SPEECH = cases({
    name: (post(f"/v1/audio/{name}", {"file": "a"}), NO_ROUTE) for name in ("transcriptions", "translations")
})  # fmt: skip
ADAPTERS = cases({
    name: (post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}), NO_ROUTE)
        for name in ("an adapter is loaded", "an adapter that does not exist")
})  # fmt: skip
SLEEP = cases({
    "sleep": (post("/sleep?level=1", None), NO_ROUTE), "whether it sleeps": (get("/is_sleeping"), NO_ROUTE),
    "wake up": (post("/wake_up", None), NO_ROUTE),
    "the memory of the cache is released": (post("/release_kv_cache_memory", None), NO_ROUTE),
})  # fmt: skip
CACHE = cases({"the prefix cache is emptied": (post("/reset_prefix_cache", None), NO_ROUTE)})
PAUSE = cases({
    "pause": (post("/pause", None), NO_ROUTE), "whether it pauses": (get("/is_paused"), NO_ROUTE),
    "resume": (post("/resume", None), NO_ROUTE),
})  # fmt: skip
RENDER = cases({
    name: (request, NO_ROUTE) for name, request
        in (("token ids of a completion", post("/v1/completions/render", {"prompt": "Hello"})),
        ("token ids of a chat", post("/v1/chat/completions/render", {"messages": HELLO})),
        ("token ids of Anthropic's messages", post("/v1/messages/render", {"messages": HELLO, "max_tokens": 4})))
})  # fmt: skip
CUT = cases({
    "a text that is cut": (post("/v1/embeddings", {"input": "a b c", "truncate_prompt_tokens": 2}),
        refused("truncate_prompt_tokens")),
    "a text that is cut at the context": (post("/v1/embeddings", {"input": "a b c", "truncate_prompt_tokens": -1}),
        refused("truncate_prompt_tokens")),
})  # fmt: skip
SUITES = {
    "openai/basic/test_basic.py": BASIC,
    "openai/test_models.py": LISTED,
    "serve/instrumentator/test_metrics.py": METRICS,
    "serve/middleware/test_authentication_middleware.py": KEYS,
    "serve/middleware/test_cors_middleware.py": CORS,
    "serve/middleware/test_x_request_id.py": NUMBERS,
    "serve/exception_handling/test_validation_exception_handler.py": FAILED,
    "serve/render/test_render.py": RENDER,
    "serve/dev/test_sleep.py": SLEEP,
    "serve/dev/test_cache.py": CACHE,
    "serve/dev/test_pause.py": PAUSE,
    "serve/lora/test_lora_adapters.py": ADAPTERS,
    "pooling (routes)": POOLING,
    "speech_to_text (routes)": SPEECH,
    "openai/test_truncation.py": CUT,
}
