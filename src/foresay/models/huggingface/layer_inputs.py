"""Inputs of the layers besides hidden states (Gemma 4): of each token a vector for each layer.

The sum of an embedding of the token and a normalized projection of its hidden state before the first layer. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foresay.models.huggingface.linears import product_of
from foresay.models.layer import Norm

Multiply = Callable[[Any, torch.Tensor], torch.Tensor]
"""A function of a product and its input, [N, in] -> [N, out]."""


def _plainly(product: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = product(x)
    return out


class LayerInputs:
    """Computes the inputs of all layers for tokens, in float32."""

    def __init__(self, body: Any, norm: Norm) -> None:
        """body: transformers' decoder. norm: of a layer's projection."""
        self._embed, self._norm = body.embed_tokens_per_layer, norm
        self._project = product_of(body.per_layer_model_projection)
        self._factors = float(body.per_layer_model_projection_scale), float(body.per_layer_input_scale)

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor, multiply: Multiply = _plainly) -> torch.Tensor:
        """Return the inputs of all layers, one after the other: token_ids [N], hidden states x [N, H] -> [N, layers * width].

        multiply: computes a product.
        """
        projected = (multiply(self._project, x).float() * self._factors[0]).view(len(x), -1, len(self._norm.weight))
        normed = self._norm(projected).flatten(1)
        out: torch.Tensor = (normed + self._embed(token_ids).float()) * self._factors[1]
        return out


def layer_inputs_of(body: Any, norm: Any) -> LayerInputs | None:
    """Return the inputs of a decoder's layers; None if they have none. norm: reads a norm of the family."""
    if not getattr(body, "hidden_size_per_layer_input", 0):
        return None
    own: Norm = norm(body.per_layer_projection_norm)
    return LayerInputs(body, Norm(own.weight.float(), own.eps, own.from_one))
