"""A folder, hub id or alias -> a draft on hidden states.

Owns the location of its files; drafts/files.py reads them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from foresay.errors import ConfigError, ModelNotFoundError
from foresay.files import fingerprint
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.files import read_config, read_draft
from foresay.models.sources.assistants import is_assistant, load_assistant, load_gguf_assistant
from foresay.models.sources.gguf_drafts import read_gguf_draft
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import ALIASES, packaged_head

Kind = Literal["head", "block"]
_NOUNS: dict[Kind, str] = {"head": "a head", "block": "a block drafter"}


def load_draft(
    name: str | os.PathLike[str], options: LoadOptions | None = None, *, kind: Kind | None = None
) -> StoredDraft:
    """Load a draft by folder, GGUF file or hub id, or a head by the alias of its target; no pickle is read.

    kind: the only one to accept; None for any. Raises as `read_draft` does, ConfigError for another kind, and ModelNotFoundError
    for a name that is neither, or that the hub does not have.
    """
    text = os.fspath(name)
    if kind != "block":
        if (shipped := packaged_head(text)) is not None:
            return replace(read_draft(shipped), learned=fingerprint(shipped))
        if text in ALIASES:
            raise ModelNotFoundError(f"the draft head for {text!r} is not installed; {ALIASES[text].head_hint}")
    noun = _NOUNS[kind or "head"]
    path, read = (
        (_file(text, noun), read_gguf_draft) if text.endswith(".gguf") else (_folder(text, noun, options), read_draft)
    )
    draft = replace(read(path), learned=fingerprint(path))
    if kind not in (None, found := draft.config.DRAFTER):
        problem = f"is a {draft.config.NOUN}, not {noun}; draft with {found}({text})"
        raise ConfigError(problem, param="path", value=text)
    return draft


def check_draft_exists(name: str, kind: Kind) -> None:
    """Raise ModelNotFoundError for a draft's file or folder that is not here; names that may be hub ids or aliases pass."""
    path = Path(name).expanduser()
    if name in ALIASES or packaged_head(name) is not None or path.is_dir():
        return
    if name.endswith(".gguf"):
        _file(name, _NOUNS[kind])
    else:
        _check_hub_id(name, _NOUNS[kind])


def assistant_of(name: str, options: LoadOptions) -> Any | None:
    """Return the AssistantModule by folder, GGUF file or hub id; None for another draft. Raises as `load_draft` does."""
    if name in ALIASES or packaged_head(name) is not None:
        return None
    if name.endswith(".gguf"):
        return load_gguf_assistant(_file(name, _NOUNS["head"]))
    folder = _folder(name, _NOUNS["head"], options)
    values = read_config(folder)
    return load_assistant(folder, values) if is_assistant(values) else None


def _file(text: str, noun: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ModelNotFoundError(f"no such file: {text!r}; give the GGUF file or the folder of {noun}")
    return path


def _folder(text: str, noun: str, options: LoadOptions | None) -> Path:
    """Return the folder that a name denotes, downloaded if it is a hub id."""
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    _check_hub_id(text, noun)
    return Path(fetched(text, (options or LoadOptions()).revision))


def _check_hub_id(text: str, noun: str) -> None:
    """Raise ModelNotFoundError for a name that is no folder, if it cannot be a hub id."""
    is_path = Path(text).expanduser().exists() or text.startswith(("/", "./", "../", "~"))
    if not text or is_path or text.count("/") != 1:
        raise ModelNotFoundError(f"no such folder: {text!r}; give the folder of {noun}, or org/name of one on the hub")


def fetched(name: str, revision: str | None, files: Sequence[str] = ("*.json", "*.safetensors")) -> str:
    """Return the folder of a draft on the hub, downloaded if it is not in the cache. files: patterns of their names.

    Raises ModelNotFoundError.
    """
    from huggingface_hub import snapshot_download

    try:
        found: str = snapshot_download(name, revision=revision, allow_patterns=list(files), etag_timeout=10.0)
    except Exception as error:  # any exception of the network library
        raise ModelNotFoundError(
            f"{name!r} is not a folder here, and the hub did not give it: {error} (check your network)"
        ) from error
    return found
