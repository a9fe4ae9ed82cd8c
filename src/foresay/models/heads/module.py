"""A head as a module that can be trained: its parameters by the names of the layout, and what it computes over whole texts.

A pair is the hidden states of one place of a text and the token after it; from it the head predicts the token after that.
Drafting goes on with its own output in the place of hidden states, so training unrolls it in the same way: in step j the pair
that began at place i holds the token j places on and what the head put out in step j - 1, and sees the first pairs up to its own,
and its own later ones. Knows no loss and no data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.errors import ConfigError, UnknownNameError
from foresay.models.heads.config import HeadConfig


class HeadModule(nn.Module):
    """The layers of a head. B texts, P pairs, D its hidden size, K tokens that it can write."""

    def __init__(self, config: HeadConfig, num_states: int) -> None:
        """num_states: hidden states of the target that it reads side by side."""
        super().__init__()
        self.config, self.num_states = config, num_states
        shape = _shape(config)
        self.fc = nn.Linear(num_states * config.target_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(shape, config.norm_before_residual)])
        self.norm = nn.RMSNorm(config.hidden_size, shape.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        """[K, D]; None: the target's rows of the tokens it can write."""
        self.embed_tokens: nn.Embedding | None = None
        """[V, D]; None: the target's."""
        self.rotary = rotary_of(config)

    @property
    def layer(self) -> _Layer:
        """Its only layer."""
        found = self.layers[0]
        assert isinstance(found, _Layer)
        return found

    def unrolled(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """What its scores are made of, [B, P, D] for each step.

        states: [B, P, states * target hidden], the target's at each place. embedded: [B, P + steps - 1, D], the token after each
        place; what lies behind a text may hold anything, and what is computed of it too.
        """
        out: torch.Tensor = self.fc(states)
        count = states.shape[1]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        normed: list[torch.Tensor] = []
        for step in range(steps):
            positions = torch.arange(step, step + count, device=states.device)[None]
            turn = self.rotary(out, positions)
            out, key, value = self.layer(out, embedded[:, step : step + count], turn, keys, values)
            keys.append(key)
            values.append(value)
            normed.append(self.norm(out))
        return normed


def rotary_of(config: HeadConfig) -> LlamaRotaryEmbedding:
    """The rotary embedding of a head's layer. Raises ConfigError for parameters that do not make one of the heads' width."""
    shape = _shape(config)
    dim = int(shape.head_dim or shape.hidden_size // shape.num_attention_heads)
    try:
        rotary = LlamaRotaryEmbedding(shape)
    except Exception as error:  # of transformers, in whatever class a parameter fails
        raise ConfigError(f"the head's rotary embedding cannot be made: {_first_line(error)}") from error
    if 2 * rotary.inv_freq.numel() != dim:
        raise ConfigError(
            f"the head's rotary embedding turns {2 * rotary.inv_freq.numel()} of {dim} numbers, not all of them"
        )
    return rotary


def _shape(config: HeadConfig) -> LlamaConfig:
    """transformers' configuration of the layer. Raises ConfigError where it refuses the fields, and for an unknown activation."""
    try:
        shape = LlamaConfig(**config.layer)
    except Exception as error:  # its checks have classes of their own
        raise ConfigError(f"the head's layer is no 'llama' layer: {_first_line(error)}") from error
    if shape.hidden_act not in ACT2FN:
        raise UnknownNameError("activation", shape.hidden_act, ACT2FN)
    return shape


def _first_line(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__


class _Layer(nn.Module):
    """One layer: attention over pairs, and a gated feed-forward."""

    def __init__(self, shape: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        width = shape.hidden_size
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.mlp = _FeedForward(shape)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden, embedded: [B, P, D]. keys, values: of the steps before. Gives the output, and this step's keys and values."""
        beside = self.hidden_norm(hidden)
        seen, key, value = self.self_attn(torch.cat([self.input_layernorm(embedded), beside], -1), turn, keys, values)
        x = (beside if self.norm_before_residual else hidden) + seen
        return x + self.mlp(self.post_attention_layernorm(x)), key, value


class _Attention(nn.Module):
    """Attention of the pairs of one step: to the first step's up to their own place, and to their own later ones."""

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
        turn: tuple[torch.Tensor, torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [B, P, 2 D]. Keys and values are [B, heads, P, dim], repeated for the query heads that share them."""
        batch, count = x.shape[:2]
        shared = self.heads // self.key_heads
        query = _rotated(self._split(self.q_proj(x), self.heads), turn)
        key = _rotated(self._split(self.k_proj(x), self.key_heads), turn).repeat_interleave(shared, 1)
        value = self._split(self.v_proj(x), self.key_heads).repeat_interleave(shared, 1)
        if not keys:
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = self._over_steps(query, [*keys, key], [*values, value])
        return self.o_proj(seen.transpose(1, 2).reshape(batch, count, -1)), key, value

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
        seen = weights[..., :count] @ values[0]
        for step, value in enumerate(values[1:]):
            seen = seen + weights[..., count + step, None] * value
        return seen


class _FeedForward(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACT2FN[shape.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., D] -> the same shape."""
        out: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x: [B, heads, P, dim]; turn: cosines and sines [1, P, dim]."""
    cos, sin = (one[:, None].to(x.dtype) for one in turn)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
