"""Checks of a model folder's configuration, before transformers builds anything from it.

Owns the size of the file, and the comparison of the described model with the size of the weight files: transformers would fill a
larger model with noise before it refuses it. The range of each value is checked by config_sizes.py.
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
"""Maximum size of a config.json; the largest known ones have some hundred thousand bytes."""


def check_config(folder: str, common: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for sizes and factors outside the range of known models.

    folder: a folder or hub id. common: transformers' arguments for finding files. Raises transformers' errors for a missing file
    and for invalid JSON.
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
    """Raise ModelLoadError if a configuration describes far more weights than the folder's files can contain.

    kind: transformers' Auto class. The model is built on the meta device, without memory.
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
