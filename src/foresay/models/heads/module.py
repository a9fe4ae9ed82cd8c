"""A draft head as a trainable module, with parameters named as in the files, computed over whole texts.

The head predicts token i + 2 from a pair: the target's hidden states at position i and token i + 1. Drafting continues with the
head's own output instead of hidden states, and training unrolls it in the same way (EAGLE-3's training-time test): in step j, the
chain that starts at position i reads token i + 1 + j and its output of step j - 1, and attends to the first step's pairs up to
position i and to its own pairs of later steps. Knows no loss and no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.errors import ConfigError, UnknownNameError
from foresay.models.heads.config import HeadConfig


class RMSNorm(nn.RMSNorm):
    """A norm in the precision of its input: PyTorch computes one of two precisions slowly, and warns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., D]."""
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadModule(nn.Module):
    """The layers of a head. B texts, P pairs of each, hidden size D, K tokens that it can draft."""

    def __init__(self, config: HeadConfig, num_states: int) -> None:
        """num_states: number of the target's hidden states whose concatenation it reads."""
        super().__init__()
        self.config, self.num_states = config, num_states
        shape = layer_shape(config.layer)
        self.fc = nn.Linear(num_states * config.target_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(shape, config.norm_before_residual)])
        self.norm = RMSNorm(config.hidden_size, shape.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        """[K, D]; None to use the target's rows of the tokens that it can draft."""
        self.embed_tokens: nn.Embedding | None = None
        """[V, D]; None to use the target's."""
        self.rotary = rotary_embedding(config.layer)

    @property
    def layer(self) -> _Layer:
        """The head's only layer."""
        found = self.layers[0]
        assert isinstance(found, _Layer)
        return found

    def unrolled(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Return the inputs of the output layer, [B, P, D] for each step.

        states: [B, P, num_states * target hidden size], the target's at each position. embedded: [B, P + steps - 1, D], embedding
        of the token after each position. Positions after the end of a text may have any values; their outputs are meaningless.
        """
        out: torch.Tensor = self.fc(states)
        count = states.shape[1]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        normed: list[torch.Tensor] = []
        for step in range(steps):
            positions = torch.arange(step, step + count, device=states.device)[None]
            cos_sin = self.rotary(out, positions)
            out, key, value = self.layer(out, embedded[:, step : step + count], cos_sin, keys, values)
            keys.append(key)
            values.append(value)
            normed.append(self.norm(out))
        return normed


def rotary_embedding(layer: Mapping[str, Any]) -> LlamaRotaryEmbedding:
    """Return the rotary embedding of a head's layer. Raises ConfigError unless its parameters rotate all of `head_dim`."""
    shape = layer_shape(layer)
    dim = int(shape.head_dim or shape.hidden_size // shape.num_attention_heads)
    try:
        rotary = LlamaRotaryEmbedding(shape)
    except Exception as error:  # transformers raises many classes for invalid parameters
        raise ConfigError(f"the head's rotary parameters are invalid: {_first_line(error)}") from error
    if 2 * rotary.inv_freq.numel() != dim:
        raise ConfigError(
            f"the head's rotary embedding covers {2 * rotary.inv_freq.numel()} of head_dim={dim} dimensions; it must cover all"
        )
    return rotary


def layer_shape(layer: Mapping[str, Any]) -> LlamaConfig:
    """Return transformers' configuration of the layer. Raises ConfigError for invalid fields or an unknown activation."""
    try:
        shape = LlamaConfig(**layer)
    except Exception as error:  # transformers' validation raises its own classes
        raise ConfigError(f"the head's layer is not a valid 'llama' layer: {_first_line(error)}") from error
    if shape.hidden_act not in ACT2FN:
        raise UnknownNameError("activation", shape.hidden_act, ACT2FN)
    return shape


def _first_line(error: Exception) -> str:
    """Return an error's message in one line, or its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


class _Layer(nn.Module):
    """Attention over pairs, followed by a gated feed-forward network."""

    def __init__(self, shape: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        width = shape.hidden_size
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output [B, P, D] and this step's keys and values.

        hidden, embedded: [B, P, D]. rotary: cosines and sines. keys, values: of previous steps.
        """
        normed = self.hidden_norm(hidden)
        attended, key, value = self.self_attn(
            torch.cat([self.input_layernorm(embedded), normed], -1), rotary, keys, values
        )
        x = (normed if self.norm_before_residual else hidden) + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key, value


class _Attention(nn.Module):
    """Attention of one step's pairs to the first step's pairs up to their position, and to their own chain's later pairs."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        width, dim = shape.hidden_size, int(shape.head_dim or shape.hidden_size // shape.num_attention_heads)
        self.heads, self.key_heads, self.dim = shape.num_attention_heads, shape.num_key_value_heads, dim
        self.q_proj = nn.Linear(2 * width, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.key_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.key_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attend from x [B, P, 2 D]. Keys and values are [B, heads, P, dim], repeated for the query heads that share them."""
        batch, count = x.shape[:2]
        shared = self.heads // self.key_heads
        query = rotate(self._split(self.q_proj(x), self.heads), rotary)
        key = rotate(self._split(self.k_proj(x), self.key_heads), rotary).repeat_interleave(shared, 1)
        value = self._split(self.v_proj(x), self.key_heads).repeat_interleave(shared, 1)
        if not keys:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            attended = self._over_steps(query, [*keys, key], [*values, value])
        return self.o_proj(attended.transpose(1, 2).reshape(batch, count, -1)), key, value

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, self.dim).transpose(1, 2)

    def _over_steps(
        self, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        scale, count = self.dim**-0.5, query.shape[2]
        hidden = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
        first = (query @ keys[0].transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
        own = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
        weights = torch.softmax(torch.cat([first, *own], -1), -1)
        attended = weights[..., :count] @ values[0]
        for step, value in enumerate(values[1:]):
            attended = attended + weights[..., count + step, None] * value
        return attended


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


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x [B, heads, P, dim] by cosines and sines [1, P, dim]."""
    cos, sin = (one[:, None].to(x.dtype) for one in rotary)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
