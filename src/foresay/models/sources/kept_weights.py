"""Folders of which some weights stay as they are stored: the base of readers that transformers calls instead of its own.

A reader is chosen by the configuration that `kept` returns. Owns what all of them share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from foresay.errors import ModelLoadError


class _Values(QuantizationConfigMixin):  # type: ignore[misc]
    """The values that a reader needs of a configuration."""

    def __init__(self, quant_method: str, **given: Any) -> None:
        self.quant_method, self.given = quant_method, given


def reader(method: str) -> Callable[[type[Reader]], type[Reader]]:
    """Return a decorator that registers a reader under the name of a method."""

    def register(found: type[Reader]) -> type[Reader]:
        register_quantization_config(method)(_Values)
        register_quantizer(method)(found)
        return found

    return register


def kept(config: Any, method: str, **values: Any) -> Any:
    """Return a copy of a configuration with which transformers calls a reader. values: for the reader."""
    own = copy.deepcopy(config)
    own.quantization_config = {"quant_method": method, **values}
    return own


class Reader(HfQuantizer):  # type: ignore[misc]
    """A reader of weights, in transformers' terms a quantizer."""

    is_trainable = False

    def __init__(self, quantization_config: Any, **given: Any) -> None:
        super().__init__(quantization_config, **given)
        self.problem = ""
        """The first that was found; transformers would log an exception of an operation, and go on."""

    def is_serializable(self) -> bool:
        """Return False: such models are decoded only."""
        return False

    def refuse(self, model: Any) -> None:
        """Raise ModelLoadError if there is a problem."""
        if self.problem:
            raise ModelLoadError(f"{str(model.config.name_or_path)!r} cannot be read: {self.problem}")
