"""Options that choose prompts, and options that are lists of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from foresay.errors import ConfigError
from foresay.lab.data.datasets import load_items
from foresay.lab.data.items import PromptItem


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Choice of prompts."""

    PANEL: ClassVar[str] = "Prompts"
    prompts: Annotated[
        str,
        typer.Option(
            metavar="SOURCE", help="shipped, a .jsonl, .json, .csv or .txt file (also .gz), or a data set of the hub."
        ),
    ] = "shipped"
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="gsm8k, mmlu, humaneval, mt_bench, hellaswag or alpaca.  [default: recognized by the fields]",
        ),
    ] = None
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field of a record that has its text or messages.")
    ] = None
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Split of a data set of the hub.")] = None
    category: Annotated[str | None, typer.Option(metavar="NAME", help="Only prompts of this category.")] = None
    count: Annotated[int | None, typer.Option(help="Take N prompts, balanced over categories.")] = None
    subset_seed: Annotated[int, typer.Option(help="Seed of the choice that --count makes.")] = 0
    raw: Annotated[bool, typer.Option("--raw", help="Continue each text as it is, without a chat template.")] = False

    def items(self) -> list[PromptItem]:
        """Read the prompts."""
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
        """Name of these prompts in results."""
        whole = Path(self.prompts).name if self.prompts != "shipped" else "shipped"
        return f"{whole}:{self.category}" if self.category else whole


def numbers(text: str, flag: str, low: int = 1) -> list[int]:
    """Return the integers of a list separated by commas, each once. Raises ConfigError, naming the flag, for one below `low`."""
    try:
        out = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r} must be integers separated by commas, such as 1,4,8") from None
    if min(out) < low:
        raise ConfigError(f"{flag} {text!r} must be integers of at least {low}")
    return list(dict.fromkeys(out))
