"""`foresay vllm-config`: vLLM's arguments for decoding with foresay's drafters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from foresay.cli.command import Given, command, option
from foresay.cli.common import model_name
from foresay.cli.options import JSON, WHICH
from foresay.errors import ModelNotFoundError
from foresay.integrations.vllm_arguments import llm_arguments, serve_command
from foresay.lab.bench.peers.base import model_folder
from foresay.models.sources.packaged import ALIASES
from foresay.spec.expressions import parse
from foresay.spec.settings_file import Settings, is_settings, read_settings


@command(
    WHICH,
    option(
        "--drafter EXPRESSION",
        "An n-gram drafter such as suffix or max_gram, head(FOLDER), model(FOLDER) or none.  [default: suffix]",
    ),
    option("--length LENGTH", "Draft length: a number; for an n-gram drafter also a policy, such as throughput."),
    JSON,
    examples="""
        foresay vllm-config Qwen/Qwen2.5-0.5B-Instruct --drafter suffix
        foresay vllm-config foresay.toml --json""",
)
def run(given: Given) -> int:
    """Print vLLM's arguments for a drafter or settings file.

    The arguments run foresay's n-gram drafters inside vLLM. A draft head runs as vLLM's own method: write it with
    `foresay export` first, and name that folder.
    """
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
    call = parse(drafter or "suffix")
    names = [str(value) for key, value in call.values if key is None] if call.name in ("head", "model") else []
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
