"""`foresay serve`: an OpenAI-compatible API over one engine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from foresay.cli.command import Given
from foresay.cli.common import load_arguments, load_generator, memory_size, use_threads
from foresay.cli.dialects import unread
from foresay.cli.drafts import suggest
from foresay.cli.progress import note
from foresay.errors import ConfigError, ForesayError
from foresay.generation.load import check_model, load
from foresay.models.cache.memory import limit_memory
from foresay.server.settings import ServerSettings, read_keys
from foresay.spec.settings_file import FILE, Models, Settings, is_settings, read_models

if TYPE_CHECKING:  # needs the extra server
    from foresay.server.service import Entry


def _listening(address: str) -> None:
    """Report the page's address on this machine, and the one that is listened on: after it come lines about requests."""
    note(f"page: {address.replace('//0.0.0.0:', '//127.0.0.1:').replace('//[::]:', '//[::1]:')}/")
    note(f"listening at {address}/v1")


def _settings(given: Given, max_loaded: int) -> ServerSettings:
    """Return the server's settings. max_loaded: see ServerSettings. Raises ConfigError for values that it cannot honour."""
    for origin in given.cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise ConfigError("must be *, or an origin without a path: https://example.org", param="cors", value=origin)
    if given.memory is None and (given.memory_shared or not given.memory_prompts):
        raise ConfigError("and --no-memory-prompts need --memory DIR", param="memory_shared")
    if given.keep_prompts is not None and given.share_prefixes == "none":
        raise ConfigError(
            "and {keep_prompts} contradict; drop one", param="share_prefixes", value="none", keep_prompts=...
        )
    for name in given.allow_host:
        if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:]+\]", name):
            raise ConfigError("must be a host name such as example.org, without port", param="allow_host", value=name)
    same = ("host", "port", "open_to_all", "cors", "tool_format", "control_tokens", "memory_shared", "share_prefixes")
    return ServerSettings(
        **{name: getattr(given, name) for name in (*same, "pooling", "max_waiting")},
        max_loaded=max_loaded,
        keys=read_keys(given.keys_file),
        hosts=given.allow_host,
        timeout_s=given.timeout,
        drain_s=given.drain,
    )


def _models(given: Given, source: str | None) -> Models | None:
    """Return the models of a settings file that names several, or None. Raises ConfigError for options of a single model."""
    found = read_models(source) if source is not None and is_settings(source) else None
    for flag, value in (("--name", given.name), ("--draft", given.draft), ("--lora", given.lora)):
        if found and value:
            text = f"is for one model, and {source} has a table of models; set name and drafter of each there"
            raise ConfigError(text, param=flag)
    return found


def _entry(given: Given, source: str, name: str, settings: Settings, kept: Mapping[str, Any]) -> Entry:
    """Return a model of a settings file, which is not loaded yet. Raises the error of its options or files, with its name."""
    from foresay.server.service import Entry

    if kept["memory"] is not None:  # the texts of a folder belong to one vocabulary
        kept = {**kept, "memory": str(Path(kept["memory"]) / quote(name, safe=""))}
    arguments = load_arguments(given, target=settings, max_batch_size=given.batch_size, **kept)
    del arguments["target"]
    try:
        batch_size, num_bytes = check_model(settings, arguments)
    except ForesayError as error:
        raise error.about(f"{source}: models.{name}", owned=True) from None
    return Entry([name], lambda: load(settings, **arguments), batch_size, num_bytes)


def _draining(count: int, seconds: float) -> str:
    """A line about the requests that a shutdown waits for."""
    if not count:
        return "stopping: no request is open"
    open_ones = "1 open request has" if count == 1 else f"{count} open requests have"
    return f"stopping: {open_ones} {seconds:g} s to end; a second Ctrl-C or signal ends {'it' if count == 1 else 'them'} now"


def _names(given: Given, model: str) -> list[str]:
    """The public names of a model: of its adapters, then its own."""
    from foresay.models.sources.lora import adapters
    from foresay.server.service import served_name

    return [*(one.name for one in adapters(given.lora)), served_name(model)]


def run(given: Given) -> int:
    """Run the command."""
    try:
        from foresay.server.running import bind, serve
        from foresay.server.service import Service
    except ImportError as error:
        raise ConfigError(f"needs {error.name}: pip install 'foresay[server]'", param="server") from None
    source = FILE if given.model is None and Path(FILE).is_file() else given.model
    models = _models(given, source)
    settings = _settings(given, 1 if models is None else models.max_loaded)
    limit = None if given.memory_limit is None else memory_size("--memory-limit", given.memory_limit)
    kept = {name: getattr(given, name) for name in ("memory", "memory_prompts")}
    sockets = bind(settings)  # fail before the model is loaded, which takes longer
    with contextlib.ExitStack() as opened:
        for one in sockets:
            opened.callback(one.close)
        if models:
            use_threads(given.threads)
            entries = [_entry(given, str(source), name, one, kept) for name, one in models.models.items()]
            note("\n".join(f"{name}: {one}" for name, one in models.models.items()))
            service = Service(entries, settings)
        else:
            generator = load_generator(given, max_batch_size=given.batch_size, **kept)
            service = Service.of(generator, settings, list(given.name) or _names(given, generator.target.name))
        if limit is not None:
            limit_memory(limit)
        opened.pop_all()  # from here on the server closes them
    if given.log_requests:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("foresay.server").setLevel(logging.INFO)
    for line in unread(os.environ):
        note(line)
    if not models:
        note(generator.description)
        suggest(generator)
    serve(
        service,
        sockets,
        warm=given.warmup,
        on_listening=_listening,
        on_draining=lambda count: note(_draining(count, given.drain)),
    )
    return 0
