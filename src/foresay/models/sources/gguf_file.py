"""A GGUF file as the source of a model: described by its header; read here, dequantized by transformers, or opened by llama.cpp.

Owns which of the first two reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from foresay.errors import ConfigError
from foresay.files import fingerprint
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.positions import refuse_unread
from foresay.models.gguf.shapes import dense_config
from foresay.models.gguf.tokenizer import tokenizer_of
from foresay.models.gguf.vocabulary import read_vocabulary, suppressed_tokens
from foresay.models.sources.base_models import names_of_values
from foresay.models.sources.by_transformers import arguments_of, read_weights
from foresay.models.sources.describing import OF_TRANSFORMERS, Description, dtype_of, keeps_format, rounded
from foresay.models.sources.generation_settings import UNCHANGED, GenerationSettings
from foresay.models.sources.llama_cpp import open_gguf
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import dequantize
from foresay.models.sources.source import Source
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.models.sources.wrapping import LoadedModel
from foresay.text.template_trial import check_template


@dataclass(frozen=True, slots=True)
class GgufFile(Source):
    """A GGUF file."""

    name: str
    header: GgufHeader
    """Checked by `check_values`."""

    @quiet_transformers()
    def describe(self, options: LoadOptions, *, for_decoding: bool = True) -> Description:
        """Return the description, see `Source`."""
        header, hardware, keeps = self.header, options.hardware, for_decoding and keeps_format(options)
        if not self._is_read_here(options):
            return Description(dense_config(header), dtype_of(options), rounded(options))
        refuse_unread(header, ours=True)
        config, in_blocks = config_of(header), keeps and hardware.on_cpu and not hardware.gpu_kernels
        gpu = options.computes_on if keeps and hardware.gpu_kernels and not self._is_mixed else None
        weights = "GGUF" if in_blocks or gpu is not None else rounded(options)
        dtype = torch.bfloat16 if in_blocks else dtype_of(options)
        return Description(config, dtype, weights, is_ours=True, in_blocks=in_blocks, gpu=gpu)

    @quiet_transformers()
    def tokenizer(self, options: LoadOptions, *, required: bool) -> Any:
        """Return the tokenizer, see `Source`; a file always needs one."""
        tokenizer = tokenizer_of(self.header)
        check_template(self.name, tokenizer)
        return tokenizer

    @quiet_transformers()
    def model(self, described: Description, options: LoadOptions) -> Any:
        """Return transformers' model, see `Source`."""
        header, config = self.header, described.config
        if described.is_ours:
            how: dict[str, Any] = {"in_blocks": described.in_blocks, "gpu": described.gpu}
            how |= {} if options.progress is None else {"progress": options.progress}
            model = model_of_file(header, config, described.dtype, **how).to(options.computes_on)
            config.name_or_path = str(header.path)
        else:
            how = arguments_of(options) | {"gguf_file": header.path.name}
            how |= dequantize() if options.quantization_config is None else {}
            model = read_weights(self.name, str(header.path.parent), described, options, **how)
        self._suppress(model.generation_config)
        return model

    def learned(self, config: Any) -> bytes:
        """Return the digest of the file."""
        return fingerprint(self.header.path)

    def stored_bytes(self) -> int:
        """Return the size of the file."""
        return self.header.path.stat().st_size

    def read_bytes(self) -> int | None:
        """Return the bytes that one pass reads, see `Source`."""
        return None if self.header.stated.get("expert_count") else self.stored_bytes()

    def base_names(self) -> Iterable[Any]:
        """Return the names in the file's values, see `Source`."""
        return names_of_values(self.header.values)

    @property
    def _is_mixed(self) -> bool:
        """True for an architecture whose layers have recurrent states."""
        return self.header.entry is not None and self.header.entry.mixed

    def _is_read_here(self, options: LoadOptions) -> bool:
        """Return False for architectures that transformers reads, and with options that need it.

        Raises ConfigError for such an option with a file that transformers does not read.
        """
        given = {name: one for name in OF_TRANSFORMERS if (one := getattr(options, name)) is not None}
        for name, value in given.items() if self._is_mixed else ():
            text = f"does not apply to GGUF files of the architecture {self.header.architecture}"
            raise ConfigError(f"{text}; load the model's transformers folder instead", param=name, value=value)
        return self.header.entry is not None and not given

    def _suppress(self, config: Any) -> Any:
        """Set the tokens that are never generated in a generation config, and return it."""
        if found := suppressed_tokens(self.header):
            config.suppress_tokens = found
        return config


class LlamaCppFile(GgufFile):
    """A GGUF file that llama.cpp computes."""

    def load(self, options: LoadOptions) -> LoadedModel:
        """Return the model. Raises as `open_gguf` and `tokenizer` do."""
        from transformers import GenerationConfig

        model: Any = open_gguf(self.header, options)
        model.learned = self.learned(None)
        tokenizer, vocabulary = self.tokenizer(options, required=True), read_vocabulary(self.header)
        assert vocabulary is not None  # else it has no tokenizer
        settings = UNCHANGED
        if suppressed_tokens(self.header):
            settings = GenerationSettings(self._suppress(GenerationConfig()))
        ends = frozenset(vocabulary.ends)
        return LoadedModel(self.name, model, tokenizer, ends, weights="llama.cpp", generation=settings)
