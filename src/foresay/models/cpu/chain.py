"""Greedy drafts of a head, chains and trees, in one call of the compiled kernels.

On a CPU, PyTorch's calls for a pass take longer than the pass. Owns the structs that the kernels read. Knows no drafter.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from foresay.decoding.continuation import Branching, Continuation, Drawn
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cpu import structs
from foresay.models.cpu.layers import FlatTokens, NativeLayers
from foresay.models.cpu.product import NativeProduct

_NO_WEIGHTS = np.ones(10)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a draft.

    most: tokens. ends: tokens after which nothing is drafted. branches, width, levels: of a tree, the children of a node, the
    nodes of a level that get children, and the levels.
    """

    most: int
    ends: tuple[int, ...] = ()
    branches: int = 1
    width: int = 1
    levels: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """The end of the text that a draft follows: tokens whose keys and values the cache lacks.

    known: [N] int64, at least one. features: [N, D], those before each. rotary: cosines and sines of all positions, [P, R]
    float32 each.
    """

    known: torch.Tensor
    features: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of a draft; `kept` is the other memory that they point to."""

    call: structs.Pass
    struct: structs.Chain
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    confidences: np.ndarray[Any, np.dtype[np.float32]]
    kept: Any


def table_of(embed: nn.Module) -> NativeProduct | None:
    """Return an embedding's rows as a product that the kernels can read; None if they cannot."""
    product = getattr(embed, "product", None)
    if isinstance(product, NativeProduct):
        return product
    if (
        type(embed) is not nn.Embedding
        or embed.max_norm is not None
        or embed._forward_hooks
        or embed._forward_pre_hooks
    ):
        return None
    try:
        return NativeProduct.in_place([embed.weight], [None])
    except LookupError:
        return None


class NativeChain:
    """Chains of a draft head, drafted by the kernels with the bits of single passes."""

    def __init__(
        self,
        layers: NativeLayers,
        embeddings: NativeProduct,
        scores: NativeProduct,
        token_ids: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """embeddings: of all tokens. scores: the output layer. token_ids: [K] int64, the token of each of its outputs; None if
        they are the same. dtype: that embeddings and the layers' outputs are rounded to.
        """
        self._layers, self._embeddings, self._scores, self._dtype = layers, embeddings, scores, dtype
        self._token_ids = None if token_ids is None else token_ids.contiguous()
        self._ids_address = (
            None if self._token_ids is None else structs.address(self._token_ids, (scores.out_features,), torch.int64)
        )

    def draft(self, start: Start, cache: SlotCache, limits: Limits, rule: Continuation | Branching) -> Drawn:
        """Return the draft that follows the known tokens: a chain, or a tree by a rule for trees.

        cache: of one row, which keeps its length: keys and values are written after it.
        """
        if isinstance(rule, Branching):
            return self._tree(start, cache, limits, rule)
        return self._chain(start, cache, limits, rule)

    def _chain(self, start: Start, cache: SlotCache, limits: Limits, rule: Continuation) -> Drawn:
        one = self._begin(start, cache, limits, limits.most - 1)
        weights = np.array(rule.weights, np.float64)
        one.struct.weights, one.struct.probability, one.struct.threshold = (
            weights.ctypes.data,
            rule.probability,
            rule.threshold,
        )
        count = self._layers.draft(one.call, one.struct)
        return Drawn(one.tokens[:count].tolist(), one.confidences[:count].tolist(), count)

    def _tree(self, start: Start, cache: SlotCache, limits: Limits, rule: Branching) -> Drawn:
        levels = min(limits.levels, limits.most)
        one = self._begin(start, cache, limits, limits.width * (levels - 1))
        parents, passes = np.zeros(limits.most, np.int64), ctypes.c_int64()
        one.struct.probability, one.struct.threshold = rule.scale, rule.threshold
        tree = structs.Tree(
            branches=limits.branches,
            width=limits.width,
            levels=levels,
            each=rule.each,
            least=rule.least,
            parents=parents.ctypes.data,
            passes=ctypes.addressof(passes),
        )
        count = self._layers.draft(one.call, one.struct, tree)
        return Drawn(
            one.tokens[:count].tolist(), one.confidences[:count].tolist(), passes.value, parents[:count].tolist()
        )

    @torch.inference_mode()
    def _begin(self, start: Start, cache: SlotCache, limits: Limits, more: int) -> _Call:
        """Return the arguments of a draft without its rule. more: slots after those of the known tokens."""
        known, (cos, sin) = start.known, start.rotary
        at = cache.begin_pass(0, 1, len(known) + more, torch.device("cpu"))
        positions, width = map(int, cos.shape)
        # the kernels overwrite it
        x = start.features.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        normed = torch.empty_like(x)
        call, kept = self._layers.call(FlatTokens.of(at, None).first(len(known)), cache, x, normed)
        call.turns = 1
        tokens, confidences = np.zeros(limits.most, np.int64), np.zeros(limits.most, np.float32)
        stops = np.array(limits.ends, np.int64)
        struct = structs.Chain(
            embeddings=ctypes.addressof(self._embeddings.struct),
            scores=ctypes.addressof(self._scores.struct),
            token_ids=self._ids_address,
            cosines=structs.address(cos, (positions, width), torch.float32),
            sines=structs.address(sin, (positions, width), torch.float32),
            rotated=width,
            positions=positions,
            is_bf16=self._dtype is torch.bfloat16,
            known=structs.address(known, (len(known),), torch.int64),
            most=limits.most,
            ends=stops.ctypes.data if len(stops) else None,
            num_ends=len(stops),
            weights=_NO_WEIGHTS.ctypes.data,  # a chain's rule has its own
            tokens=tokens.ctypes.data,
            confidences=confidences.ctypes.data,
        )
        return _Call(call, struct, tokens, confidences, (kept, stops))
