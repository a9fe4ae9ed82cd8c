"""The file of a check: tokens per pass by category, and the settings that determine them.

Owns the format. Decodes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from foresay.json_files import Schema
from foresay.records import document
from foresay.records.document import Stored

FORMAT, VERSION = "foresay-check", 1

Size = Annotated[int, Field(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True)
class Counts(Stored):
    """Prompts, output tokens and target passes."""

    prompts: Size
    tokens: Size
    passes: Size

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens / target passes."""
        return self.tokens / self.passes


@dataclass(frozen=True, slots=True)
class CheckResult(Stored):
    """The counts of a run, and the settings that determine them."""

    model: str
    drafter: str
    length: str
    rule: str
    dtype: str
    """Format of the weights."""
    foresay: str
    """Version that decoded."""
    prompts: str
    """Digest of ids, categories and token ids of the prompts."""
    categories: Annotated[Mapping[str, Counts], Field(min_length=1)]
    """Counts by category of the recording."""

    @property
    def total(self) -> Counts:
        """Sum over the categories."""
        every = self.categories.values()
        return Counts(sum(c.prompts for c in every), sum(c.tokens for c in every), sum(c.passes for c in every))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result atomically. Raises ConfigError if it cannot be written."""
        document.save(self, path, FORMAT, VERSION)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CheckResult:
        """Read a result. Raises ConfigError for a file that cannot be read or is not a result of this version."""
        return document.load(path, FORMAT, VERSION, _RESULT, "foresay check --save")


_RESULT: Schema[CheckResult] = Schema(CheckResult, "a result of foresay check")
