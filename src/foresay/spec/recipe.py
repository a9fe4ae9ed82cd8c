"""What an expression of a drafter comes to: how it is made once the target is there, and the length it drafts.

Owns what was loaded to draft for a target, each model and table once. Knows no drafter by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from foresay.decoding.protocols import Drafter, Rule
from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.lengths.throughput import DEFAULT_HIGH
from foresay.models.sources.catalog import LoadedModel, is_gguf
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.resolve import resolve
from foresay.spec.expressions import Call
from foresay.text.tokenizer import own_size, tokenizer_fingerprint

if TYPE_CHECKING:  # which would bring transformers
    from foresay.models.heads.model import HeadModel
    from foresay.models.huggingface.causal import CausalModel

DrafterBuilder = Callable[[], Drafter | None]
"""Makes a drafter for one engine."""


@dataclass(slots=True)
class Resources:
    """A target, and what was loaded to draft for it; each model and table is loaded once."""

    target: LoadedModel
    options: LoadOptions = field(default_factory=LoadOptions)
    models: dict[str, LoadedModel] = field(default_factory=dict)
    tables: dict[str, NgramTable] = field(default_factory=dict)
    heads: dict[str, HeadModel] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.model.device

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return self.target.model.vocab_size

    def model(self, name: str) -> LoadedModel:
        """A draft model by name."""
        if name not in self.models:
            # a revision names one repository's version: the target's
            self.models[name] = resolve(name, self.options.for_draft(gguf=is_gguf(name)), None)
        return self.models[name]

    def head(self, name: str) -> HeadModel:
        """A head on the target's hidden states by name. Raises UnsupportedModelError for a target that shows none."""
        from foresay.models.heads.model import HeadModel
        from foresay.models.huggingface.causal import CausalModel
        from foresay.models.huggingface.linears import in_bits, unchanged
        from foresay.models.sources.heads import load_head

        if name not in self.heads:
            target = self.target.model
            if not isinstance(target, CausalModel):
                raise UnsupportedModelError(
                    f"a head reads the hidden states of a decoder-only transformers model, and {self.target.name!r} is none"
                )
            options = self._options_of_heads(target)
            bits = options.bits or (8 if self._rounds_heads(target) else None)
            make = unchanged if bits is None else in_bits(bits)
            self.heads[name] = HeadModel(load_head(name, options), target, name=self.target.name, make=make)
        return self.heads[name]

    def _options_of_heads(self, target: CausalModel) -> LoadOptions:
        """Raises ConfigError and UnsupportedModelError where a head's target would have to be elsewhere or in one piece."""
        if target.is_shared:
            raise UnsupportedModelError(
                f"a head reads the hidden states of one process, and {self.target.name!r} is shared out by tp_plan; "
                'draft with a model or "suffix"'
            )
        asked = self.options.draft_device
        if asked is not None and not _is_same(torch.device(asked), target.device):
            raise ConfigError(
                f"draft_device={str(asked)!r}: a head reads the target's hidden states where they are, on {target.device}; "
                "drop draft_device, or draft with models alone"
            )
        return self.options.for_draft()

    def _rounds_heads(self, target: CausalModel) -> bool:
        """Whether a head's weights are rounded to 8 bits unasked, which halves their bytes; its laws are what it computes."""
        from foresay.models.cpu.build import library

        asked = self.options.draft_weights is not None or self.options.weights != "auto"
        return (
            not asked and target.device.type == "cpu" and target.model.dtype == torch.bfloat16 and library() is not None
        )

    def table(self, path: str) -> NgramTable:
        """An n-gram table over the target's tokens."""
        if path not in self.tables:
            table = NgramTable.load(path)
            check_table(table, self.target)
            self.tables[path] = table
        return self.tables[path]


def check_table(table: NgramTable, target: LoadedModel) -> None:
    """Raise VocabularyMismatchError for a table that was made for another vocabulary than a target's."""
    tokenizer, size = target.tokenizer, target.model.vocab_size
    if tokenizer is None:
        table.check(None, size, size)
    else:
        table.check(tokenizer_fingerprint(tokenizer), size, own_size(tokenizer))


def _is_same(asked: torch.device, device: torch.device) -> bool:
    """Whether a device that may lack a number is meant by one."""
    return asked.type == device.type and asked.index in (None, device.index or 0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A drafter that can be made once the target is there."""

    prepare: Callable[[Resources], DrafterBuilder]
    num_draft_tokens: int
    """The length of its drafts where that must not adapt."""
    forget: Callable[[], None] = lambda: None
    """Clears what it keeps between requests."""
    reads_target: bool = False
    """Whether it needs the target's layers or tokenizer, and not only its tokens."""
    loads_model: bool = False
    """Whether it loads a model by name, which `LoadOptions.draft_weights` is for."""
    samples: bool = False
    """Whether its guesses may be drawn from laws, so that a sampled text depends on how many there are."""
    fixed: bool = False
    """Whether the expression itself sets the draft length, as a cascade's matrix does, so that it never adapts by default."""

    def length(self, rule: Rule) -> str:
        """The length it drafts by default, as an expression: one that adapts, where no seed's text changes by it."""
        if self.num_draft_tokens == 0 or self.fixed or not rule.exact:
            return str(self.num_draft_tokens)
        settings = {"high": self.num_draft_tokens} if self.num_draft_tokens > DEFAULT_HIGH else {}
        if self.samples:
            settings |= {"sampled": self.num_draft_tokens}
        return str(Call("throughput", tuple(settings.items())))
