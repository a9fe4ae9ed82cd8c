"""Methods of a benchmark: a drafter, a length and a rule, over one loaded target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.load import change
from foresay.spec.recipes import read_drafter, read_length, read_rule

PLAIN = "plain"
"""Name of the baseline: foresay without a drafter."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter, a length ("" for the drafter's default) and a rule, as expressions."""

    drafter: str
    length: str = ""
    rule: str = "speculative"

    def __post_init__(self) -> None:
        read_drafter(self.drafter)
        read_rule(self.rule)
        if self.length:
            read_length(self._length)
        if self.drafter == "none" and self.length:
            text = "drafts nothing, but {length} was given; drop one"
            raise ConfigError(text, param="drafter", value="none", length=self.length)

    @property
    def _length(self) -> str | int:
        return int(self.length) if self.length.isdecimal() else self.length

    @property
    def name(self) -> str:
        """Name in results: "suffix, 12", or PLAIN without a drafter."""
        if self.drafter == "none":
            return PLAIN
        rule = "" if self.rule == "speculative" else f", {self.rule}"
        return f"{self.drafter}, {self.own_length}{rule}"

    @property
    def own_length(self) -> str:
        """The length as an expression: the drafter's default if none was given."""
        return self.length or read_drafter(self.drafter).length(read_rule(self.rule))

    @property
    def fixed(self) -> Method:
        """This method with a fixed length: its own, else the drafter's default number of draft tokens."""
        return replace(self, length=self.length or str(read_drafter(self.drafter).num_draft_tokens))

    def generator(self, target: Generator, batch_size: int) -> Generator:
        """Return the target with this method."""
        length = self._length if self.length else None
        return change(target, drafter=self.drafter, length=length, rule=self.rule, max_batch_size=batch_size)


def methods(drafters: Sequence[str], lengths: Sequence[str] = (), rule: str = "speculative") -> list[Method]:
    """Return every drafter with every length, or with its default if no lengths are given, without duplicates."""
    out = distinct(Method(d, length, rule) for d, length in product(drafters, lengths or [""]) if d != "none")
    if not out:
        raise ConfigError("names nothing to compare; give at least one besides none", param="drafter")
    return out


def distinct(methods: Iterable[Method]) -> list[Method]:
    """Return the methods in order, without those that only write an earlier one in other words."""
    found: dict[str, Method] = {}
    for one in methods:
        found.setdefault(one.name, one)
    return list(found.values())
