"""New values for the weights of a model that a caller gave, between rounds of generation (reinforcement learning)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from foresay.errors import ConfigError
from foresay.models.huggingface.linears import has_products


def update(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Copy tensors into a model's weights, in place, and return their number. weights: transformers' names and values.

    Raises ConfigError for weights that are packed, for unknown names, and for other shapes and numbers that are not finite; those
    before a wrong one are copied.
    """
    module, count = getattr(model, "model", None), 0
    if not isinstance(module, nn.Module) or has_products(module):
        text = (
            "are packed for the kernels; load a model object in place of a name, whose weights are read where they are"
        )
        raise ConfigError(text, param="weights")
    for name, tensor in weights:
        try:
            weight = module.get_parameter(name)
        except AttributeError:
            raise ConfigError("has no weight of this name in the model", param="weights", value=name) from None
        if tensor.shape != weight.shape:
            text = f"has shape {list(tensor.shape)}, and the model's has {list(weight.shape)}"
            raise ConfigError(text, param="weights", value=name)
        if not bool(tensor.isfinite().all()):
            raise ConfigError("has numbers that are not finite", param="weights", value=name)
        with torch.no_grad():
            weight.copy_(tensor)
        count += 1
    model.learned = b""
    return count
