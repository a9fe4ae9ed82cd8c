"""The files of a model, of any format: described, read, and assembled to a model that foresay decodes.

Owns the order of these phases. A format is a subclass, which describes and reads its own files.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from foresay.models.cache.memory import trim
from foresay.models.huggingface import linears
from foresay.models.sources.base_models import MAX_NAMES
from foresay.models.sources.describing import Description
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.lora import adapters, digest, merge
from foresay.models.sources.published import REPOSITORY
from foresay.models.sources.wrapping import LoadedModel, check_scores, wrap


class Source(ABC):
    """Located files of a model. Each method raises ModelLoadError for files that are wrong or damaged."""

    name: str
    """As the user gave it."""
    is_conversion: bool = False
    """True for the dequantized copy of an alias, which foresay made."""

    def load(self, options: LoadOptions) -> LoadedModel:
        """Return the model. Raises UnsupportedModelError if it cannot be decoded exactly."""
        described = self.describe(options)
        weights, tokenizer = self.read(described, options)
        has_format = described.is_ours or options.bits is not None or linears.has_products(weights)
        loaded = wrap(self.name, weights, tokenizer, optimise=True, options=options)
        check_scores(self.name, loaded.model)
        model: Any = loaded.model
        model.learned = self.learned(weights.config) + digest(adapters(options.lora))
        trim()  # memory of the weights before they were packed
        return dataclasses.replace(loaded, weights=described.weights if has_format else "")

    def read(self, described: Description, options: LoadOptions) -> tuple[Any, Any]:
        """Return transformers' model, with adapters, and its tokenizer. Raises ConfigError as `merge` does."""
        tokenizer = self.tokenizer(options, required=False)
        model = self.model(described, options)
        merge(model, adapters(options.lora))
        return model, tokenizer

    def fetched(self, options: LoadOptions, *, weights: bool = True) -> Source:
        """Return the source once its files are here or can be reached. weights: False if only the tokenizer is needed.

        Raises ModelNotFoundError otherwise.
        """
        return self

    def hub_names(self) -> tuple[str, ...]:
        """Return the names under which the model's drafts may be published, its own first; empty if none is known."""
        out: dict[str, str] = {}
        for one in itertools.islice(self.base_names(), MAX_NAMES):
            if isinstance(one, str) and re.fullmatch(REPOSITORY, one):
                out.setdefault(one.casefold(), one)
        return tuple(out.values())

    @abstractmethod
    def describe(self, options: LoadOptions, *, for_decoding: bool = True) -> Description:
        """Return the description of the model.

        for_decoding: False for weights that become numbers, in the dtype of the options. Raises ConfigError for options that do
        not apply to the files.
        """

    @abstractmethod
    def tokenizer(self, options: LoadOptions, *, required: bool) -> Any:
        """Return the tokenizer. required: False to return None for files without a vocabulary, and to log that."""

    @abstractmethod
    def model(self, described: Description, options: LoadOptions) -> Any:
        """Return transformers' model with its weights, checked before anything large is allocated."""

    @abstractmethod
    def learned(self, config: Any) -> bytes:
        """Return the digest of the weights. config: of the model that was read."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Return the size of the weight files; 0 for a repository whose files are not on this machine.

        Raises ModelNotFoundError for one that cannot be requested either.
        """

    @abstractmethod
    def read_bytes(self) -> int | None:
        """Return the bytes that one pass reads; None for a mixture of experts, and if no file is here."""

    @abstractmethod
    def base_names(self) -> Iterable[Any]:
        """Return what the files name as the model itself, and as those it was made from: unchecked, in this order."""
