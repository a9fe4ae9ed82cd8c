"""vLLM's arguments for foresay's settings: a draft that `foresay export`, `prune` or `distill` wrote, run by vLLM's own methods.

Owns the mapping from drafter expressions to vLLM's methods. A setting that vLLM does not support is an error that names it; none
is dropped silently. Imports nothing of vLLM.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foresay.checks import check_int
from foresay.errors import ConfigError, ModelNotFoundError, UnknownNameError, UnsupportedModelError
from foresay.lengths import ConstantLength
from foresay.models.sources.load_options import DTYPES, TRANSFORMERS, LoadOptions
from foresay.models.sources.packaged import ALIASES, converted
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import read_drafter, read_length
from foresay.spec.settings_file import Settings

METHODS = {"block": "dflash", "head": "eagle3", "model": "draft_model", "mtp": "mtp", "prompt_lookup": "ngram"}
"""Drafter -> the method of vLLM that runs it."""
_NGRAMS = {"max_ngram": ("prompt_lookup_max", 4), "min_ngram": ("prompt_lookup_min", 2)}
"""Setting of `prompt_lookup` -> (vLLM's name, default)."""
_ALLOWED = {
    "weights": (None, "auto", "bf16"),
    "activations": (None, "auto"),
    "backend": (None, TRANSFORMERS),
    "rule": (None, "speculative"),
}
"""Setting -> the values that vLLM's own quantization, kernels and rule replace without a change."""


def llm_arguments(settings: Settings, folder: str) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`. folder: path of the target's weights.

    Raises ConfigError or UnsupportedModelError for a drafter, length, rule or weight format that vLLM does not support.
    """
    for name, allowed in _ALLOWED.items():
        value = getattr(settings, name)
        if value not in allowed:
            raise ConfigError("does not apply to vLLM, which has its own; remove it", param=name, value=value)
    out: dict[str, Any] = {"model": folder}
    if settings.dtype is not None and settings.dtype != "auto":
        if settings.dtype not in DTYPES:
            raise UnknownNameError("dtype", settings.dtype, ["auto", *DTYPES])
        out["dtype"] = str(DTYPES[settings.dtype]).removeprefix("torch.")
    if settings.max_batch_size is not None:
        out["max_num_seqs"] = settings.max_batch_size
    call = parse(settings.drafter or "prompt_lookup")
    return out if call.name == "none" else {**out, "speculative_config": _speculative_config(call, settings.length)}


def _speculative_config(call: Call, length: str | int | None) -> dict[str, Any]:
    recipe = read_drafter(str(call))  # checks its settings
    if call.name not in METHODS:
        raise UnsupportedModelError(
            f"drafter={str(call)!r}: vLLM runs only {', '.join(METHODS)} or none; give one of them"
        )
    values = {key: value for key, value in call.values if key != "sample" or value}
    if call.name == "prompt_lookup":
        positional = zip(_NGRAMS, [value for key, value in call.values if key is None], strict=False)
        given = {**dict(positional), **{key: value for key, value in values.items() if key is not None}}
        out: dict[str, Any] = {theirs: given.get(ours, default) for ours, (theirs, default) in _NGRAMS.items()}
    elif values.keys() != (set() if call.name == "mtp" else {None}):
        others = ", ".join(str(key) for key in values if key is not None)
        raise UnsupportedModelError(f"{call}: vLLM supports no {others or 'name'} for a draft; remove it")
    elif call.name in ("head", "block") and str(values[None]) in ALIASES:
        text = "cannot be read by vLLM, which needs a folder; write it with foresay export, and give that folder"
        raise ConfigError(text, param="drafter", value=str(call))
    else:
        out = {} if call.name == "mtp" else {"model": str(values[None])}
    policy = None if length is None else read_length(length)
    if not isinstance(policy, ConstantLength | None):
        raise ConfigError("is not constant, as vLLM's lengths are; give a number", param="length", value=length)
    count = recipe.num_draft_tokens if policy is None else policy.num_draft_tokens
    return {"method": METHODS[call.name], **out, "num_speculative_tokens": check_int("length", count, 1)}


def model_folder(model: str) -> str:
    """Return a folder with configuration, tokenizer and safetensors, as vLLM needs it; a hub id is resolved in the hub's cache.

    Raises ModelNotFoundError if there is no such folder, and ConfigError for a single file.
    """
    if model in ALIASES:
        return str(converted(model, LoadOptions()))
    path = Path(model).expanduser()
    if path.is_file():
        raise ConfigError("is a file; vLLM reads a transformers folder, or an alias", param="model", value=model)
    if not path.is_dir():
        path = _downloaded(model)
    names = [file.name for file in path.iterdir()]
    for part, suffix in (("config.json", "config.json"), ("weights (*.safetensors)", ".safetensors")):
        if not any(name.endswith(suffix) for name in names):
            raise ModelNotFoundError(f"vLLM needs {part}, which {str(path)!r} does not contain; save the model there")
    return str(path)


def _downloaded(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # the hub's library may raise anything
        raise ModelNotFoundError(
            f"{model!r} is neither a folder nor in the hub's cache; get it with: hf download {model}"
        ) from error


def serve_command(arguments: Mapping[str, Any]) -> str:
    """Return the arguments as a command line of vLLM's server, one argument per line."""
    parts = [f"vllm serve {shlex.quote(str(arguments['model']))}"]
    for name, value in arguments.items():
        if name != "model":
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            parts.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    return " \\\n  ".join(parts)
