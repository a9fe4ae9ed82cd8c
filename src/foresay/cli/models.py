"""`foresay models`: the names that need no path."""

from __future__ import annotations

import typer

from foresay.errors import ModelNotFoundError
from foresay.files import cache_dir
from foresay.models.sources.packaged import ALIASES, damage, packaged_file


def run() -> None:
    """List the built-in model names, and whether each is ready."""
    for alias, entry in ALIASES.items():
        folder = cache_dir() / "models" / f"{alias}-{entry.version}"
        try:
            packaged_file(alias)
            state = "ready" if folder.is_dir() and damage(folder) is None else "installed, converted on first use"
        except ModelNotFoundError as error:
            state = str(error)
        typer.echo(f"{alias}\n    {entry.description}\n    {state}")
    typer.echo("Any hub id (org/name), model folder or GGUF file works as well.")
