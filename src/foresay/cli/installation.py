"""The installation, as `foresay info` shows it: versions, processor, kernels, caches, example models. Loads nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from foresay.errors import ModelNotFoundError
from foresay.files import cache_dir
from foresay.models.cpu import build
from foresay.models.sources.packaged import ALIASES, conversion_folder, damage, packaged_file
from foresay.records.provenance import machine
from foresay.version import __version__

_OPTIONAL = ("fastapi", "llama-cpp-python", "lm-eval", "matplotlib", "ray", "vllm")
"""Packages of extras, shown if they are installed."""


def described() -> Iterator[str]:
    """Return the lines of the page."""
    yield f"foresay {__version__}"
    yield f"  python: {platform.python_version()}"
    for package in ("torch", "transformers", *_OPTIONAL):
        try:
            yield f"  {package}: {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    found = machine()
    yield f"  processor: {found['processor']}, {found['cores']} cores, {torch.backends.cpu.get_cpu_capability()}"
    yield f"  GPUs: {', '.join(found.get('gpus', ())) or 'none'}"
    yield f"  kernels: {_kernels()}"
    yield f"  cache: {_size(cache_dir())} (FORESAY_CACHE)"
    yield f"  hub cache: {_hub_cache()}"
    yield "  example models:"
    for alias in ALIASES:
        yield f"    {alias}: {ALIASES[alias].description}; {_state(alias)}"
    yield "Any hub id (org/name), model folder or GGUF file is a model too: foresay info MODEL"


def _kernels() -> str:
    if os.environ.get(build.SWITCH) == "0":
        return f"off ({build.SWITCH}=0)"
    if not build.is_compiled():
        return "not compiled yet; foresay prepare compiles them"
    return f"{build.instructions() or build.failure_reason()}; {build.library_path()}"


def _hub_cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return f"{HF_HUB_CACHE} (HF_HUB_CACHE)"


def _size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return f"{folder}, {sum(path.stat().st_size for path in files) / 1e6:.0f} MB"


def _state(alias: str) -> str:
    folder = conversion_folder(alias)
    try:
        packaged_file(alias)
    except ModelNotFoundError as error:
        return str(error)
    return "ready" if folder.is_dir() and damage(folder) is None else "installed, converted on first use"
