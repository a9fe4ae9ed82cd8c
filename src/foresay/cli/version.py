"""`foresay version`."""

from __future__ import annotations

import importlib.metadata
import platform

import typer

from foresay import __version__


def run() -> None:
    """Print the versions of foresay and of what it runs on."""
    typer.echo(f"foresay {__version__}")
    for package in ("torch", "transformers"):
        typer.echo(f"{package} {importlib.metadata.version(package)}")
    typer.echo(f"python {platform.python_version()}")
