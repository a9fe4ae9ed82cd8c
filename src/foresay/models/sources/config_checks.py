"""The configuration of a model folder, checked before transformers makes anything from it.

Owns the size of the file, and the comparison of the model that it describes with the bytes there are: a larger model would be
filled with noise before transformers refuses it. The range of each value is config_sizes.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ModelLoadError
from foresay.models.gguf.header import shortened
from foresay.models.huggingface.config_sizes import find_invalid

_LARGEST_FILE = 16 << 20
"""Bytes of a config.json; the largest ones known have some hundred thousand."""


def check_config(folder: str, common: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for sizes and factors that no model has.

    folder: a folder or hub id. common: transformers' arguments for finding files. Raises what transformers raises for a file that
    is missing or no JSON.
    """
    from transformers import PreTrainedConfig

    path = Path(folder) / "config.json"
    if path.is_file() and path.stat().st_size > _LARGEST_FILE:
        raise ModelLoadError(f"{str(path)!r} has {path.stat().st_size} bytes; allowed are {_LARGEST_FILE}")
    values, _ = PreTrainedConfig.get_config_dict(folder, **common)
    wrong = find_invalid(values)
    if wrong is not None:
        shown = wrong.value if wrong.value == "an object" else shortened(wrong.value)
        raise ModelLoadError(
            f"{folder!r} cannot be read: {shortened(wrong.name)[1:-1]} in its config.json is {shown}; allowed is {wrong.allowed}"
        )


def check_size(folder: str, kind: Any, config: Any, *, trust_remote_code: bool) -> None:
    """Raise ModelLoadError for a configuration of far more weights than the files of a folder can hold.

    kind: transformers' Auto class. The model is made without memory of its own (on the meta device).
    """
    from transformers.initialization import no_init_weights

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
