"""Health, models, properties, slots, the page; keys and origins; metrics."""

from __future__ import annotations

from clients.cases.bodies import AUTHORIZED, ORIGIN, complete, get, post
from clients.cases.case import NO_ROUTE, Request, cases, different, refused
from clients.cases.expect import count, equals, error, has, header, lacks, ok, status, text, that, written

COMPLETION = "/completion"
BASIC = cases({
    "a started server is healthy": get("/health"),
    "properties": (get("/props"), NO_ROUTE),
    "the list of models without the prefix v1": (get("/models"), NO_ROUTE),
    "the list of models": (get("/v1/models"), equals("data.0.id", "tiny")),
    "slots that are not enabled": (get("/slots"), NO_ROUTE),
    "slots": (get("/slots"), NO_ROUTE),
    "a completion by the server's own route": (post(COMPLETION, {"prompt": "Hello", "n_predict": 16}), NO_ROUTE),
    "a greedy completion of 16 tokens": (complete("Hello", max_tokens=16, temperature=0), text("choices.0.text")),
    "the page at the root": (get("/"), written("(?i)<!doctype html>")),
    "aliases and tags of a model": (get("/v1/models"), has("data.0.aliases"), has("data.0.tags"),
        different("Each name of a model is an entry of its own; entries have no aliases and no tags.")),
})  # fmt: skip


def _secret(**headers: str) -> Request:
    return post("/v1/completions", {"prompt": "I believe", "max_tokens": 4}, headers=headers)


def _preflight(origin: str) -> Request:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}
    return Request(method="OPTIONS", path="/v1/completions", headers={"Origin": origin, **asked})


OTHER_ORIGIN = (
    "Pages of other origins may call the API only if `--cors` names their origin; llama.cpp admits every origin."
)
SECURITY = cases({
    "health needs no key": (get("/health"), lacks("error"), "keys"),
    "the list of models needs no key": (get("/v1/models"), lacks("error"),
        different("The list of models needs a key, as OpenAI's and vLLM's does."), "keys"),
    "the page needs no key": (get("/"), written("(?i)<!doctype html>"), "keys"),
    "the page's script needs no key": (get("/page.js"), "keys"),
    "the page's style needs no key": (get("/page.css"), "keys"),
    "no key": (_secret(), error(401), equals("error.type", "authentication_error"), "keys"),
    "a wrong key": (_secret(Authorization="Bearer invalid-key"), error(401),
        equals("error.type", "authentication_error"), "keys"),
    "the right key": (_secret(**AUTHORIZED), lacks("error"), text("choices.0.text"), "keys"),
    "the right key in Anthropic's header": (_secret(**{"X-Api-Key": AUTHORIZED["Authorization"].split()[1]}),
        lacks("error"), text("choices.0.text"), "keys"),
    "a chat with the right key": (post("/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is life?"}], "max_tokens": 4}, headers=AUTHORIZED),
        count("choices", 1), "keys"),
    "a preflight request of an origin that is allowed": (_preflight(ORIGIN), status(200),
        header("access-control-allow-origin", ORIGIN), "origins"),
    "methods of a preflight response": (_preflight(ORIGIN), status(200),
        header("access-control-allow-methods", ".*GET.*POST.*"), "origins"),
    "headers of a preflight response": (_preflight(ORIGIN), status(200),
        header("access-control-allow-headers", r"\*|.*Authorization.*"), "origins"),
    "a preflight request of any origin": (_preflight("http://web.mydomain.fr"), status(200),
        header("access-control-allow-origin", "http://web.mydomain.fr"), different(OTHER_ORIGIN)),
    "credentials of an allowed origin": (_preflight(ORIGIN), status(200),
        header("access-control-allow-credentials", "true"),
        different("Keys are sent as headers, so credentials such as cookies are not allowed."), "origins"),
    "an image file of the server": (post("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type":
        "image_url", "image_url": {"url": "file://a.jpeg"}}]}]}), error(400), refused("messages.content.type")),
    "an image of a path with two dots": (post("/v1/chat/completions", {"messages": [{"role": "user", "content":
        [{"type": "image_url", "image_url": {"url": "file://../a.jpeg"}}]}]}), error(400),
        refused("messages.content.type")),
})  # fmt: skip
AGAIN = complete("I believe the meaning of life is", temperature=0, max_tokens=8)
METRICS = cases({
    "a repeated prompt is cached and counted": ([AGAIN, AGAIN, get("/metrics")], ok(reply=1),
        that("cached tokens", lambda bodies: bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0),
        written(r"foresay_prompt_tokens_cached_total [1-9]")),
    "the ratio of cached tokens": (get("/metrics"), written("prompt_cache_hit_ratio"),
        different("Metrics have the counters of prompt tokens and of cached ones, from which the ratio follows.")),
})  # fmt: skip
SLEEP = cases({
    "whether a server sleeps": (get("/props"), NO_ROUTE),
    "health of an idle server": get("/health"),
    "models of an idle server": (get("/v1/models"), equals("data.0.id", "tiny")),
})  # fmt: skip
PROXY = cases({
    "a proxy that is not enabled": (get("/cors-proxy"), NO_ROUTE),
    "a proxy": (get("/cors-proxy?url=http://127.0.0.1:1/"), NO_ROUTE),
})  # fmt: skip
ROUTER = cases({
    "properties of a router": (get("/props"), NO_ROUTE),
    "a chat of a model that does not exist": (post("/v1/chat/completions",
        {"model": "non-existent/model", "messages": [{"role": "user", "content": "hello"}], "stream": True}),
        error(404, "non-existent/model")),
    "load a model": (post("/models/load", {"model": "tiny"}), NO_ROUTE),
    "unload a model": (post("/models/unload", {"model": "tiny"}), NO_ROUTE),
    "a request without a key": (post("/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}), error(401),
        equals("error.type", "authentication_error"), "keys"),
    "a request with a key": (post("/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        headers=AUTHORIZED), lacks("error"), "keys"),
})  # fmt: skip
STREAM = cases({
    "a stream is resumed": (get("/v1/stream?conv_id=a&from=0"), NO_ROUTE),
    "a stream is stopped": (Request(method="DELETE", path="/v1/stream?conv_id=a"), NO_ROUTE),
})  # fmt: skip
TOOLS = cases({
    "a tool that the server runs": (post("/tools", {"tool": "read_file", "params": {"path": "a"}}), NO_ROUTE),
})  # fmt: skip
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
