"""Parts of the trainable modules of drafts, with parameters named as in their files. Knows no loss and no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.errors import ConfigError, UnknownNameError
from foresay.models.layer import Convolution

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, [1, P, dim] each."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotated queries and keys, and values, [B, heads or key heads, P, dim] each -> attended values, [B, heads, P, dim]."""


class RMSNorm(nn.RMSNorm):
    """A norm in the precision of its input: PyTorch computes one of two precisions slowly, and warns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., D]."""
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DraftModule(nn.Module):
    """Base of the modules: the parts of every draft on the target's hidden states. L of them are read, K tokens drafted."""

    norm: RMSNorm
    """The norm before the output layer."""
    FLAT: ClassVar[tuple[str, ...]] = ()
    """Parameters that publishers store with other numbers of dimensions of size one."""

    def __init__(self, layer: Mapping[str, Any], inputs: int) -> None:
        """layer: fields of a LlamaConfig. inputs: size of the target's hidden states that are read, together."""
        super().__init__()
        self.shape = layer_shape(layer)
        self.fc = nn.Linear(inputs, self.shape.hidden_size, bias=False)
        self.lm_head: nn.Linear | None = None
        """[K, D]; None to use the target's rows of the tokens that it can draft."""
        self.embed_tokens: nn.Embedding | None = None
        """[V, D]; None to use the target's."""
        self.rotary = rotary_embedding(layer)


class Projections(nn.Module):
    """The matrices of an attention layer, and the split of their results into heads."""

    def __init__(self, shape: LlamaConfig, inputs: int, *, normalizes: bool = False) -> None:
        """inputs: size of its inputs. normalizes: True for norms of queries and keys."""
        super().__init__()
        width, dim = shape.hidden_size, int(shape.head_dim or shape.hidden_size // shape.num_attention_heads)
        self.heads, self.key_heads, self.dim = shape.num_attention_heads, shape.num_key_value_heads, dim
        self.q_proj = nn.Linear(inputs, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.key_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.key_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, shape.rms_norm_eps) if normalizes else None
        self.k_norm = RMSNorm(dim, shape.rms_norm_eps) if normalizes else None

    def forward(self, x: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """Return the output [B, P, D] of attention from x [B, P, inputs]."""
        attended = attend(self.queries(x, rotary), self.keys(x, rotary), self.values(x))
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def queries(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Return the rotated queries of x [B, P, inputs], [B, heads, P, dim]."""
        return self._turned(self.q_proj(x), self.heads, self.q_norm, rotary)

    def keys(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Return the rotated keys of x, [B, key heads, P, dim]."""
        return self._turned(self.k_proj(x), self.key_heads, self.k_norm, rotary)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of x, [B, key heads, P, dim]."""
        return self._split(self.v_proj(x), self.key_heads)

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, self.dim).transpose(1, 2)

    def _turned(self, x: torch.Tensor, heads: int, norm: nn.RMSNorm | None, rotary: Rotary) -> torch.Tensor:
        split = self._split(x, heads)
        split = split if norm is None else norm(split)
        return rotate(split, *(one[:, None].to(split.dtype) for one in rotary))


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACT2FN[shape.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [..., D] to the same shape."""
        out: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class DynamicConvolution(nn.Module):
    """The convolutions around a sublayer; see Convolution. They start as the identity."""

    def __init__(self, width: int, taps: int, size: int) -> None:
        """size: channels of a group."""
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // size), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def convolution(self) -> Convolution:
        """Return the formula over these weights."""
        return Convolution(self.kernel_projection, self.base_kernel)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., dim] by cosines and sines of a shape that broadcasts to it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rotary_embedding(layer: Mapping[str, Any]) -> LlamaRotaryEmbedding:
    """Return the rotary embedding of a draft's layers. Raises ConfigError unless its parameters rotate all of `head_dim`."""
    shape = layer_shape(layer)
    dim = int(shape.head_dim or shape.hidden_size // shape.num_attention_heads)
    try:
        rotary = LlamaRotaryEmbedding(shape)
    except Exception as error:  # transformers raises many classes for invalid parameters
        text = f"of the draft are invalid: {_first_line(error)}"
        raise ConfigError(text, param="rotary parameters", value=error) from error
    if 2 * rotary.inv_freq.numel() != dim:
        text = f"must be covered by the rotary embedding, which has {2 * rotary.inv_freq.numel()} dimensions"
        raise ConfigError(text, param="head_dim", value=dim)
    return rotary


def layer_shape(layer: Mapping[str, Any]) -> LlamaConfig:
    """Return transformers' configuration of the layers. Raises ConfigError for invalid fields or an unknown activation."""
    try:
        shape = LlamaConfig(**layer)
    except Exception as error:  # transformers' validation raises its own classes
        raise ConfigError(f"is not a valid 'llama' layer: {_first_line(error)}", param="layer of the draft") from error
    if shape.hidden_act not in ACT2FN:
        raise UnknownNameError("activation", shape.hidden_act, ACT2FN)
    return shape


def _first_line(error: Exception) -> str:
    """Return an error's message in one line, or its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
