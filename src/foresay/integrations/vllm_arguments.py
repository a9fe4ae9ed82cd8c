"""What vLLM must be told to decode as foresay's settings say: its speculative configuration, and ours inside of it.

Owns which of vLLM's methods a drafter's expression comes to. What vLLM cannot do is an error that names it; nothing is left out
silently. Imports nothing of vLLM.
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
from foresay.methods.expressions import Call, parse
from foresay.methods.recipes import read_drafter, read_length
from foresay.methods.settings_file import Settings
from foresay.models.sources.load_options import DTYPES, TRANSFORMERS
from foresay.models.sources.packaged import ALIASES

PROPOSER = "foresay.integrations.vllm.Proposer"
"""Where vLLM finds the class."""
_OWN = {"head": "eagle3", "model": "draft_model"}
"""Drafters with weights that vLLM runs itself, and its methods for them."""


def llm_arguments(settings: Settings, folder: str) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`. folder: where it finds the target's weights.

    Raises ConfigError or UnsupportedModelError for a drafter, length, rule or weight format that vLLM cannot have.
    """
    drafter = settings.drafter or "suffix"
    if settings.weights not in (None, "auto", "bf16"):
        raise ConfigError(f"weights={settings.weights!r}: vLLM rounds weights in its own ways; leave it out")
    if settings.backend not in (None, TRANSFORMERS):
        raise ConfigError(f"backend={settings.backend!r}: vLLM computes passes itself; leave it out")
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
        out |= _looked_up(drafter, settings)
    if settings.rule not in (None, "speculative"):
        raise ConfigError(
            f"rule={settings.rule!r}: vLLM accepts drafts by a rule of its own, which is speculative sampling"
        )
    return out


def _constant(length: str | int | None) -> int | None:
    """A length that is a number."""
    policy = None if length is None else read_length(length)
    return policy.num_draft_tokens if isinstance(policy, ConstantLength) else None


def _looked_up(drafter: str, settings: Settings) -> dict[str, Any]:
    chosen = check_settings(
        {"drafter": drafter} | ({} if settings.length is None else {"length": str(settings.length)})
    )
    most = getattr(read_length(chosen["length"]), "high", read_drafter(drafter).num_draft_tokens)
    constant = _constant(settings.length)
    if constant is not None:
        most = constant
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": check_int("length", most, 1),
        },
        "additional_config": {"foresay": chosen},
    }


def _own_method(call: Call, settings: Settings) -> dict[str, Any]:
    """A head or a draft model, which vLLM loads by its folder and drafts with itself, at one length."""
    recipe = read_drafter(str(call))  # its settings are checked
    names = [value for key, value in call.values if key is None]
    others = [str(key) for key, value in call.values if key is not None and (key != "sample" or value)]
    if others or len(names) != 1:
        raise UnsupportedModelError(f"{call}: vLLM has no {', '.join(others) or 'name'} for a draft; leave it out")
    if call.name == "head" and str(names[0]) in ALIASES:
        raise ConfigError(f"{call}: vLLM reads a head from a folder; write it with foresay export, and name that")
    constant = _constant(settings.length)
    if settings.length is not None and constant is None:
        raise ConfigError(f"length={settings.length!r}: vLLM drafts with weights at one length; give a number")
    most = recipe.num_draft_tokens if constant is None else check_int("length", constant, 1)
    return {"method": _OWN[call.name], "model": str(names[0]), "num_speculative_tokens": most}


def serve_command(arguments: Mapping[str, Any]) -> str:
    """The same as a command line of vLLM's server, a line for each argument."""
    parts = [f"vllm serve {shlex.quote(str(arguments['model']))}"]
    for name, value in arguments.items():
        if name != "model":
            said = json.dumps(value) if isinstance(value, dict) else str(value)
            parts.append(f"--{name.replace('_', '-')} {shlex.quote(said)}")
    return " \\\n  ".join(parts)
