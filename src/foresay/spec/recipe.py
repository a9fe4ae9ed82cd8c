"""Recipes: how to build the drafter that an expression names once the target is loaded, and its default draft length.

Owns the models and tables loaded to draft for a target, each loaded once. Knows no drafter by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foresay.decoding.protocols import Drafter, Rule
from foresay.drafters.memory import Memory
from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foresay.files import fingerprint
from foresay.lengths.throughput import DEFAULT_HIGH
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import resolve
from foresay.models.sources.location import is_gguf
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.expressions import Call
from foresay.text.tokenizer import own_size, tokenizer_fingerprint

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.drafts.assistant import Assistant
    from foresay.models.drafts.blocks import DraftsBlocks
    from foresay.models.drafts.head import HeadModel
    from foresay.models.drafts.mtp import MtpHead
    from foresay.models.huggingface.causal import CausalModel
    from foresay.models.huggingface.linears import MakeProduct
    from foresay.models.sources.drafts import Kind

logger = logging.getLogger("foresay")

_OWN_DRAFT_TOKENS = 5
"""Default number of draft tokens of drafters that are not foresay's own."""
DrafterBuilder = Callable[[], Drafter | None]
"""Builder of a drafter for one engine; returns None for plain decoding."""


@dataclass(slots=True)
class Resources:
    """A target, and the models and tables loaded to draft for it, each loaded once."""

    target: LoadedModel
    options: LoadOptions = field(default_factory=LoadOptions)
    models: dict[str, LoadedModel] = field(default_factory=dict)
    tables: dict[str, NgramTable] = field(default_factory=dict)
    drafts: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Heads and block drafters by kind and name."""
    mtp_head: MtpHead | None = None
    memories: dict[str, Memory] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self.target.model.device

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return self.target.model.vocab_size

    def model(self, name: str) -> LoadedModel:
        """Return a draft model by name."""
        if name not in self.models:
            # `revision` is that of the target's repository
            self.models[name] = resolve(name, self.options.for_draft(gguf=is_gguf(name)), None)
        return self.models[name]

    def head(self, name: str) -> HeadModel | Assistant:
        """Return a head or assistant by name. Raises UnsupportedModelError if the target does not output hidden states."""
        from foresay.models.drafts.assistant import Assistant
        from foresay.models.sources.drafts import assistant_of

        if ("head", name) not in self.drafts:
            target, options, make = self._for_reader("head")
            assistant = assistant_of(name, options)
            if assistant is not None:
                made: Any = Assistant(assistant, target, name=self.target.name, make=make)
                made.learned = fingerprint(name)
                self.drafts["head", name] = made
        found: HeadModel | Assistant = self._draft(name, "head")
        return found

    def block(self, name: str) -> DraftsBlocks:
        """Return a draft that scores blocks by name. Raises as `head` does."""
        found: DraftsBlocks = self._draft(name, "block")
        return found

    def _draft(self, name: str, kind: Kind) -> Any:
        """Return a draft on the target's hidden states by name."""
        from foresay.models.drafts.kinds import model_of
        from foresay.models.sources.drafts import load_draft

        if (kind, name) not in self.drafts:
            target, options, make = self._for_reader("head" if kind == "head" else "block drafter")
            draft = load_draft(name, options, kind=kind)
            self.drafts[kind, name] = model_of(draft.config)(draft, target, name=self.target.name, make=make)
        return self.drafts[kind, name]

    def mtp(self) -> MtpHead:
        """Return the target's multi-token-prediction layers. Raises UnsupportedModelError if its checkpoint has none."""
        from foresay.models.drafts.mtp import MtpHead
        from foresay.models.gguf.mtp import mtp_layers_of_file
        from foresay.models.sources.transformers_errors import quiet_transformers

        if self.mtp_head is None:
            target, options, make = self._for_reader("mtp drafter")
            in_blocks = self.target.weights == "GGUF" and options.bits is None
            with quiet_transformers():
                layers = mtp_layers_of_file(target.model, in_blocks=in_blocks)
                self.mtp_head = MtpHead(target, name=self.target.name, make=make, layers=layers)
        return self.mtp_head

    def has_mtp(self) -> bool:
        """Return True if the target's configuration names multi-token-prediction layers and its files have them."""
        from foresay.models.drafts.mtp import num_mtp_layers
        from foresay.models.huggingface.causal import CausalModel

        model = self.target.model
        if not isinstance(model, CausalModel) or not num_mtp_layers(model):
            return False
        try:
            self.mtp()
        except (UnsupportedModelError, ModelLoadError, ConfigError) as error:
            logger.info("drafting without multi-token-prediction layers: %s", error)
            return False
        return True

    def _for_reader(self, noun: str) -> tuple[CausalModel, LoadOptions, MakeProduct]:
        """Return the target of a draft that reads its hidden states, the options to load the draft, and how to make its products.

        noun: the kind of draft, for errors. Raises UnsupportedModelError if the target does not output hidden states.
        """
        from foresay.models.huggingface.causal import CausalModel
        from foresay.models.huggingface.linears import quantizer, unquantized

        target = self.target.model
        if not isinstance(target, CausalModel):
            raise UnsupportedModelError(
                f"a {noun} reads the hidden states of a decoder-only transformers model, but {self.target.name!r} is not one; "
                'draft with a model or "suffix"'
            )
        options = self._options_of_heads(target)
        bits = options.bits or (8 if self._rounds_heads(target) else None)
        return target, options, unquantized if bits is None else quantizer(bits, target.hardware)

    def _options_of_heads(self, target: CausalModel) -> LoadOptions:
        """Return the options to load heads with.

        Raises UnsupportedModelError for a target split by tp_plan, ConfigError for another draft_device than the target's.
        """
        if target.is_shared:
            raise UnsupportedModelError(
                f"a head needs a target in one process, but {self.target.name!r} is split by tp_plan; "
                'draft with a model or "suffix"'
            )
        wanted = self.options.draft_device
        if wanted is not None and not _is_same(torch.device(wanted), target.device):
            text = f": a head must be on the target's device, {target.device}; remove it, or draft with a model"
            raise ConfigError(text, param="draft_device", value=str(wanted))
        return self.options.for_draft()

    def _rounds_heads(self, target: CausalModel) -> bool:
        """Return True if heads are rounded to 8 bits by default, which halves their size; the output stays exact."""
        is_set = self.options.draft_weights is not None or self.options.weights != "auto"
        return not is_set and target.model.dtype == torch.bfloat16 and target.hardware.cpu_kernels

    def memory(self, folder: str, max_tokens: int) -> Memory:
        """Return the texts that a folder keeps over the target's tokens."""
        tokenizer = self.target.tokenizer
        name = f"{self.vocab_size} tokens" if tokenizer is None else tokenizer_fingerprint(tokenizer)
        if folder not in self.memories:
            self.memories[folder] = Memory(Path(folder), max_tokens, fingerprint=name)
        return self.memories[folder]

    def table(self, path: str) -> NgramTable:
        """Return an n-gram table over the target's tokens by path."""
        if path not in self.tables:
            table = NgramTable.load(path)
            check_table(table, self.target)
            self.tables[path] = table
        return self.tables[path]


def check_table(table: NgramTable, target: LoadedModel) -> None:
    """Raise VocabularyMismatchError if a table was built for another vocabulary than the target's."""
    tokenizer, size = target.tokenizer, target.model.vocab_size
    if tokenizer is None:
        table.check(None, size, size)
    else:
        table.check(tokenizer_fingerprint(tokenizer), size, own_size(tokenizer))


def _is_same(wanted: torch.device, device: torch.device) -> bool:
    """Return True if the devices are the same; `wanted` may lack an index."""
    return wanted.type == device.type and wanted.index in (None, device.index or 0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A drafter that can be built once the target is loaded."""

    prepare: Callable[[Resources], DrafterBuilder]
    num_draft_tokens: int
    """The draft length if it does not adapt."""
    forget: Callable[[], None] = lambda: None
    """Clears the data that the drafter keeps between requests."""
    check_files: Callable[[], None] = lambda: None
    """Raises ModelNotFoundError if the expression names a local file or folder that does not exist; loads nothing."""
    reads_target: bool = False
    """True if the drafter needs the target's layers or tokenizer, not only its tokens."""
    loads_model: bool = False
    """True if the drafter loads a model by name, to which `LoadOptions.draft_weights` applies."""
    samples: bool = False
    """True if draft tokens may be sampled, so that a sampled text depends on the draft length."""
    has_probabilities: bool = True
    """False for n-gram drafters: no length policy can end their drafts by how likely a token is."""
    fixed: bool = False
    """True if the expression sets the draft length, as a cascade's matrix does; it then does not adapt by default."""

    def length(self, rule: Rule) -> str:
        """Return the default length policy as an expression: one that adapts, except where that could change a seed's text."""
        if self.num_draft_tokens == 0 or self.fixed or not rule.exact:
            return str(self.num_draft_tokens)
        settings = {"high": self.num_draft_tokens} if self.num_draft_tokens > DEFAULT_HIGH else {}
        if self.samples:
            settings |= {"sampled": self.num_draft_tokens}
        return str(Call("throughput", tuple(settings.items())))


TRAITS = ("reads_target", "loads_model", "samples", "has_probabilities")
"""Fields that are true of drafters made of several if they are true of one."""


def own_drafter_recipe(prepare: Callable[[Resources], DrafterBuilder]) -> Recipe:
    """Return the recipe of a drafter that is not foresay's own, which may sample its tokens."""
    return Recipe(prepare, _OWN_DRAFT_TOKENS, samples=True)
