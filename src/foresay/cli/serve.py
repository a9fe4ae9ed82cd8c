"""`foresay serve`: an OpenAI-compatible API over one engine."""

from __future__ import annotations

import contextlib
import logging
import re

import click

from foresay.cli.command import Given
from foresay.cli.common import load_generator, memory_size
from foresay.cli.drafts import suggest
from foresay.errors import ConfigError
from foresay.models.cache.memory import limit_memory
from foresay.server.settings import ServerSettings, read_keys


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


def run(given: Given) -> int:
    """Run the command."""
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
