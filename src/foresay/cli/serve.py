"""`foresay serve`: an OpenAI-compatible API over one engine."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from foresay.cli.common import load_generator, memory_size
from foresay.cli.options import (
    SAMPLING,
    DrafterOption,
    DraftOption,
    MachineOptions,
    MaxBatchOption,
    MethodOptions,
    ModelChoice,
    ModelOptions,
)
from foresay.errors import ConfigError
from foresay.models.cache.memory import limit_memory
from foresay.server.settings import ServerSettings, read_keys
from foresay.text.tool_calls.formats import FORMATS

DEFAULTS = ServerSettings()


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Address, access and limits of the server."""

    PANEL: ClassVar[str] = "Server"
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = DEFAULTS.port
    keys_file: Annotated[
        Path | None, typer.Option(help="Bearer keys, one a line, in addition to those of FORESAY_API_KEYS.")
    ] = None
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Accept other machines' requests without keys.")
    ] = False
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Origin whose pages may call the API, such as https://example.org, or *; repeatable."
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Further host name of this server, such as a proxy's; may be repeated.",
        ),
    ] = None
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of the model in the API; may be repeated.  [default: the model's]"),
    ] = None
    tool_format: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Format of the model's tool calls: auto (by its chat template), {', '.join(FORMATS)}."
        ),
    ] = DEFAULTS.tool_format
    control_tokens: Annotated[
        bool,
        typer.Option("--control-tokens", help="Let control tokens in messages open turns; by default they are text."),
    ] = False
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that keeps outputs and prompts, from which later requests draft; apart for each API key.",
        ),
    ] = None
    memory_prompts: Annotated[
        bool, typer.Option("--memory-prompts/--no-memory-prompts", help="Keep prompts, not only outputs.")
    ] = True
    memory_shared: Annotated[
        bool, typer.Option("--memory-shared", help="Let requests of all API keys draft from each other's texts.")
    ] = False
    share_prefixes: Annotated[
        str,
        typer.Option(
            metavar="WITH",
            help="Who reuses the work on a common beginning of prompts: requests of the same key, all or none.",
        ),
    ] = DEFAULTS.share_prefixes
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Resident memory, such as 6GB, up to which caches grow and bodies of 64 KiB and more are read. Beyond it "
            "requests wait, or are answered with 503.",
        ),
    ] = None
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; further ones are answered with status 429.")
    ] = DEFAULTS.max_waiting
    timeout: Annotated[float, typer.Option(help="Longest duration of a request, in seconds.")] = DEFAULTS.timeout_s
    drain: Annotated[float, typer.Option(help="Seconds that running requests get to finish when the server stops.")] = (
        DEFAULTS.drain_s
    )
    prefill_wait: Annotated[
        float,
        typer.Option(help="About how many seconds running requests wait for new prompts between two tokens."),
    ] = DEFAULTS.prefill_wait_s

    def settings(self) -> ServerSettings:
        """Return the server's settings. Raises ConfigError for values that it cannot honour."""
        for origin in self.cors or ():
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(
                    f"--cors {origin!r} must be an origin such as https://example.org, without a path, or *"
                )
        if self.memory is None and (self.memory_shared or not self.memory_prompts):
            raise ConfigError("--memory-shared and --no-memory-prompts need --memory DIR")
        for name in self.allow_host or ():
            if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:]+\]", name):
                raise ConfigError(
                    f"--allow-host {name!r} must be a host name such as example.org, without scheme and port"
                )
        return ServerSettings(
            host=self.host,
            port=self.port,
            keys=read_keys(self.keys_file),
            open_to_all=self.open_to_all,
            cors=tuple(self.cors or ()),
            hosts=tuple(self.allow_host or ()),
            tool_format=self.tool_format,
            control_tokens=self.control_tokens,
            memory_shared=self.memory_shared,
            share_prefixes=self.share_prefixes,
            max_waiting=self.max_waiting,
            timeout_s=self.timeout,
            prefill_wait_s=self.prefill_wait,
            drain_s=self.drain,
        )


def run(
    *,
    which: ModelChoice,
    draft: DraftOption = None,
    drafter: DrafterOption = "auto",
    methods: MethodOptions,
    serving: ServingOptions,
    sampling: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            rich_help_panel=SAMPLING,
            help="Defaults of requests that leave sampling fields out: model (its generation config), or foresay.",
        ),
    ] = "model",
    batch_size: MaxBatchOption = None,
    warmup: Annotated[bool, typer.Option("--warmup", help="Decode a little before the first request.")] = False,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log a line of JSON for each request, without its text.")
    ] = False,
    machine: MachineOptions,
) -> int:
    """Serve a model through an OpenAI-compatible API.

    Requests share one engine with continuous batching. Each option can also be set by an environment variable
    FORESAY_SERVE_<OPTION>, such as FORESAY_SERVE_MODEL.
    """
    try:
        from foresay.server.running import bind, serve
        from foresay.server.service import Service, served_name
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'foresay[server]'") from None
    settings = serving.settings()
    limit = None if serving.memory_limit is None else memory_size("--memory-limit", serving.memory_limit)
    sockets = bind(settings)  # fail before the model is loaded, which takes longer
    with contextlib.ExitStack() as opened:
        for one in sockets:
            opened.callback(one.close)
        generator = load_generator(
            ModelOptions(which.name, draft),
            drafter,
            methods,
            machine,
            max_batch_size=batch_size,
            memory=serving.memory,
            memory_prompts=serving.memory_prompts,
            sampling=sampling,
        )
        if limit is not None:
            limit_memory(limit)
        opened.pop_all()  # from here on the server closes them
    service = Service(generator, settings, serving.name or [served_name(generator.target.name)])
    if log_requests:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("foresay.server").setLevel(logging.INFO)
    typer.echo(generator.description, err=True)
    serve(
        service, sockets, warm=warmup, on_listening=lambda address: typer.echo(f"listening at {address}/v1", err=True)
    )
    return 0
