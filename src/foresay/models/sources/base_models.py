"""The names that a model, and the models it was made from, have on the hub.

Owns the fields in which a folder, a GGUF file or a cached repository names its base model. What a file names is only compared
with the table of published drafts or sent to the hub as a filter; it is never opened. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foresay.errors import ForesayError
from foresay.json_files import parse_object, read_limited
from foresay.models.sources.published import table

_MAX_METADATA_BYTES, _MAX_CONFIG_BYTES, MAX_NAMES = 1 << 16, 1 << 22, 16
"""YAML of a megabyte would take 11 s."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a configuration with the number of experts of a layer."""


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


def names_of_values(values: Mapping[str, Any]) -> Iterator[str]:
    """Names of the base models in a GGUF file's values by address, or by organization and name; then its own name."""
    for number in range(MAX_NAMES):
        key = f"general.base_model.{number}"
        address = re.fullmatch(r"https://huggingface\.co/([^/\s]+/[^/\s]+)/?", str(values.get(f"{key}.repo_url", "")))
        if address:
            yield address[1]
        yield from _known(f"{values.get(f'{key}.organization', '')}/{values.get(f'{key}.name', '')}")
    yield from _known(str(values.get("general.name", "")))


def has_experts(values: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of a mixture of experts, of which a pass reads a part."""
    text = values.get("text_config")
    return any(section.get(name) for section in (values, text if isinstance(text, dict) else {}) for name in EXPERTS)


def _known(name: str) -> list[str]:
    """Return the target of the table, if only one has these letters and digits, with or without its organization."""
    wanted, whole = _letters(name), "/" in name
    found = [
        one.name for one in table().values() if _letters(one.name if whole else one.name.partition("/")[2]) == wanted
    ]
    return found if len(found) == 1 else []


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())
