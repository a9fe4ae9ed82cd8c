"""The file of a check: tokens per pass by category, and the settings that determine them.

Owns the format. Decodes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from foresay.errors import ConfigError
from foresay.files import atomic_write
from foresay.json_files import Schema, parse_object, read_limited

FORMAT, VERSION = "foresay-check", 1

Size = Annotated[int, Field(ge=1, le=2**40)]
_CHECKS = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Validation settings of the dataclasses below."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompts, output tokens and target passes."""

    __pydantic_config__ = _CHECKS

    prompts: Size
    tokens: Size
    passes: Size

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens / target passes."""
        return self.tokens / self.passes


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The counts of a run, and the settings that determine them."""

    __pydantic_config__ = _CHECKS

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
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False)
        with atomic_write(path) as whole:
            whole.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CheckResult:
        """Read a result. Raises ConfigError for a file that cannot be read or is not a result of this version."""
        name = os.fspath(path)
        try:
            values = parse_object(read_limited(path), name)
            if values.pop("format", None) != FORMAT or values.pop("version", None) != VERSION:
                raise ConfigError(f"{name}: not a {FORMAT} of version {VERSION}; make one with foresay check --save")
            return _RESULT.of(values, name)
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}") from None


_RESULT: Schema[CheckResult] = Schema(CheckResult, "a result of foresay check")
