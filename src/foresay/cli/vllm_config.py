"""`foresay vllm-config`: what vLLM must be told to decode with foresay's drafters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.cli.common import model_name
from foresay.cli.options import ModelOption
from foresay.integrations.vllm_arguments import llm_arguments, serve_command
from foresay.lab.bench.peers.base import model_folder
from foresay.models.sources.packaged import ALIASES
from foresay.spec.settings_file import Settings, is_settings, read_settings


def run(
    *,
    model: ModelOption = None,
    drafter: Annotated[
        str | None, typer.Option(help="A look-up such as suffix or max_gram, head(FOLDER), model(FOLDER) or none.")
    ] = None,
    length: Annotated[str | None, typer.Option(help="A number; of look-ups also a policy, as throughput.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The arguments of vLLM's LLM as JSON.")] = False,
) -> int:
    """Print vLLM's arguments for a settings file or a drafter: foresay's look-ups inside vLLM.

    A trained head is vLLM's own method: write it with `foresay export` first, and name that folder.
    """
    name = model_name(model)
    settings = read_settings(name) if is_settings(name) else Settings(target=name)
    given: dict[str, Any] = {name: value for name, value in (("drafter", drafter), ("length", length)) if value}
    settings = dataclasses.replace(settings, **given)
    arguments = llm_arguments(settings, _place(settings.target))
    typer.echo(json.dumps(arguments, indent=2) if as_json else serve_command(arguments))
    return 0


def _place(target: str) -> str:
    """Where vLLM finds a model: of an alias the folder of its weights; a hub's name is vLLM's to look up."""
    return model_folder(target) if target in ALIASES or Path(target).exists() else target
