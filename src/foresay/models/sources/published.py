"""A table of drafts that others have published, by target; a file of this package.

Owns the file's format and the order in which kinds are preferred. Contains what the pages of the hub reported when it was
written: what they did not report is missing. Knows no network and no cache.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foresay.json_files import Schema, read_limited
from foresay.models.drafts.kinds import drafter_of

FILE = Path(__file__).with_name("published.json")
PREFERRED = ("dflash2", "dspark", "dflash", "peagle", "eagle3", "assistant", "model", "mtp")
"""Kinds by published tokens per pass, the best first (docs/how-to/choose-a-drafter.md). MTP layers come last, because they
are the default drafter of a checkpoint that has them."""
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_.-]{1,96}$"
"""Pattern of a repository's name on the hub."""
KIND = r"^[a-z0-9]{1,20}$"
LICENSE = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,59}$"

Name = Annotated[str, Field(pattern=REPOSITORY)]
Size = Annotated[int, Field(ge=1, le=2**53)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PublishedDraft(_Strict):
    """A draft in a repository of the hub; None for what is not known."""

    repo: Name
    kind: Annotated[str, Field(pattern=KIND)]
    """Name of the method: eagle3, dflash, dflash2, dspark, mtp (in the target's own checkpoint), model, assistant, ..."""
    parameters: Size | None = None
    bytes: Size | None = None
    """Size of the weight files."""
    license: Annotated[str, Field(pattern=LICENSE)] | None = None
    files: Literal["safetensors", "gguf", "pickle", "unknown"] = "safetensors"
    tested: bool = False
    """True if foresay's own tests decode with these weights."""
    refused: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Part of its configuration that foresay does not decode."""

    @property
    def refusal(self) -> str | None:
        """Reason for which foresay does not decode it, as far as it is known without its files; None if nothing is."""
        drafter = drafter_of(self.kind)
        if drafter is None:
            return f"no drafter decodes {self.kind}"
        if self.refused is not None:
            return f"{self.refused} is not supported"
        if self.files == "pickle":
            return "its weights are pickled, which can run code"
        if self.files == "gguf":
            return "a repository of GGUF files is not downloaded by its name; download one of its files"
        return None

    @property
    def rank(self) -> int:
        """Index of its kind in PREFERRED."""
        return PREFERRED.index(self.kind) if self.kind in PREFERRED else len(PREFERRED)

    @property
    def size(self) -> int | None:
        """Size of the weights in bytes; without that of the files, of as many parameters in 16 bits."""
        return self.bytes or (2 * self.parameters if self.parameters else None)


class PublishedTarget(_Strict):
    """A target with the drafts that are published for it."""

    name: Name
    active_parameters: Size | None = None
    """Parameters that one pass reads; of a mixture of experts, the active ones."""
    drafts: Annotated[tuple[PublishedDraft, ...], Field(min_length=1, max_length=100)]

    @model_validator(mode="after")
    def _check_drafts(self) -> Self:
        names = [one.repo for one in self.drafts]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{min(twice)} is listed twice for {self.name}")
        return self


class _Table(_Strict):
    format: Literal["foresay-published-drafts"]
    version: Literal[1]
    targets: Annotated[tuple[PublishedTarget, ...], Field(max_length=10_000)]

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        names = [one.name.casefold() for one in self.targets]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"the target {min(twice)} is listed twice")
        return self


_SCHEMA: Schema[_Table] = Schema(_Table, "a table of published drafts")


def read_table(path: Path) -> dict[str, PublishedTarget]:
    """Read a table: name of the target in lower case -> its drafts. Raises ConfigError that names the first wrong field."""
    return {one.name.casefold(): one for one in _SCHEMA.read(read_limited(path, 1 << 20), str(path)).targets}


@functools.cache
def table() -> dict[str, PublishedTarget]:
    """Return the package's table, which is read on first use."""
    return read_table(FILE)
