"""A model's name -> the names that it, and the models it was made from, have on the hub.

Owns the fields in which a folder, a GGUF file or a cached repository names its base model. What a file names is only compared
with the table of published drafts or sent to the hub as a filter; it is never opened. Loads no weights.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foresay.errors import ForesayError
from foresay.json_files import parse_object, read_limited
from foresay.models.gguf.header import read_header
from foresay.models.sources.hub import cached_folder
from foresay.models.sources.location import refuse_missing
from foresay.models.sources.packaged import ALIASES
from foresay.models.sources.published import REPOSITORY, table

_MAX_METADATA_BYTES, _MAX_CONFIG_BYTES, _MAX_NAMES = 1 << 16, 1 << 22, 16
"""YAML of a megabyte would take 11 s."""


def hub_names(name: str) -> tuple[str, ...]:
    """Return the names under which a model's drafts may be published, its own first; empty if none is known.

    name: an alias, a hub id, a folder or a GGUF file. Raises ModelNotFoundError for one that is none of them.
    """
    path = Path(name).expanduser()
    if name in ALIASES:
        found: Iterator[Any] = iter([ALIASES[name].hub_id])
    elif name and path.is_dir():
        found = _of_folder(path)
    elif path.suffix == ".gguf" and path.is_file():
        found = _of_gguf(path)
    else:
        refuse_missing(name)
        found = _of_repository(name)
    out: dict[str, str] = {}
    for one in itertools.islice(found, _MAX_NAMES):
        if isinstance(one, str) and re.fullmatch(REPOSITORY, one):
            out.setdefault(one.casefold(), one)
    return tuple(out.values())


def _of_repository(name: str) -> Iterator[Any]:
    yield name
    folder = cached_folder(name) if re.fullmatch(REPOSITORY, name) else None
    if folder is not None:
        yield from card_bases(folder)


def _of_folder(folder: Path) -> Iterator[Any]:
    yield read_values(folder).get("_name_or_path")
    yield from card_bases(folder)


def read_values(folder: Path) -> Mapping[str, Any]:
    """Return a folder's config.json; empty if it has none that can be read."""
    try:
        return parse_object(read_limited(folder / "config.json", _MAX_CONFIG_BYTES), "config.json")
    except (OSError, ForesayError):
        return {}


def card_bases(folder: Path) -> list[Any]:
    """Return the base models that a folder's model card names, as they are in its metadata."""
    from huggingface_hub import ModelCard

    try:
        with (folder / "README.md").open("rb") as file:
            begun = re.match(rb"---\r?\n.*?\n---", file.read(_MAX_METADATA_BYTES), re.DOTALL)
        found = ModelCard(f"{begun[0].decode()}\n").data.to_dict().get("base_model") if begun else None
    except Exception:  # a missing file, or any error of the YAML library
        return []
    return found if isinstance(found, list) else [found]


def _of_gguf(path: Path) -> Iterator[Any]:
    """Names of the base models in a file's values by address, or by organization and name; then its own name."""
    try:
        values = read_header(path).values
    except (OSError, ForesayError):
        return
    for number in range(_MAX_NAMES):
        key = f"general.base_model.{number}"
        address = re.fullmatch(r"https://huggingface\.co/([^/\s]+/[^/\s]+)/?", str(values.get(f"{key}.repo_url", "")))
        if address:
            yield address[1]
        yield from _known(f"{values.get(f'{key}.organization', '')}/{values.get(f'{key}.name', '')}")
    yield from _known(str(values.get("general.name", "")))


def has_experts(path: Path) -> bool:
    """Return True if a GGUF file is a mixture of experts, of which a pass reads a part."""
    header = read_header(path)
    return bool(header.values.get(f"{header.architecture}.expert_count"))


def _known(name: str) -> list[str]:
    """Return the target of the table, if only one has these letters and digits, with or without its organization."""
    wanted, whole = _letters(name), "/" in name
    found = [
        one.name for one in table().values() if _letters(one.name if whole else one.name.partition("/")[2]) == wanted
    ]
    return found if len(found) == 1 else []


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())
