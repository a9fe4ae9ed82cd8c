"""A model folder, or a repository of the hub, as the source of a model: its configuration, tokenizer and weights.

Owns transformers' arguments for its files, and the choice of quantized weights that are read in their own format.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ModelLoadError, ModelNotFoundError
from foresay.files import fingerprint
from foresay.models.sources import quantization
from foresay.models.sources.base_models import card_bases, has_experts, read_values
from foresay.models.sources.by_transformers import arguments_of, class_of, read_weights
from foresay.models.sources.config_checks import check_config, check_size, report_unknown, report_unread
from foresay.models.sources.describing import OF_TRANSFORMERS, Description, dtype_of, keeps_format, rounded
from foresay.models.sources.hub import cached_folder, is_offline, weight_bytes
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.multimodal import PREFIXES, language_model_of
from foresay.models.sources.packaged import ALIASES, converted, packaged_file
from foresay.models.sources.source import Source
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.text.template_trial import check_template
from foresay.text.tokenizer import check_usable

logger = logging.getLogger("foresay")

_HUB_TIMEOUT_S = 10.0
_TOKENIZER_FILES = ("tokenizer", "tokenization", "vocab", "spiece", "sentencepiece", "source.spm")


@dataclass(frozen=True, slots=True)
class Folder(Source):
    """A folder or a repository."""

    name: str
    folder: str
    """A local folder, or a hub id."""
    only_cached: bool = False
    """True if the hub cannot be reached but has the model in its cache."""

    @property
    def is_local(self) -> bool:
        """True unless the files are on the hub."""
        return Path(self.folder).is_dir()

    @quiet_transformers()
    def describe(self, options: LoadOptions, *, for_decoding: bool = True) -> Description:
        """Return the description, see `Source`; ModelLoadError also for statements that contradict each other."""
        whole = self._config(options)
        config = language_model_of(whole, self.name)
        dtype = dtype_of(options, config if for_decoding else None)
        found = Description(config, dtype, rounded(options), is_part=config is not whole)
        if isinstance(stated := getattr(config, "quantization_config", None), Mapping):
            if (kept := self._with_kept_weights(found, options, for_decoding=for_decoding)) is not None:
                return kept
            quantization.refuse_unknown(self.name, stated)
        return found

    @quiet_transformers()
    def tokenizer(self, options: LoadOptions, *, required: bool) -> Any:
        """Return the tokenizer, see `Source`. A required one is read alone: config.json, which names its class, is checked."""
        from transformers import AutoTokenizer

        if required and (Path(self.folder) / "config.json").is_file():
            check_config(self.folder, self._arguments(options))
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **self._arguments(options))
        except Exception:  # some tokenizers need no file
            if required or self._has_vocabulary:
                raise
            logger.warning(
                "%s has no tokenizer (tokenizer.json, tokenizer.model, ...): it takes token ids only", self.name
            )
            return None
        check_usable(tokenizer)
        check_template(self.name, tokenizer)
        report_unknown(self.name, tokenizer)
        return tokenizer

    @quiet_transformers()
    def model(self, described: Description, options: LoadOptions) -> Any:
        """Return transformers' model, see `Source`."""
        from transformers import PreTrainedConfig

        common = self._arguments(options)
        if self.is_local:
            kind, trusted = class_of(described.config), options.trust_remote_code
            check_size(self.folder, kind, described.config, trust_remote_code=trusted)
        how = common | ({"key_mapping": dict(PREFIXES)} if described.is_part else {})
        model = read_weights(self.name, self.folder, described, options, **how)
        values = PreTrainedConfig.get_config_dict(self.folder, **common)[0]
        report_unread(self.name, values.get("text_config", values) if described.is_part else values, model.config)
        return model

    def learned(self, config: Any) -> bytes:
        """Return the digest of the files, or the hub's name of their version."""
        return fingerprint(self.folder) if self.is_local else str(getattr(config, "_commit_hash", "")).encode()

    def stored_bytes(self) -> int:
        """Return the size of the weight files, see `Source`."""
        self._check(weights=True)
        here = self._here
        if here is None and is_offline():
            raise ModelNotFoundError(f"{self.name!r} is not in the hub's cache, and requests are off (HF_HUB_OFFLINE)")
        stored = 0 if here is None else weight_bytes(here, (".safetensors", ".bin"))
        if not stored and (self.is_local or is_offline()):
            raise ModelLoadError(f"{self.name!r} has no weights: it needs files that end in .safetensors")
        return stored

    def read_bytes(self) -> int | None:
        """Return the bytes that one pass reads, see `Source`."""
        here = self._here
        return None if here is None or has_experts(read_values(here)) else weight_bytes(here) or None

    def base_names(self) -> Iterator[Any]:
        """Return the names in the configuration and in the model card, see `Source`."""
        here = self._here
        if not self.is_local:
            yield self.folder
        elif here is not None:
            yield read_values(here).get("_name_or_path")
        if here is not None:
            yield from card_bases(here)

    def fetched(self, options: LoadOptions, *, weights: bool = True) -> Folder:
        """Return the source, see `Source`: a repository is requested once, and files are looked for in a local folder."""
        self._check(weights=weights)
        return self if self.is_local else replace(self, only_cached=_is_only_cached(self.folder, options))

    def _check(self, *, weights: bool) -> None:
        """Raise ModelNotFoundError for a local folder without a configuration, or, without `weights`, without a tokenizer."""
        names = [file.name for file in Path(self.folder).iterdir()] if self.is_local else None
        if weights and names is not None and "config.json" not in names:
            raise ModelNotFoundError(f"the folder {self.name!r} has no config.json; is it a transformers model folder?")
        if not weights and names is not None and not any(name.startswith(_TOKENIZER_FILES) for name in names):
            raise ModelNotFoundError(
                f"the folder {self.name!r} has no tokenizer (tokenizer.json, tokenizer.model, ...)"
            )

    @property
    def _here(self) -> Path | None:
        """The folder of its files on this machine."""
        return Path(self.folder) if self.is_local else cached_folder(self.folder)

    @property
    def _has_vocabulary(self) -> bool:
        """False for a local folder without a file that may contain a tokenizer's vocabulary."""
        names = [file.name for file in Path(self.folder).iterdir()] if self.is_local else ["tokenizer.json"]
        described = ("tokenizer_config", "chat_template", "special_tokens_map")
        return any(name.startswith(_TOKENIZER_FILES) and not name.startswith(described) for name in names)

    def _arguments(self, options: LoadOptions) -> dict[str, Any]:
        """Return the arguments by which every from_pretrained of transformers finds the files."""
        return arguments_of(options) | ({"local_files_only": True} if self.only_cached else {})

    def _config(self, options: LoadOptions) -> Any:
        """Return transformers' configuration, with the quantization that the folder states anywhere."""
        from transformers import AutoConfig

        common = self._arguments(options)
        stated = quantization.stated_by(self.folder, check_config(self.folder, common), common)
        config = AutoConfig.from_pretrained(self.folder, **common)
        if stated is not None:
            config.quantization_config = stated
        return config

    def _with_kept_weights(self, found: Description, options: LoadOptions, *, for_decoding: bool) -> Description | None:
        """Return the description of a folder whose quantized weights we read; None for others.

        They are decoded in their format if there are kernels for it; otherwise they become numbers.
        """
        if any(getattr(options, name) is not None for name in OF_TRANSFORMERS):
            return None
        from foresay.models.sources import mxfp4, quantized_forms, quantized_layers

        hardware, device, config = options.hardware, options.computes_on, found.config
        keeps = for_decoding and keeps_format(options)
        if keeps and hardware.cpu_kernels and not hardware.gpu_kernels:
            found = replace(found, dtype=torch.bfloat16)
        if keeps and mxfp4.is_stored(config, device):
            return replace(found, config=mxfp4.kept_experts(config, device), weights="MXFP4")
        form = quantized_forms.form_of(config) if hardware.on_cpu or hardware.gpu_kernels else None
        if form is None:
            return None
        in_blocks = keeps and (hardware.gpu_kernels or (hardware.cpu_kernels and not form.is_float))
        how = {"in_blocks": in_blocks, "is_trained": not for_decoding, "is_part": found.is_part}
        own = quantized_layers.config_for(config, form, self.name, device, **how)
        return replace(found, config=own, weights=form.label if in_blocks else found.weights)


class PackagedFolder(Folder):
    """The dequantized copy of an alias, made on first use."""

    is_conversion = True

    def fetched(self, options: LoadOptions, *, weights: bool = True) -> Folder:
        """Return the source once the copy is here. Raises as `converted` does."""
        converted(self.name, options)
        return self

    def stored_bytes(self) -> int:
        """Return the size of the file that is copied. Raises ModelNotFoundError if its package is not installed."""
        return packaged_file(self.name).stat().st_size

    def read_bytes(self) -> int | None:
        """Return the size of the file that is copied; None if its package is not installed."""
        try:
            return self.stored_bytes()
        except ModelNotFoundError:
            return None

    def base_names(self) -> Iterator[Any]:
        """Return the model's name on the hub."""
        yield ALIASES[self.name].hub_id


def _is_only_cached(name: str, options: LoadOptions) -> bool:
    """Request a model's configuration from the hub once, with a short timeout; True if only the hub's cache has it.

    transformers itself would retry every file for most of a minute. An error reply of the hub is left to transformers to report.
    Raises ModelNotFoundError if neither has it.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=options.revision), timeout=_HUB_TIMEOUT_S)
    except (HfHubHTTPError, ValueError):
        return False
    except Exception as error:  # any exception of the network library
        if isinstance(try_to_load_from_cache(name, "config.json", revision=options.revision), str):
            return True
        raise ModelNotFoundError(
            f"{name!r} is neither a file nor a folder here, and the hub did not give it: {error} (check your network)"
        ) from error
    return False
