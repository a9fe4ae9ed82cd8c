"""Options that choose prompts, the prompts that they choose, and lists of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foresay.cli.command import Given, group, option
from foresay.cli.options import raw
from foresay.errors import ConfigError
from foresay_lab.data.datasets import FORMATS, SHIPPED, load_items
from foresay_lab.data.items import PromptItem

PROMPTS = "Prompts"
"""Heading of the options in help pages."""
_SOURCE = (
    "shipped, a .jsonl, .json, .csv or .txt file (also .gz), or a data set of the hub; FORMAT@SOURCE names its format: "
    f"{', '.join(FORMATS)}."
)
SOURCE = option("--prompts SOURCE", _SOURCE, SHIPPED)
SOURCES = option("--prompts SOURCE...", f"{_SOURCE} May be repeated.  [default: {SHIPPED}]")
group(PROMPTS, SOURCE, SOURCES)
CHOICE = group(
    PROMPTS,
    option("--field NAME", "Field of a record that has its text or messages."),
    option("--split NAME", "Split of a data set of the hub."),
    option("--category NAME", "Only prompts of this category."),
    option("--count N", "Take N prompts, balanced over categories."),
    raw(),
)
DATA = (SOURCE, *CHOICE)
"""Prompts of one source."""


def items(given: Given, source: str | None = None) -> list[PromptItem]:
    """Read the prompts that options choose. source: in place of --prompts, where that may be repeated."""
    source = given.prompts if source is None else source
    chosen: dict[str, Any] = {name: getattr(given, name, None) for name in ("field", "split", "category", "count")}
    if "@" in source and not Path(source).exists():
        chosen["format"], _, source = source.partition("@")
    return load_items(source, **chosen)


def layer_numbers(text: str, param: str, example: str) -> list[int]:
    """Read numbers of layers. Raises ConfigError, with the example, for a list that cannot be read."""
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"must be numbers of layers, such as {example}", param=param, value=text) from None


def source_name(given: Given, source: str) -> str:
    """Name of these prompts in results."""
    name = source if source == SHIPPED else Path(source).name.rpartition("@")[2]
    return f"{name}:{given.category}" if given.category else name
