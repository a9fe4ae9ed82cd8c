"""Health, models, properties, slots, the page; keys and origins; metrics."""

from __future__ import annotations

from clients.cases.bodies import AUTHORIZED, ORIGIN, complete, get, post
from clients.cases.case import Case, Request, different, refused
from clients.cases.expect import count, equals, error, has, header, lacks, ok, status, text, that, written

COMPLETION = "/completion"
BASIC = [
    Case("a started server is healthy", get("/health"), ok()),
    Case("properties", get("/props"), ok(has("model_path"), has("total_slots")), refused("/props")),
    Case("the list of models without the prefix v1", get("/models"), ok(count("data", 1)), refused("/models")),
    Case(
        "the list of models",
        get("/v1/models"),
        ok(equals("data.0.id", "tiny")),
    ),
    Case("slots that are not enabled", get("/slots"), [status(501), has("error")], refused("/slots")),
    Case("slots", get("/slots"), ok(has("0.n_ctx")), refused("/slots")),
    Case(
        "a completion by the server's own route",
        post(COMPLETION, {"prompt": "Hello", "n_predict": 16}),
        ok(text("content")),
        refused(COMPLETION),
    ),
    Case(
        "a greedy completion of 16 tokens", complete("Hello", max_tokens=16, temperature=0), ok(text("choices.0.text"))
    ),
    Case("the page at the root", get("/"), ok(written("(?i)<!doctype html>"))),
    Case(
        "aliases and tags of a model",
        get("/v1/models"),
        ok(has("data.0.aliases"), has("data.0.tags")),
        different("Each name of a model is an entry of its own; entries have no aliases and no tags."),
    ),
]


def _secret(**headers: str) -> Request:
    return post("/v1/completions", {"prompt": "I believe", "max_tokens": 4}, headers=headers)


def _preflight(origin: str) -> Request:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}
    return Request(method="OPTIONS", path="/v1/completions", headers={"Origin": origin, **asked})


OTHER_ORIGIN = (
    "Pages of other origins may call the API only if `--cors` names their origin; llama.cpp admits every origin."
)
SECURITY = [
    Case("health needs no key", get("/health"), ok(lacks("error")), server="keys"),
    Case(
        "the list of models needs no key",
        get("/v1/models"),
        ok(lacks("error")),
        different("The list of models needs a key, as OpenAI's and vLLM's does."),
        server="keys",
    ),
    Case("the page needs no key", get("/"), ok(written("(?i)<!doctype html>")), server="keys"),
    Case("the page's script needs no key", get("/page.js"), ok(), server="keys"),
    Case("the page's style needs no key", get("/page.css"), ok(), server="keys"),
    Case("no key", _secret(), [*error(401), equals("error.type", "authentication_error")], server="keys"),
    Case(
        "a wrong key",
        _secret(Authorization="Bearer invalid-key"),
        [*error(401), equals("error.type", "authentication_error")],
        server="keys",
    ),
    Case("the right key", _secret(**AUTHORIZED), ok(lacks("error"), text("choices.0.text")), server="keys"),
    Case(
        "the right key in Anthropic's header",
        _secret(**{"X-Api-Key": AUTHORIZED["Authorization"].split()[1]}),
        ok(lacks("error"), text("choices.0.text")),
        server="keys",
    ),
    Case(
        "a chat with the right key",
        post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "What is life?"}], "max_tokens": 4},
            headers=AUTHORIZED,
        ),
        ok(count("choices", 1)),
        server="keys",
    ),
    Case(
        "a preflight request of an origin that is allowed",
        _preflight(ORIGIN),
        [status(200), header("access-control-allow-origin", ORIGIN)],
        server="origins",
    ),
    Case(
        "methods of a preflight response",
        _preflight(ORIGIN),
        [status(200), header("access-control-allow-methods", ".*GET.*POST.*")],
        server="origins",
    ),
    Case(
        "headers of a preflight response",
        _preflight(ORIGIN),
        [status(200), header("access-control-allow-headers", r"\*|.*Authorization.*")],
        server="origins",
    ),
    Case(
        "a preflight request of any origin",
        _preflight("http://web.mydomain.fr"),
        [status(200), header("access-control-allow-origin", "http://web.mydomain.fr")],
        different(OTHER_ORIGIN),
    ),
    Case(
        "credentials of an allowed origin",
        _preflight(ORIGIN),
        [status(200), header("access-control-allow-credentials", "true")],
        different("Keys are sent as headers, so credentials such as cookies are not allowed."),
        server="origins",
    ),
    Case(
        "an image file of the server",
        post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://a.jpeg"}}]}]},
        ),
        error(400),
        refused("messages.content.type"),
    ),
    Case(
        "an image of a path with two dots",
        post(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://../a.jpeg"}}]}
                ]
            },
        ),
        error(400),
        refused("messages.content.type"),
    ),
]
AGAIN = complete("I believe the meaning of life is", temperature=0, max_tokens=8)
METRICS = [
    Case(
        "a repeated prompt is cached and counted",
        [AGAIN, AGAIN, get("/metrics")],
        [
            *ok(reply=1),
            that("cached tokens", lambda bodies: bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0),
            *ok(written(r"foresay_prompt_tokens_cached_total [1-9]")),
        ],
    ),
    Case(
        "the ratio of cached tokens",
        get("/metrics"),
        ok(written("prompt_cache_hit_ratio")),
        different("Metrics have the counters of prompt tokens and of cached ones, from which the ratio follows."),
    ),
]
SLEEP = [
    Case("whether a server sleeps", get("/props"), ok(has("is_sleeping")), refused("/props")),
    Case("health of an idle server", get("/health"), ok()),
    Case("models of an idle server", get("/v1/models"), ok(equals("data.0.id", "tiny"))),
]
PROXY = [
    Case("a proxy that is not enabled", get("/cors-proxy"), [status(403)], refused("/cors-proxy")),
    Case("a proxy", get("/cors-proxy?url=http://127.0.0.1:1/"), [status(400), has("error")], refused("/cors-proxy")),
]
ROUTER = [
    Case("properties of a router", get("/props"), ok(equals("role", "router")), refused("/props")),
    Case(
        "a chat of a model that does not exist",
        post(
            "/v1/chat/completions",
            {"model": "non-existent/model", "messages": [{"role": "user", "content": "hello"}], "stream": True},
        ),
        [*error(404, "non-existent/model")],
    ),
    Case("load a model", post("/models/load", {"model": "tiny"}), ok(equals("success", True)), refused("/models/load")),
    Case(
        "unload a model",
        post("/models/unload", {"model": "tiny"}),
        ok(equals("success", True)),
        refused("/models/unload"),
    ),
    Case(
        "a request without a key",
        post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}),
        [*error(401), equals("error.type", "authentication_error")],
        server="keys",
    ),
    Case(
        "a request with a key",
        post(
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
            headers=AUTHORIZED,
        ),
        ok(lacks("error")),
        server="keys",
    ),
]
STREAM = [
    Case("a stream is resumed", get("/v1/stream?conv_id=a&from=0"), ok(), refused("/v1/stream")),
    Case(
        "a stream is stopped",
        Request(method="DELETE", path="/v1/stream?conv_id=a"),
        [status(204)],
        refused("/v1/stream"),
    ),
]
TOOLS = [
    Case(
        "a tool that the server runs",
        post("/tools", {"tool": "read_file", "params": {"path": "a"}}),
        ok(),
        refused("/tools"),
    ),
]
SUITES = {
    "test_basic.py": BASIC,
    "test_security.py": SECURITY,
    "test_metrics.py": METRICS,
    "test_sleep.py": SLEEP,
    "test_proxy.py": PROXY,
    "test_router.py": ROUTER,
    "test_stream.py": STREAM,
    "test_tools_builtin.py": TOOLS,
}
