"""vLLM's arguments for foresay's settings: its speculative configuration, including ours.

Owns the mapping from drafter expressions to vLLM's methods. A setting that vLLM does not support is an error that names it; none
is dropped silently. Imports nothing of vLLM.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from foresay.checks import check_int
from foresay.errors import ConfigError, UnknownNameError, UnsupportedModelError
from foresay.integrations.vllm import check_settings
from foresay.lengths import ConstantLength
from foresay.models.sources.load_options import DTYPES, TRANSFORMERS
from foresay.models.sources.packaged import ALIASES
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import read_drafter, read_length
from foresay.spec.settings_file import Settings

PROPOSER = "foresay.integrations.vllm.Proposer"
"""Import path of the class for vLLM."""
_OWN = {"head": "eagle3", "model": "draft_model"}
"""Drafters with weights that vLLM runs itself, and its methods for them."""


def llm_arguments(settings: Settings, folder: str) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`. folder: path of the target's weights.

    Raises ConfigError or UnsupportedModelError for a drafter, length, rule or weight format that vLLM does not support.
    """
    drafter = settings.drafter or "suffix"
    if settings.weights not in (None, "auto", "bf16"):
        raise ConfigError(f"weights={settings.weights!r}: vLLM has its own quantization options; remove it")
    if settings.activations not in (None, "auto"):
        raise ConfigError(f"activations={settings.activations!r}: vLLM has its own kernels; remove it")
    if settings.backend not in (None, TRANSFORMERS):
        raise ConfigError(f"backend={settings.backend!r}: vLLM runs the model itself; remove it")
    out: dict[str, Any] = {"model": folder}
    if settings.dtype is not None and settings.dtype != "auto":
        if settings.dtype not in DTYPES:
            raise UnknownNameError("dtype", settings.dtype, ["auto", *DTYPES])
        out["dtype"] = str(DTYPES[settings.dtype]).removeprefix("torch.")
    if settings.max_batch_size is not None:
        out["max_num_seqs"] = settings.max_batch_size
    if drafter == "none":
        return out
    call = parse(drafter)
    if call.name in _OWN:
        out["speculative_config"] = _own_method(call, settings)
    else:
        out |= _ngram_method(drafter, settings)
    if settings.rule not in (None, "speculative"):
        raise ConfigError(
            f"rule={settings.rule!r}: vLLM accepts drafts by its own rule, speculative sampling; remove it"
        )
    return out


def _constant(length: str | int | None) -> int | None:
    """Return the value of a constant length, or None for another policy."""
    policy = None if length is None else read_length(length)
    return policy.num_draft_tokens if isinstance(policy, ConstantLength) else None


def _ngram_method(drafter: str, settings: Settings) -> dict[str, Any]:
    chosen = check_settings(
        {"drafter": drafter} | ({} if settings.length is None else {"length": str(settings.length)})
    )
    max_draft_tokens = getattr(read_length(chosen["length"]), "high", read_drafter(drafter).num_draft_tokens)
    constant = _constant(settings.length)
    if constant is not None:
        max_draft_tokens = constant
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": check_int("length", max_draft_tokens, 1),
        },
        "additional_config": {"foresay": chosen},
    }


def _own_method(call: Call, settings: Settings) -> dict[str, Any]:
    """Return the configuration of a head or a draft model, which vLLM loads and runs itself at a constant length."""
    recipe = read_drafter(str(call))  # checks its settings
    names = [value for key, value in call.values if key is None]
    others = [str(key) for key, value in call.values if key is not None and (key != "sample" or value)]
    if others or len(names) != 1:
        raise UnsupportedModelError(f"{call}: vLLM supports no {', '.join(others) or 'name'} for a draft; remove it")
    if call.name == "head" and str(names[0]) in ALIASES:
        raise ConfigError(
            f"{call}: vLLM reads a head from a folder; write it with foresay export, and give that folder"
        )
    constant = _constant(settings.length)
    if settings.length is not None and constant is None:
        raise ConfigError(f"length={settings.length!r}: vLLM runs draft models at a constant length; give a number")
    max_draft_tokens = recipe.num_draft_tokens if constant is None else check_int("length", constant, 1)
    return {"method": _OWN[call.name], "model": str(names[0]), "num_speculative_tokens": max_draft_tokens}


def serve_command(arguments: Mapping[str, Any]) -> str:
    """Return the arguments as a command line of vLLM's server, one argument per line."""
    parts = [f"vllm serve {shlex.quote(str(arguments['model']))}"]
    for name, value in arguments.items():
        if name != "model":
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            parts.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    return " \\\n  ".join(parts)
