"""Names of published kinds of drafts, and which of them a reader of this package accepts.

Owns the recognition of a kind by a config.json. What is accepted is not listed here but tried on the readers. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foresay.errors import ConfigError
from foresay.models.drafts.block_config import BlockConfig, is_block
from foresay.models.drafts.config import DraftConfig, HeadConfig

_KIND = "speculators_model_type"
_ARCHITECTURES = {
    "dflash2": "dflash2",
    "dflash": "dflash",
    "dspark": "dspark",
    "eagle3": "eagle3",
    "assistant": "assistant",
}
"""Part of the name of an architecture -> kind; the first one that is found counts."""


def kind_of(values: Mapping[str, Any]) -> str | None:
    """Return the kind of draft that a config.json describes, such as "dflash"; None for anything else."""
    named = values.get(_KIND)
    if isinstance(named, str):
        return named
    listed = values.get("architectures")
    text = " ".join(map(str, listed)).lower() if isinstance(listed, list) else ""
    for part, kind in _ARCHITECTURES.items():
        if part in text:
            return kind
    own = values.get("dflash_config")
    if is_block(values):
        convolved = any(part.get("conv_kernel_size") for part in (values, own) if isinstance(part, Mapping))
        return "dflash2" if convolved else "dspark" if own is None else "dflash"
    return "eagle3" if "eagle_config" in values else None


def drafter_of(kind: str) -> str | None:
    """Return the name of the drafter that decodes a published kind; None if none does."""
    if kind in ("mtp", "model"):
        return kind
    if kind == "assistant":
        return "head"
    values = {_KIND: kind}
    try:
        _reader(values).read(values)
    except ConfigError as error:
        if error.param == _KIND:
            return None
    return "block" if is_block(values) else "head"


def refusal(values: Mapping[str, Any]) -> str | None:
    """Return the reason for which the config.json of a head or block drafter is refused; None if it is accepted."""
    if kind_of(values) == "assistant":  # read with its weights
        return None
    try:
        _reader(values).read(values)
    except ConfigError as error:
        return str(error)
    return None


def _reader(values: Mapping[str, Any]) -> type[DraftConfig]:
    return BlockConfig if is_block(values) else HeadConfig
