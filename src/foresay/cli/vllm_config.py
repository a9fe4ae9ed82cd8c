"""`foresay vllm-config`: vLLM's arguments for the drafts that foresay writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from foresay.cli.command import Given
from foresay.cli.common import model_name
from foresay.errors import ModelNotFoundError
from foresay.integrations.vllm_arguments import llm_arguments, model_folder, serve_command
from foresay.models.sources.packaged import ALIASES
from foresay.spec.expressions import parse
from foresay.spec.settings_file import Settings, is_settings, read_settings


def run(given: Given) -> int:
    """Run the command."""
    name = model_name(given.model)
    settings = read_settings(name) if is_settings(name) else Settings(target=name)
    settings = dataclasses.replace(
        settings, **{name: value for name in ("drafter", "length") if (value := getattr(given, name))}
    )
    _check_draft(settings.drafter)
    arguments = llm_arguments(settings, _location(settings.target))
    click.echo(json.dumps(arguments, indent=2) if given.json else serve_command(arguments))
    return 0


def _check_draft(drafter: str | None) -> None:
    """Raise ModelNotFoundError for a drafter whose head or model is neither a folder, nor an alias, nor a hub id."""
    call = parse(drafter or "none")
    names = [str(value) for key, value in call.values if key is None and call.name in ("head", "block", "model")]
    for name in names:
        if name not in ALIASES and not Path(name).expanduser().is_dir() and not _is_hub_id(name):
            raise ModelNotFoundError(
                f"--drafter {drafter}: there is no folder {name!r}; give a folder, or org/name on the hub"
            )


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def _location(target: str) -> str:
    """The name under which vLLM finds a model: the folder of an alias' weights; a hub id as it is."""
    if target not in ALIASES and not Path(target).exists() and not _is_hub_id(target):
        raise ModelNotFoundError(f"unknown model {target!r}; give a folder, or org/name on the hub")
    return model_folder(target) if target in ALIASES or Path(target).exists() else target
