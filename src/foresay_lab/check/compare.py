"""The result of a check, and its comparisons: outputs with the recorded ones, tokens per pass with those of an earlier result.

Owns the file of a result (tokens per pass by category, and the settings that determine them) and the conditions of a failure.
Decodes nothing and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from foresay.errors import ConfigError
from foresay.json_files import Schema
from foresay.records import document
from foresay.records.document import Stored
from foresay.records.recording import Record, Recording

TOLERANCE = 0.05
"""Default of the relative loss of tokens per pass that is accepted."""
MIN_TOKENS = 500
"""Tokens of the smallest category that is compared on its own: in a smaller one, a single prompt changes the ratio too much."""
_ROUNDING = 1e-9
"""Rounding error of a relative change, so that a loss of exactly the tolerance is accepted."""
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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an output differs from the recorded one."""

    id: str
    category: str
    position: int
    """Counted from 0."""
    recorded: int | None
    decoded: int | None
    """Token ids; None after the end of an output."""


def text_differences(records: Sequence[Record], outputs: Sequence[Sequence[int]]) -> tuple[Difference, ...]:
    """Return the first difference of each output that is not the recorded one, in the order of the records."""
    out = []
    for record, output in zip(records, outputs, strict=True):
        known, new = list(record.output), list(output)
        if known == new:
            continue
        both = enumerate(zip(known, new, strict=False))
        index = next((i for i, (a, b) in both if a != b), min(len(known), len(new)))
        first, second = (ids[index] if index < len(ids) else None for ids in (known, new))
        out.append(Difference(record.id, record.category, index, first, second))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Change:
    """Tokens per pass of a category, or of all prompts, in this run and an earlier one."""

    category: str | None
    """None: all prompts."""
    now: float
    was: float
    tolerance: float
    """Accepted relative loss."""

    @property
    def relative(self) -> float:
        """Relative change, -0.1 for a loss of 10%."""
        return self.now / self.was - 1

    @property
    def fell(self) -> bool:
        """True if the loss exceeds the tolerance."""
        return self.relative < -self.tolerance - _ROUNDING

    @property
    def rose(self) -> bool:
        """True if the gain exceeds the tolerance."""
        return self.relative > self.tolerance + _ROUNDING


def check_comparable(settings: Mapping[str, str], was: CheckResult) -> None:
    """Raise ConfigError, with both values, if a run has other settings or prompts than an earlier result.

    settings: fields of a CheckResult.
    """
    for name in ("model", "drafter", "length", "rule"):
        ours, theirs = settings[name], getattr(was, name)
        if ours != theirs:
            text = f"differs from {theirs!r} of the earlier result; use the same, or save a new result"
            raise ConfigError(text, param=name, value=ours)
    if settings["prompts"] != was.prompts:
        text = (
            f"are not those of the earlier result ({was.prompts!r}); use the same --limit, or save a result for these"
        )
        raise ConfigError(text, param="prompts", value=settings["prompts"])


def changes(now: CheckResult, was: CheckResult, tolerance: float = TOLERANCE) -> tuple[Change, ...]:
    """Return the change of all prompts, then of each category with at least MIN_TOKENS tokens in both runs."""
    out = [Change(None, now.total.tokens_per_pass, was.total.tokens_per_pass, tolerance)]
    for name, ours in now.categories.items():
        theirs = was.categories.get(name)
        if theirs is not None and min(ours.tokens, theirs.tokens) >= MIN_TOKENS:
            out.append(Change(name, ours.tokens_per_pass, theirs.tokens_per_pass, tolerance))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of both comparisons."""

    result: CheckResult
    differences: tuple[Difference, ...]
    not_compared: str | None = None
    """Reason why texts were not compared."""
    changes: tuple[Change, ...] = ()
    """Empty without an earlier result."""
    notes: tuple[str, ...] = ()
    """Circumstances that may explain a failure."""

    @property
    def passed(self) -> bool:
        """True if no text differs and no tokens per pass fell."""
        return not self.differences and not any(one.fell for one in self.changes)

    def as_record(self) -> dict[str, Any]:
        """Return the outcome as plain data, for JSON."""
        total = self.result.total
        texts = None
        if self.not_compared is None:
            texts = {"same": total.prompts - len(self.differences), "prompts": total.prompts}
        return {
            "passed": self.passed,
            "texts": texts,
            "not_compared": self.not_compared,
            "differences": [asdict(one) for one in self.differences],
            "tokens_per_pass": total.tokens_per_pass,
            "categories": {name: one.tokens_per_pass for name, one in self.result.categories.items()},
            "changes": [
                {**asdict(one), "relative": one.relative, "fell": one.fell, "rose": one.rose} for one in self.changes
            ],
            "notes": list(self.notes),
            "result": asdict(self.result),
        }


def notes(recording: Recording, now: CheckResult, was: CheckResult | None) -> tuple[str, ...]:
    """Return what differs between the runs and is no error: other names, formats and versions."""
    formats, recorded = recording.settings.get("dtype"), recording.provenance.get("versions")
    version = recorded.get("foresay") if isinstance(recorded, Mapping) else None
    pairs = [
        ("the recording is of model", recording.model, now.model),
        ("the recording was decoded in", formats, now.dtype),
        ("the recording was made by foresay", version, now.foresay),
    ]
    if was is not None:
        pairs += [
            ("the earlier result was decoded in", was.dtype, now.dtype),
            ("the earlier result was made by foresay", was.foresay, now.foresay),
        ]
    known = [(text, old, new) for text, old, new in pairs if isinstance(old, str) and old]
    return tuple(f"{text} {old!r}, this run {new!r}" for text, old, new in known if old != new)
