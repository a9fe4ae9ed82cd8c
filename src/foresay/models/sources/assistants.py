"""A folder -> the weights of an assistant (Gemma 4), which are checked against its configuration before they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError, ModelLoadError
from foresay.models.drafts.fields import object_of
from foresay.models.gguf.header import shortened
from foresay.models.huggingface.config_sizes import find_invalid
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers
from foresay.tensor_files import StoredTensor, check_shapes, load_tensors, stored_tensors

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight")
"""Keys and values are the target's."""
_ORDER, _HEAD = "masked_embedding.token_ordering", "lm_head.weight"


def is_assistant(values: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of an assistant."""
    return values.get("model_type") in MODEL_TYPES


def load_assistant(folder: Path, values: Mapping[str, Any]) -> Any:
    """Return the AssistantModule of a folder.

    values: its config.json. Raises ModelLoadError for values out of range, and for weights that are missing, unknown or of
    another shape.
    """
    source = f"the assistant in {str(folder)!r}"
    with load_errors(str(folder), owned=False), quiet_transformers():
        module = _empty(values, source)
        stored = {
            name: one
            for name, one in stored_tensors(sorted(folder.glob("*.safetensors"))).items()
            if not _UNUSED.fullmatch(name)
        }
        if _HEAD in stored:
            with torch.device("meta"):
                module.lm_head = torch.nn.Linear(
                    int(module.config.hidden_size), int(module.config.vocab_size), bias=False
                )
        wanted = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
        order = {name: stored.pop(name) for name in wanted.keys() & {_ORDER} if name in stored}
        check_shapes(
            stored,
            {name: shape for name, shape in wanted.items() if name != _ORDER or not order},
            source,
            "its config.json gives",
        )
        module.load_state_dict(load_tensors(stored) | _permutation(order, wanted, source), assign=True)
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


def _permutation(
    order: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, torch.Tensor]:
    """Return the order of the tokens, checked: each token once."""
    for name, one in order.items():
        if one.shape != wanted[name] or one.dtype not in ("I64", "I32"):
            raise ModelLoadError(
                f"{name} of {source} is {one.dtype} {list(one.shape)}, and must be whole numbers {list(wanted[name])}"
            )
    found = {name: ids.long() for name, ids in load_tensors(order).items()}
    for name, ids in found.items():
        if not torch.equal(ids.sort().values, torch.arange(len(ids))):
            raise ModelLoadError(f"{name} of {source} must list each token once")
    return found
