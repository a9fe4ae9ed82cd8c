"""Options that the lab's commands share: which prompts, and lists of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foresay.errors import ConfigError
from foresay.lab.data.datasets import load_items
from foresay.lab.data.items import PromptItem


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Which prompts."""

    prompts: Annotated[
        str, typer.Option(help="shipped, a .jsonl, .json, .csv or .txt file (also .gz), or a data set of the hub.")
    ] = "shipped"
    format: Annotated[
        str | None, typer.Option(help="gsm8k, mmlu, humaneval, mt_bench, hellaswag or alpaca; else by its fields.")
    ] = None
    field: Annotated[str | None, typer.Option(help="Where records have their text or messages.")] = None
    split: Annotated[str | None, typer.Option(help="Which split of a data set of the hub.")] = None
    category: Annotated[str | None, typer.Option(help="Prompts of this category only.")] = None
    count: Annotated[int | None, typer.Option(help="So many prompts, balanced over categories.")] = None
    subset_seed: Annotated[int, typer.Option(help="Which ones, with --count.")] = 0
    no_template: Annotated[bool, typer.Option("--no-template", help="Texts as they are, without chat template.")] = (
        False
    )

    def items(self) -> list[PromptItem]:
        """The prompts."""
        return load_items(
            self.prompts,
            format=self.format,
            field=self.field,
            split=self.split,
            category=self.category,
            count=self.count,
            seed=self.subset_seed,
        )

    @property
    def name(self) -> str:
        """What results call these prompts."""
        whole = Path(self.prompts).name if self.prompts != "shipped" else "shipped"
        return f"{whole}:{self.category}" if self.category else whole


def numbers(text: str, name: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    try:
        out = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text!r} must be numbers separated by commas, as 1,4,8") from None
    if min(out) < 1:
        raise ConfigError(f"{name} {text!r} must be numbers of at least 1")
    return list(dict.fromkeys(out))
