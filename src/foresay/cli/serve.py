"""`foresay serve`: an OpenAI-compatible API over one engine."""

from __future__ import annotations

import contextlib
import logging
import re

import click

from foresay.cli import options as opt
from foresay.cli.command import Given, command, group, option
from foresay.cli.common import load_generator, memory_size
from foresay.cli.drafts import suggest
from foresay.errors import ConfigError
from foresay.models.cache.memory import limit_memory
from foresay.server.settings import ServerSettings, read_keys
from foresay.text.tool_calls.formats import FORMATS

DEFAULTS = ServerSettings()
SERVER = group(
    "Server",
    option("--host ADDRESS", "Address to listen on.", DEFAULTS.host),
    option("--port N", "Port; 0 takes a free one.", DEFAULTS.port),
    option("--keys-file FILE", "Bearer keys, one a line, in addition to those of FORESAY_API_KEYS."),
    option("--open-to-all", "Accept other machines' requests without keys."),
    option("--cors ORIGIN...", "Origin whose pages may call the API, such as https://example.org, or *; repeatable."),
    option("--allow-host NAME...", "Further host name of this server, such as a proxy's; may be repeated."),
    option("--name NAME...", "Name of the model in the API; may be repeated.  [default: the model's]"),
    option(
        "--tool-format NAME",
        f"Format of the model's tool calls: auto (by its chat template), {', '.join(FORMATS)}.",
        DEFAULTS.tool_format,
    ),
    option("--control-tokens", "Let control tokens in messages open turns; by default they are text."),
    option(
        "--memory DIR",
        "Folder that keeps outputs and prompts, from which later requests draft; apart for each API key.",
    ),
    option("--memory-prompts/--no-memory-prompts", "Keep prompts, not only outputs.", True),
    option("--memory-shared", "Let requests of all API keys draft from each other's texts."),
    option(
        "--share-prefixes WITH",
        "Who reuses the work on a common beginning of prompts: requests of the same key, all or none.",
        DEFAULTS.share_prefixes,
    ),
    option(
        "--pooling NAME",
        "Embeddings of requests that do not choose: mean (of all tokens' hidden states), or last (that of the last token).",
        DEFAULTS.pooling,
    ),
    option(
        "--memory-limit SIZE",
        "Resident memory, such as 6GB, up to which caches grow and bodies of 64 KiB and more are read. Beyond it "
        "requests wait, or are answered with 503.",
    ),
    option("--max-waiting N", "Requests that may wait; further ones are answered with 429.", DEFAULTS.max_waiting),
    option("--timeout X", "Longest duration of a request, in seconds.", DEFAULTS.timeout_s),
    option("--drain X", "Seconds that running requests get to finish when the server stops.", DEFAULTS.drain_s),
)


def _settings(given: Given) -> ServerSettings:
    """Return the server's settings. Raises ConfigError for values that it cannot honour."""
    for origin in given.cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise ConfigError(f"--cors {origin!r} must be an origin such as https://example.org, without a path, or *")
    if given.memory is None and (given.memory_shared or not given.memory_prompts):
        raise ConfigError("--memory-shared and --no-memory-prompts need --memory DIR")
    for name in given.allow_host:
        if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:]+\]", name):
            raise ConfigError(f"--allow-host {name!r} must be a host name such as example.org, without scheme and port")
    same = ("host", "port", "open_to_all", "cors", "tool_format", "control_tokens", "memory_shared", "share_prefixes")
    return ServerSettings(
        **{name: getattr(given, name) for name in (*same, "pooling", "max_waiting")},
        keys=read_keys(given.keys_file),
        hosts=given.allow_host,
        timeout_s=given.timeout,
        drain_s=given.drain,
    )


@command(
    opt.WHICH,
    option(
        "--sampling SOURCE",
        "Defaults of requests that leave sampling fields out: model (its generation config), or foresay.",
        "model",
    ),
    opt.MAX_BATCH,
    option("--warmup", "Decode a little before the first request."),
    option("--log-requests", "Log a line of JSON for each request, without its text."),
    opt.METHOD,
    SERVER,
    opt.ALL_MACHINE,
    examples="""
        foresay serve Qwen/Qwen2.5-0.5B-Instruct --port 8000
        foresay serve --host 0.0.0.0 --keys-file keys.txt""",
    variables="FORESAY_SERVE",
)
def run(given: Given) -> int:
    """Serve a model through an OpenAI-compatible API.

    Requests share one engine with continuous batching. Each option can also be set by an environment variable
    FORESAY_SERVE_<OPTION>, such as FORESAY_SERVE_MODEL.
    """
    try:
        from foresay.server.running import bind, serve
        from foresay.server.service import Service, served_name
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'foresay[server]'") from None
    settings = _settings(given)
    limit = None if given.memory_limit is None else memory_size("--memory-limit", given.memory_limit)
    kept = {name: getattr(given, name) for name in ("memory", "memory_prompts")}
    sockets = bind(settings)  # fail before the model is loaded, which takes longer
    with contextlib.ExitStack() as opened:
        for one in sockets:
            opened.callback(one.close)
        generator = load_generator(given, max_batch_size=given.batch_size, **kept)
        if limit is not None:
            limit_memory(limit)
        opened.pop_all()  # from here on the server closes them
    service = Service(generator, settings, list(given.name) or [served_name(generator.target.name)])
    if given.log_requests:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("foresay.server").setLevel(logging.INFO)
    click.echo(generator.description, err=True)
    suggest(generator)
    listening = "listening at {}/v1".format
    serve(service, sockets, warm=given.warmup, on_listening=lambda address: click.echo(listening(address), err=True))
    return 0
