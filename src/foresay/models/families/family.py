"""The form of an entry: what is known of a family's layers, and of the GGUF files of an architecture.

Knows no family, no kernel, and nothing of how a file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from foresay.models.families.stated import Stated

FULL, SLIDING = "full_attention", "sliding_attention"

ProductOf = Callable[..., Callable[[torch.Tensor], torch.Tensor]]
"""(modules that read the same input) -> their product, [..., in] -> [..., sum of out]."""
Derive = Callable[[Stated, dict[str, Any]], dict[str, Any]]
"""(a file's values, fields of the configuration so far) -> further fields."""
Order = Callable[[Any, str], torch.Tensor | None]
"""(configuration, part of a layer by llama.cpp's name) -> the file's index of each of transformers' rows; None for the same."""


class Kinds(Enum):
    """The kinds of layers that a family has."""

    FULL = "all have full attention"
    WINDOWED = "all have a sliding window, if the configuration has one"
    LISTED = "the configuration lists full and sliding ones"
    MIXED = "the configuration lists ones with recurrent states, too"


def _as_llama(layer: Any, product_of: ProductOf) -> Any:
    return layer


def _always(attention: Any, config: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """A family whose layers are read from its modules; most are Llama's under Llama's names."""

    model_type: str
    """transformers' name of the family."""
    kinds: Kinds = Kinds.FULL
    names: Callable[[Any, ProductOf], Any] = _as_llama
    """Returns a layer with Llama's names of its parts. Raises AttributeError if it has other parts."""
    rotates: Callable[[Any, Any], bool] = _always
    """(attention module, configuration) -> True if its queries and keys are rotated, unless the module states it."""
    has_experts: bool = False
    """True if the layers are mixtures of experts."""
    kernels_only: bool = False
    """True for layers that PyTorch's operations do not compute, besides experts and states."""
    norms_from_one: str = ""
    """Beginning of the class name of norms that multiply by one plus their weight."""
    wide_norms: bool = False
    """True if the norms of queries and keys normalize all heads as one vector."""
    gates_heads: bool = False
    """True if the query projection gives a gate of each head's output."""
    scales_queries: bool = False
    """True if queries are scaled by their position."""
    half_turns: bool = False
    """True if the rotary embedding gives each angle once."""
    shares_keys: bool = False
    """True if layers hand the keys and values that the cache returned to later layers of the same pass."""
    partly_recurrent: bool = False
    """True if some models have no recurrent layers, as their `layer_types` state."""
    stores_mxfp4: bool = False
    """True if published folders have their experts in MXFP4."""
    texts_of: tuple[str, ...] = ()
    """model_type of language models of multimodal checkpoints that have the same layers, if all tokens are text."""

    @property
    def by_kernels(self) -> bool:
        """True if kernels of ours alone compute the layers, besides the family's own code."""
        return self.has_experts or self.kernels_only or self.kinds is Kinds.MIXED


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family, and what its GGUF files store otherwise than those of the others."""

    model_type: str
    """transformers' name of the family."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further keys -> fields of the configuration."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of the configuration that no key states."""
    required: tuple[str, ...] = ()
    """Keys without a default, besides those of every architecture."""
    lacking: tuple[str, ...] = ()
    """Keys that files of every other architecture must have."""
    derive: Derive | None = None
    """Returns fields that several values state together."""
    derived: tuple[str, ...] = ()
    """Keys that `derive` reads."""
    by_layer: tuple[str, ...] = ()
    """Keys that may list an integer for each layer."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Allowed values of keys, instead of those in gguf/keys.py."""
    interleaved: bool = False
    """True if the rows of queries and keys are stored as pairs of a head's two halves."""
    norms_from_one: bool = False
    """True if the weights of norms are stored with the one that the family's norms add."""
    scaled_by_tensor: bool = False
    """True if divisors of rotary frequencies are a tensor of their own."""
    scaled_linearly: str | None = None
    """Prefix of the buffers of rotary frequencies that linear scaling divides; None if it is refused."""
    proportional: bool = False
    """True if the divisors of rotary frequencies make some of them zero, and are part of the configuration."""
    yarn: Mapping[str, object] | None = None
    """Parameters of YaRN scaling that no key states; None if it is refused."""
    mixed: bool = False
    """True for layers with recurrent states."""
    split: Callable[[Any, Any], None] | None = None
    """(model on the meta device, names of a file's tensors): replaces joint layers by ones with the file's tensors."""
    row_order: Order | None = None
    column_order: Callable[[Any], torch.Tensor | None] | None = None
    """(configuration) -> as `Order`, of the columns of ssm_out."""
    variants: Mapping[str, Architecture] = field(default_factory=dict)
    """The families of files in which one of these keys has a value other than 0."""
