"""A folder or a hub id -> a draft head.

Owns the location of its files; heads/files.py reads them.
"""

from __future__ import annotations

import os
from pathlib import Path

from foresay.errors import ModelNotFoundError
from foresay.models.heads.files import Head, read_head
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import ALIASES, packaged_head


def load_head(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Head:
    """Load a draft head by the alias of its target, by folder or hub id; only JSON and safetensors are downloaded and read.

    Raises as `read_head` does, and ModelNotFoundError for a name that is neither, or that the hub does not have.
    """
    text = os.fspath(name)
    if (shipped := packaged_head(text)) is not None:
        return read_head(shipped)
    path = Path(text).expanduser()
    if path.is_dir():
        return read_head(path)
    if text in ALIASES:
        raise ModelNotFoundError(f"the draft head for {text!r} is not installed; {ALIASES[text].head_hint}")
    if not text or path.exists() or text.startswith(("/", "./", "../", "~")) or text.count("/") != 1:
        raise ModelNotFoundError(f"no such folder: {text!r}; give the folder of a head, or org/name of one on the hub")
    return read_head(_fetched(text, (options or LoadOptions()).revision))


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
