"""A folder or GGUF file -> the weights of an assistant (Gemma 4), checked against its configuration before they are read.

A GGUF file has the values and names of a Gemma 4, and those of the projections.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError, ModelLoadError
from foresay.models.drafts.fields import object_of
from foresay.models.drafts.files import Read, T
from foresay.models.families.stated import shortened
from foresay.models.gguf.configs import fields_of
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.keys import check_keys
from foresay.models.gguf.names import gguf_namer
from foresay.models.gguf.positions import DIVISORS
from foresay.models.gguf.values import ASSISTANT, check_values, checked_header, invalid_value
from foresay.models.huggingface.config_sizes import find_invalid
from foresay.models.sources.gguf_drafts import DraftTensor, read_tensors
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers
from foresay.tensor_files import check_shapes, load_tensors, stored_tensors

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight")
"""Keys and values are the target's."""
_ORDER, _HEAD = "masked_embedding.token_ordering", "lm_head.weight"
_GGUF_NAMES = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    _HEAD: "output.weight",
}
"""Names of weights that a Gemma 4 does not have -> those in GGUF files."""
_LEFT_OUT = ("masked_embd_centroids.weight", "masked_embd_ordering", DIVISORS)
"""Tensors of GGUF files: groups of tokens, of which llama.cpp chooses none and states no number; and divisors of positions, which
are a part of the configuration."""
_OWN = ("embedding_length_out", "nextn_predict_layers")
"""Values of a file that a Gemma 4's does not have."""
_TARGET = "gemma4"


def is_assistant(values: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of an assistant."""
    return values.get("model_type") in MODEL_TYPES


def load_assistant(folder: Path, values: Mapping[str, Any]) -> Any:
    """Return the AssistantModule of a folder.

    values: its config.json. Raises ModelLoadError for values out of range, and for weights that are missing, unknown or of
    another shape.
    """
    with load_errors(str(folder), owned=False), quiet_transformers():
        stored = stored_tensors(sorted(folder.glob("*.safetensors")))
        return _assembled(values, stored, load_tensors, f"the assistant in {str(folder)!r}")


def load_gguf_assistant(path: Path) -> Any:
    """Return the AssistantModule of a GGUF file; None for a file of another architecture. Raises as `load_assistant` does."""
    header = checked_header(path)
    if header.architecture != ASSISTANT:
        return None
    source, prefix = f"the assistant in {str(path)!r}", f"{ASSISTANT}."
    whole = _as_gemma4(header, prefix)
    if header.values.get(key := f"{prefix}{_OWN[1]}") != header.values.get(f"{prefix}block_count"):
        raise invalid_value(header, key, "the number of layers")
    with load_errors(str(path), owned=False), quiet_transformers():
        try:
            check_keys(whole, ("general", "model"))
            check_values(whole)
            fields = fields_of(whole)
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(f" {_TARGET}.", f" {prefix}")) from None
        names = gguf_namer(whole, int(fields["num_hidden_layers"]))
        width = header.values.get(f"{prefix}{_OWN[0]}")
        values = {"model_type": MODEL_TYPES[0], "text_config": fields, "backbone_hidden_size": width}
        with torch.device("meta"):
            own = {*_empty(values, source).state_dict(), _HEAD}
        named = {_GGUF_NAMES.get(name) or names(name): name for name in own}
        stored = {
            named.get(name, name): DraftTensor(header, name, one)
            for name, one in header.tensors.items()
            if name not in _LEFT_OUT
        }
        return _assembled(values, stored, read_tensors, source)


def _as_gemma4(header: GgufHeader, prefix: str) -> GgufHeader:
    """Return the header of a Gemma 4 with the same layers."""

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        own = {f"{prefix}{name}" for name in _OWN}
        return {
            f"{_TARGET}.{key.removeprefix(prefix)}" if key.startswith(prefix) else key: one
            for key, one in values.items()
            if key not in own
        }

    values = {**renamed(header.values), "general.architecture": _TARGET}
    return dataclasses.replace(header, values=values, lists=renamed(header.lists))


def _assembled(values: Mapping[str, Any], tensors: Mapping[str, T], read: Read[T], source: str) -> Any:
    """Return the AssistantModule of a config.json's values and stored tensors; see drafts/files.py."""
    module = _empty(values, source)
    stored = {name: one for name, one in tensors.items() if not _UNUSED.fullmatch(name)}
    if _HEAD in stored:
        with torch.device("meta"):
            module.lm_head = torch.nn.Linear(int(module.config.hidden_size), int(module.config.vocab_size), bias=False)
    wanted = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    order = stored.pop(_ORDER, None) if _ORDER in wanted else None
    ids = {} if order is None else {_ORDER: _permutation(order, read, wanted.pop(_ORDER), source)}
    check_shapes(stored, wanted, source, "its config.json gives")
    module.load_state_dict(read(stored) | ids, assign=True)
    module.finish()
    return module


def _empty(values: Mapping[str, Any], source: str) -> Any:
    """Return the module of a config.json without weights."""
    from foresay.models.drafts.assistant import AssistantModule

    if (wrong := find_invalid(values)) is not None:
        raise ModelLoadError(
            f"{source} cannot be read: {wrong.name} is {shortened(wrong.value)}; allowed is {wrong.allowed}"
        )
    try:
        text = object_of(values, "text_config")
        width = check_int("backbone_hidden_size", values.get("backbone_hidden_size"), 1, 1 << 16)
        candidates = None
        if check_flag("use_ordered_embeddings", values.get("use_ordered_embeddings", False)):
            groups = check_int("num_centroids", values.get("num_centroids", 2048), 1, 1 << 20)
            candidates = (
                groups,
                check_int("centroid_intermediate_top_k", values.get("centroid_intermediate_top_k", 32), 1, groups),
            )
            if int(text.get("vocab_size") or 0) % groups:
                raise ConfigError(f"num_centroids is {groups}, which does not divide the vocabulary")
    except ConfigError as error:
        raise ModelLoadError(f"{source} cannot be read: {error}") from None
    with torch.device("meta"):
        return AssistantModule(str(values["model_type"]), text, width, candidates)


def _permutation(order: T, read: Read[T], shape: tuple[int, ...], source: str) -> torch.Tensor:
    """Return the order of the tokens, checked: each token once."""
    if order.shape != shape or order.dtype not in ("I64", "I32"):
        raise ModelLoadError(
            f"{_ORDER} of {source} is {order.dtype} {list(order.shape)}, and must be whole numbers {list(shape)}"
        )
    ids = read({_ORDER: order})[_ORDER].long()
    if not torch.equal(ids.sort().values, torch.arange(len(ids))):
        raise ModelLoadError(f"{_ORDER} of {source} must list each token once")
    return ids
