"""A folder or a hub id -> a draft head or a block drafter.

Owns the location of its files; heads/files.py reads them.
"""

from __future__ import annotations

import os
from pathlib import Path

from foresay.errors import ConfigError, ModelNotFoundError
from foresay.models.blocks.files import Block, is_block, read_block
from foresay.models.heads.files import Head, read_config, read_head
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import ALIASES, packaged_head


def load_head(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Head:
    """Load a draft head by the alias of its target, by folder or hub id; only JSON and safetensors are downloaded and read.

    Raises as `read_head` does, and ModelNotFoundError for a name that is neither, or that the hub does not have.
    """
    text = os.fspath(name)
    if (shipped := packaged_head(text)) is not None:
        return read_head(shipped)
    if text in ALIASES:
        raise ModelNotFoundError(f"the draft head for {text!r} is not installed; {ALIASES[text].head_hint}")
    folder = _folder(text, "a head", options)
    if is_block(read_config(folder)):
        raise ConfigError(f"{text!r} is a block drafter, not a head; draft with block({text})")
    return read_head(folder)


def load_block(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Block:
    """Load a block drafter by folder or hub id; only JSON and safetensors are downloaded and read.

    Raises as `read_block` does, and ModelNotFoundError for a name that is neither, or that the hub does not have.
    """
    text = os.fspath(name)
    folder = _folder(text, "a block drafter", options)
    if not is_block(read_config(folder)):
        raise ConfigError(f"{text!r} is not a block drafter: its config.json has no target_layer_ids; is it a head?")
    return read_block(folder)


def load_head_or_block(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Head | Block:
    """Load a draft head or a block drafter, whichever a name denotes. Raises as `load_head` and `load_block` do."""
    text = os.fspath(name)
    is_folder = Path(text).expanduser().is_dir()
    return (
        load_block(text, options)
        if is_folder and is_block(read_config(Path(text).expanduser()))
        else load_head(text, options)
    )


def _folder(text: str, noun: str, options: LoadOptions | None) -> Path:
    """Return the folder that a name denotes, downloaded if it is a hub id."""
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if not text or path.exists() or text.startswith(("/", "./", "../", "~")) or text.count("/") != 1:
        raise ModelNotFoundError(f"no such folder: {text!r}; give the folder of {noun}, or org/name of one on the hub")
    return Path(_fetched(text, (options or LoadOptions()).revision))


def _fetched(name: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    try:
        found: str = snapshot_download(
            name, revision=revision, allow_patterns=["*.json", "*.safetensors"], etag_timeout=10.0
        )
    except Exception as error:  # any exception of the network library
        raise ModelNotFoundError(
            f"{name!r} is not a folder here, and the hub did not give it: {error} (check your network)"
        ) from error
    return found
