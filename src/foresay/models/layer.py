"""The description of a decoder layer: mixer, norms, feed-forward, experts, and scales.

huggingface/family_layers.py reads one from the modules of a family, and drafts/ from those of drafts; cpu/layers.py,
gpu/layers.py and huggingface/operations.py compute it. Knows no family, no file format and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""A function x [..., in] -> [..., out]."""


@dataclass(frozen=True, slots=True)
class Separate:
    """The products of layers that read the same input and whose weights are apart, [..., in] -> [..., sum of out]."""

    parts: tuple[Product, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs, one after the other."""
        return torch.cat([part(x) for part in self.parts], -1)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / rms(x) times the weight [H], or times one plus the weight if `from_one`."""

    weight: torch.Tensor
    eps: float
    from_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., H]; the result has the same shape and dtype."""
        shape = tuple(self.weight.shape)
        if self.from_one:
            return F.rms_norm(x.float(), shape, self.float32(), self.eps).to(x.dtype)
        return F.rms_norm(x, shape, self.weight, self.eps)

    def float32(self) -> torch.Tensor:
        """Return the factors, [H] float32, with the one added if `from_one`."""
        return (1.0 + self.weight.float() if self.from_one else self.weight.float()).contiguous()


@dataclass(frozen=True, slots=True)
class Convolution:
    """Two causal convolutions of few taps around a sublayer: of its input and of its output (DFlash2).

    Both kernels of a token are a fixed one plus a projection of the sublayer's input, which is shared by channels of a group. The
    taps never reach the tokens of another row.
    """

    projection: Product
    """[2 * taps * groups, H]: for the input and the output, each tap and each group of channels."""
    base: torch.Tensor
    """[2, taps, H]."""

    def around(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the convolved input and the kernel of the output for x [..., T, H], the columns of a row's block."""
        taps = self.base.shape[1]
        deltas = self.projection(x)
        deltas = deltas.view(*x.shape[:-1], 2, taps, -1)
        return convolve(x, deltas[..., 0, :, :], self.base[0]), deltas[..., 1, :, :]

    def after(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the convolved output. delta: as `around` returns it."""
        return convolve(x, delta, self.base[1])


def convolve(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return sum over t of (base[t, c] + delta[i, t, group of c]) * x[i - t, c], zeros before the first column.

    x: [..., T, H]. delta: [..., T, taps, groups]. base: [taps, H].
    """
    out = torch.zeros_like(x)
    for tap, fixed in enumerate(base):
        moving = delta[..., tap, :].repeat_interleave(x.shape[-1] // delta.shape[-1], -1)
        seen = F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
        out = out + (fixed + moving) * seen
    return out


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: min(gate, limit) * sigmoid(alpha * the same) * (1 + up), with up clamped to [-limit, limit]."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Combine gate and up, [..., inner] each."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True, slots=True)
class Sigmoids:
    """Selection of experts by sigmoids of the router's scores (DeepSeek-V3, GLM-4-MoE) instead of their softmax.

    A correction is added for the selection alone, which is limited to the groups of consecutive experts whose two greatest have
    the greatest sums.
    """

    correction: torch.Tensor
    """[experts] float32."""
    groups: int
    active_groups: int
    scale: float
    """Factor of the weights of a token's experts."""


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms of experts next to a gated feed-forward (Gemma 4), which reads what `before_mlp` returns, as it does without them.

    The output of both is dense(feed-forward) + after(experts). Experts read before(x), and their router reads router(x) * factor.
    """

    before: Norm
    router: Norm
    after: Norm
    dense: Norm
    scales: torch.Tensor
    """[experts] factors of their weights."""
    factor: float


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The weights of all experts of a layer, for kernels of GPUs: tensors of any strides, or quantized products (BlockProduct) of
    the rows of one expert after another."""

    gate_up: Any
    """[experts, 2 * inner, hidden]."""
    down: Any
    """[experts, hidden, inner]."""
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2 * inner]."""
    down_bias: torch.Tensor | None = None
    """[experts, hidden]."""
    alternates: bool = False
    """True if rows of gate and up alternate (gpt-oss); otherwise those of the gate come first."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of one gated feed-forward, or next to it.

    The router's scores [N, experts] select the `active` highest of a token; their weights are the softmax of all scores, divided
    by the sum over the selected ones if `renormalized`.
    """

    router: Product
    gate_up: Sequence[Product]
    down: Sequence[Product]
    active: int
    renormalized: bool
    clamped: ClampedGate | None = None
    """None for the activation of the model."""
    sigmoids: Sigmoids | None = None
    """None for a softmax."""
    shared: tuple[Product, Product] | None = None
    """The products of an expert that every token passes through, as those of gate_up and down."""
    shared_gate: Product | None = None
    """[..., 1], whose sigmoid multiplies that expert's output; None for a factor of 1."""
    norms: ExpertNorms | None = None
    """None for experts in place of the feed-forward."""
    stacked: StackedExperts | None = None
    """In place of `gate_up` and `down`, which are empty, on a GPU."""


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta rule in place of attention (Yang et al. 2024, Gated Delta Networks).

    Queries, keys and values pass a causal convolution [channels, taps] and SiLU; queries and keys are normalized. A head's state
    S [key size, value size] becomes g S + k (b (v - g S^T k))^T, with g = exp(-exp(decays) softplus(alpha + steps)) and b =
    sigmoid(beta); the output S^T q is normalized and multiplied by the SiLU of a gate. Only the kernels compute it.
    """

    heads: tuple[int, int]
    """Number of key heads and of value heads."""
    dims: tuple[int, int]
    """Size of a key and of a value."""
    convolution: torch.Tensor
    decays: torch.Tensor
    steps: torch.Tensor
    norm: Norm
    side: Product
    """The product of betas and alphas, [..., 2 * value heads]."""
    by_key_head: bool
    """True if the layer's inputs are ordered by key heads (Qwen3-Next), not by kind."""
    tiled: bool = False
    """True if `output` reads the first value heads of all key heads, then the second ones, and so on (GGUF files)."""


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A selective state space in place of attention (Dao and Gu 2024, Mamba-2).

    x, B and C pass a causal convolution [channels, taps] and SiLU. A head's state S [head size, state size] becomes
    g S + (d x) B^T, with d = softplus(step + steps) and g = exp(-exp(decays) d); the output S C + skips x is multiplied by the
    SiLU of a gate, then normalized for each group of heads. B and C belong to a group. The layer's inputs are gate, x, B, C and
    step. Only the kernels compute it.
    """

    heads: tuple[int, int]
    """Number of groups and of heads."""
    dims: tuple[int, int]
    """Size of a state and of a head."""
    convolution: torch.Tensor
    bias: torch.Tensor | None
    decays: torch.Tensor
    steps: torch.Tensor
    skips: torch.Tensor
    norm: Norm


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A causal convolution of each channel in place of attention (LFM2): c * convolution(b * x) of the three inputs b, c, x.

    Only the kernels compute it.
    """

    convolution: torch.Tensor
    """[channels, taps]."""
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Factor of a query at position p, 1 + rate log(1 + floor(p / length)) (Llama 4, Ministral 3)."""

    rate: float
    length: int

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors of positions, int64 -> float32."""
        return 1 + self.rate * torch.log(1 + positions.div(self.length, rounding_mode="floor").float())


@dataclass(frozen=True, slots=True)
class LayerInput:
    """An addition after a layer's feed-forward, of a token's input i (Gemma 4): norm(projection(activation(gate x) * i)).

    Only the kernels compute it.
    """

    gate: Product
    projection: Product
    norm: Norm
    index: int
    """Position of the layer's input among those of a token."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The input of a draft head's layer (EAGLE): a token's embedding and a feature, normalized each, as one vector [..., 2 H]."""

    token: Norm
    feature: Norm
    is_residual: bool
    """True if the residual around attention is the normalized feature, not the feature itself."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of attention and a gated feed-forward, each with a norm before it, after it, or both."""

    kind: str
    """Name of the layer type; layers of one kind share cosines and sines."""
    before_attention: Norm | None
    qkv: Product
    heads: tuple[int, int]
    """Number of query heads and of key heads."""
    dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    wide_norm: bool
    """True if q_norm and k_norm normalize all heads as one vector (OLMo-2)."""
    rotates: bool
    window: int | None
    """Number of positions that a token attends to, its own included; None for all up to its own."""
    scaling: float
    softcap: float | None
    output: Product
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Product | None
    """None, as `activation` and `down`, for a layer of experts alone."""
    activation: Callable[[torch.Tensor], torch.Tensor] | None
    down: Product | None
    after_mlp: Norm | None
    experts: Experts | None = None
    sinks: torch.Tensor | None = None
    """A further score of each query head, [heads], which takes weight and has no value. Only the kernels compute it."""
    causal: bool = True
    """False if a token attends to the columns of its row after its own, too."""
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None
    gates_heads: bool = False
    """True if each query head is followed by a gate, whose sigmoid multiplies the head's output. Only the kernels compute it."""
    mixer: GatedDelta | StateSpace | ShortConvolution | None = None
    """In place of attention, whose fields are not read: `qkv` and `output` are the products before and after it."""
    shares: int | None = None
    """Index of the layer whose keys and values it reads; `qkv` has queries alone then. Only the kernels compute what follows."""
    equal_values: bool = False
    """True if the keys, before their norm, are the values, too; `qkv` has queries and keys."""
    unit_values: bool = False
    """True if each head of a value is normalized, without a weight."""
    input: LayerInput | None = None
    scale: float = 1.0
    """Factor of the layer's output."""
    query_scale: QueryScale | None = None
    """None for queries that their position does not scale."""
    pair: Pair | None = None
    """In place of `before_attention`, in a first layer."""

    @property
    def is_plain(self) -> bool:
        """True if PyTorch's operations compute the layer, too."""
        own = (
            self.shares is not None
            or self.equal_values
            or self.unit_values
            or self.input is not None
            or self.scale != 1.0
            or self.pair is not None
        )
        return not own and self.experts is None and self.mixer is None and not self.gates_heads

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of this layer, without the missing ones."""
        names = ("before_attention", "q_norm", "k_norm", "after_attention", "before_mlp", "after_mlp")
        found = [*(getattr(self, name) for name in names), None if self.input is None else self.input.norm]
        if self.experts is not None and (own := self.experts.norms) is not None:
            found += [own.before, own.router, own.after, own.dense]
        found += [] if self.pair is None else [self.pair.token, self.pair.feature]
        return tuple(one for one in found if one is not None)
