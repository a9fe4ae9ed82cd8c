"""Checks of a model folder's config.json and tokenizer_config.json, before transformers builds weights from them.

Owns the size of the file, the fields that no class reads, the recognition of drafts that are no language models, and the
comparison of the described model with the size of the weight files: transformers would fill a larger model with noise before it
refuses it. The range of each value is checked by config_sizes.py.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ModelLoadError
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.kinds import KINDS
from foresay.models.families.stated import shortened
from foresay.models.huggingface.config_sizes import find_invalid

logger = logging.getLogger("foresay")

CONFIG_FIELDS: dict[str, str] = {
    "model_type": "chooses the class",
    "auto_map": "read with trust_remote_code",
    "quantization_config": "read by transformers",
    "num_nextn_predict_layers": "read: the number of multi-token-prediction layers",
    "mtp_num_hidden_layers": "read: the number of multi-token-prediction layers",
    "torch_dtype": "read: the dtype of the weights",
    "tokenizer_class": "read by transformers",
    "attn_implementation": "foresay computes attention itself",
    "use_cache": "foresay always keeps keys and values",
    "pad_token_id": "rows have no padding",
    "sep_token_id": "a special token of encoders",
    "task_specific_params": "settings of pipelines",
    "finetuning_task": "the origin of the weights",
    "prefix": "read by pipelines",
    "unsloth_version": "the program that wrote the file",
    "unsloth_fixed": "the program that wrote the file",
    "transformers.js_config": "read by another program",
}
"""Fields of config.json that configuration classes do not declare, and what becomes of them."""
TOKENIZER_FIELDS: dict[str, str] = {
    **dict.fromkeys(
        (
            "additional_special_tokens",
            "extra_special_tokens",
            "model_specific_special_tokens",
            "added_tokens_decoder",
            "add_bos_token",
            "add_eos_token",
            "add_prefix_space",
            "split_special_tokens",
            "chat_template",
            "tokenizer_class",
            "tokenizer_file",
            "legacy",
            "from_slow",
            "sp_model_kwargs",
            "use_fast",
            "fix_mistral_regex",
        ),
        "read by transformers",
    ),
    "model_max_length": "the model's context is the limit",
    "max_length": "the model's context is the limit",
    "max_len": "the model's context is the limit",
    **dict.fromkeys(("truncation", "truncation_side", "truncation_strategy", "stride"), "prompts are never truncated"),
    **dict.fromkeys(("padding", "padding_side", "pad_to_multiple_of", "pad_token_type_id"), "rows have no padding"),
    **dict.fromkeys(
        ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"),
        "texts are returned as generated",
    ),
    "spaces_between_special_tokens": "texts are returned as generated",
    "errors": "bytes that are no text become U+FFFD",
    "response_schema": "replies are read by foresay's tool formats",
    "response_template": "replies are read by foresay's tool formats",
    "chat_control_tokens": "special tokens are found in the vocabulary",
    "use_default_system_prompt": "read by templates of older versions only",
    **dict.fromkeys(("model_input_names", "return_tensors", "return_token_type_ids"), "only ids are used"),
    **dict.fromkeys(
        ("name_or_path", "special_tokens_map_file", "auto_map", "processor_class"), "the origin of the file"
    ),
    **dict.fromkeys(("backend", "is_local", "local_files_only", "files_loaded", "verbose"), "how the file was read"),
    **dict.fromkeys(("device_map", "trust_remote_code", "revision", "gguf_file"), "arguments of loading"),
}
"""Fields of tokenizer_config.json that tokenizer classes do not declare, and what becomes of them."""
_LARGEST_FILE = 16 << 20
"""Maximum size of a config.json; the largest known ones have some hundred thousand bytes."""


def check_config(folder: str, common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a config.json. Raises ModelLoadError for sizes and factors outside the range of known models.

    folder: a folder or hub id. common: transformers' arguments for finding files. Raises transformers' errors for a missing file
    and for invalid JSON.
    """
    from transformers import PreTrainedConfig
    from transformers.utils import is_peft_available

    path = Path(folder) / "config.json"
    if path.is_file() and path.stat().st_size > _LARGEST_FILE:
        raise ModelLoadError(f"{str(path)!r} has {path.stat().st_size} bytes; allowed are {_LARGEST_FILE}")
    if (Path(folder) / "adapter_config.json").is_file() and not is_peft_available():
        raise ModelLoadError(
            f"{folder!r} has an adapter (adapter_config.json), which would not be applied; merge it into the weights, remove the "
            "file if it is merged, or install peft"
        )
    values: Mapping[str, Any] = PreTrainedConfig.get_config_dict(folder, **common)[0]
    _refuse_draft(folder, values)
    wrong = find_invalid(values)
    if wrong is not None:
        shown = wrong.value if wrong.value == "an object" else shortened(wrong.value)
        raise ModelLoadError(
            f"{folder!r} cannot be read: {shortened(wrong.name)[1:-1]} in its config.json is {shown}; allowed is {wrong.allowed}"
        )
    return values


def check_size(folder: str, kind: Any, config: Any, *, trust_remote_code: bool) -> None:
    """Raise ModelLoadError if a configuration describes far more weights than the folder's files can contain.

    kind: transformers' Auto class. The model is built on the meta device, without memory.
    """
    from transformers.initialization import no_init_weights

    if not any(one.name.endswith((".safetensors", ".bin")) for one in Path(folder).iterdir()):
        raise ModelLoadError(f"{folder!r} has no weights: it needs files that end in .safetensors")
    stored = sum(one.stat().st_size for one in Path(folder).iterdir() if one.is_file())
    at_most = stored * (
        8 if getattr(config, "quantization_config", None) else 1
    )  # a weight takes a bit, or else a byte
    with torch.device("meta"), no_init_weights():
        wanted = sum(one.numel() for one in kind.from_config(config, trust_remote_code=trust_remote_code).parameters())
    if wanted > at_most:
        raise ModelLoadError(
            f"{folder!r} cannot be read: its config.json describes a model of {wanted} weights, and its files have {stored} bytes"
        )


def _refuse_draft(folder: str, values: Mapping[str, Any]) -> None:
    """Raise ModelLoadError, which names the drafter, for the config.json of a draft that is no language model."""
    kinds = [str(values.get("model_type")), *map(str, values.get("architectures") or ())]
    kind = next((one for one in KINDS if one.describes(values)), HeadConfig)
    if kind is not HeadConfig:
        found, drafter = f"a {kind.NOUN}", f"{kind.DRAFTER}({folder})"
    elif "eagle_config" in values or "speculators_model_type" in values or any("eagle" in one.lower() for one in kinds):
        found, drafter = "a draft head", f"head({folder})"
    elif any(one.endswith("_assistant") for one in kinds):
        found, drafter = "an assistant", f"head({folder})"
    elif any(re.search(r"(_mtp|MTP|MTPModel)$", one) for one in kinds):
        found, drafter = "a multi-token-prediction layer, which is a part of its target's checkpoint", "mtp"
    else:
        return
    raise ModelLoadError(f"{folder!r} is {found}, not a language model; load its target with drafter={drafter!r}")


def report_unread(name: str, values: Mapping[str, Any], config: Any) -> None:
    """Log the fields of a config.json that its class neither declares nor reads: transformers keeps and ignores them.

    values: the file. config: transformers' object of it.
    """
    if found := sorted(set(_unread(values, config))):
        kind = type(config).__name__
        logger.info(
            "fields in the config.json of %s that %s does not have are ignored: %s", name, kind, ", ".join(found)
        )


def _unread(values: Mapping[str, Any], config: Any) -> Iterator[str]:
    declared = {*inspect.signature(type(config)).parameters, *config.attribute_map, *config.sub_configs, *CONFIG_FIELDS}
    kept = [name for name in values if name in vars(config) and name not in declared and name[:1] != "_"]
    module = type(config).__module__
    code = [sys.modules.get(one) for one in (module, module.replace("configuration_", "modeling_"))] if kept else []
    source = "".join(inspect.getsource(one) for one in code if one is not None)
    yield from (name for name in kept if not re.search(rf"\b{re.escape(name)}\b", source))
    for part in config.sub_configs:
        inner, of_part = getattr(config, part, None), values.get(part)
        if isinstance(of_part, Mapping) and hasattr(inner, "attribute_map"):
            yield from (f"{part}.{name}" for name in _unread(of_part, inner))


def report_unknown(name: str, tokenizer: Any) -> None:
    """Log the fields of a tokenizer_config.json that are neither read nor known to have no effect."""
    declared = {*inspect.signature(type(tokenizer)).parameters, *TOKENIZER_FIELDS}
    stored = getattr(tokenizer, "init_kwargs", {})
    found = sorted(
        key for key in stored if key not in declared and not key.endswith(("_token", "_file")) and key[:1] != "_"
    )
    if found:
        logger.warning("unknown fields in the tokenizer_config.json of %s are ignored: %s", name, ", ".join(found))
