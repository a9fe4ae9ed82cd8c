"""`foresay serve`: the engine behind an OpenAI-compatible API."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.cli.common import load_generator
from foresay.cli.options import DrafterOption, MachineOptions, MethodOptions, ModelOptions
from foresay.errors import ConfigError
from foresay.server.settings import ServerSettings, read_keys

USUAL = ServerSettings()


def run(
    *,
    models: ModelOptions,
    drafter: DrafterOption = "auto",
    methods: MethodOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = USUAL.host,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = USUAL.port,
    keys_file: Annotated[
        Path | None, typer.Option(help="Bearer keys, one to a line; beside those of FORESAY_API_KEYS.")
    ] = None,
    open_to_all: Annotated[bool, typer.Option("--open-to-all", help="Let other machines in without keys.")] = False,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call the API.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name that clients reach it by, such as a proxy's.")
    ] = None,
    name: Annotated[list[str] | None, typer.Option(help="What clients call the model; may be repeated.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows decoded at a time.")] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are answered 429.")
    ] = USUAL.max_waiting,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = USUAL.timeout_s,
    drain: Annotated[float, typer.Option(help="Seconds that requests may go on when the server ends.")] = USUAL.drain_s,
    prefill_wait: Annotated[
        float,
        typer.Option(help="Seconds that running requests may wait for others' prompts between two tokens, about."),
    ] = USUAL.prefill_wait_s,
    warmup: Annotated[bool, typer.Option("--warmup", help="Decode a little before the first request.")] = False,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A line of JSON for each; never its text.")
    ] = False,
    machine: MachineOptions,
) -> int:
    """Serve a model to OpenAI's clients, with continuous batching."""
    try:
        from foresay.server.running import bind, serve
        from foresay.server.service import Service, served_name
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'foresay[server]'") from None
    settings = ServerSettings(
        host=host,
        port=port,
        keys=read_keys(keys_file),
        open_to_all=open_to_all,
        cors=tuple(cors or ()),
        hosts=tuple(allow_host or ()),
        max_waiting=max_waiting,
        timeout_s=timeout,
        prefill_wait_s=prefill_wait,
        drain_s=drain,
    )
    sockets = bind(settings)  # before the model is loaded, which takes longer
    more: dict[str, Any] = {} if batch_size is None else {"max_batch_size": batch_size}
    generator = load_generator(models, drafter, methods, machine, **more)
    service = Service(generator, settings, name or [served_name(generator.target.name)])
    if log_requests:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("foresay.server").setLevel(logging.INFO)
    typer.echo(generator.description, err=True)
    serve(service, sockets, warm=warmup, say=lambda address: typer.echo(f"listening at {address}/v1", err=True))
    return 0
