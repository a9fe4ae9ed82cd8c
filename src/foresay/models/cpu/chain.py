"""Greedy drafts of a head in one call of the compiled kernels: on a CPU, PyTorch's calls for a pass take longer than the pass.

Owns the struct that the kernels read. Knows no drafter.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from foresay.decoding.protocols import Continuation
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cpu import structs
from foresay.models.cpu.in_place import InPlaceProduct
from foresay.models.cpu.layers import FlatTokens, NativeLayers
from foresay.models.cpu.product import CompiledProduct, NativeProduct


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest number of tokens, and tokens after which nothing is drafted."""

    most: int
    ends: tuple[int, ...] = ()


def table_of(embed: nn.Module) -> CompiledProduct | None:
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
        return InPlaceProduct([embed.weight], [None])
    except LookupError:
        return None


class NativeChain:
    """Chains of a draft head, drafted by the kernels with the bits of single passes."""

    def __init__(
        self,
        layers: NativeLayers,
        embeddings: CompiledProduct,
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

    @torch.inference_mode()
    def draft(
        self,
        known: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        row: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        limits: Limits,
        rule: Continuation,
    ) -> tuple[list[int], list[float]]:
        """Return the tokens that follow the known ones, and their confidences.

        known: [N] int64, at least one. features: [N, D], those before each. row: of the cache, which keeps its length: keys and
        values of the known tokens and of the drafted ones but the last are written after it. rotary: cosines and sines of all
        positions, [P, R] float32 each.
        """
        count = len(known)
        at = cache.begin_pass(row, 1, count + limits.most - 1, torch.device("cpu"))
        cos, sin = rotary
        positions, width = map(int, cos.shape)
        # the kernels overwrite it
        x = features.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        normed = torch.empty_like(x)
        call, _kept = self._layers.call(FlatTokens.of(at, None).first(count), cache, x, normed)
        call.turns = 1
        tokens, confidences = np.zeros(limits.most, np.int64), np.zeros(limits.most, np.float32)
        weights, stops = np.array(rule.weights, np.float64), np.array(limits.ends, np.int64)
        chain = structs.Chain(
            embeddings=ctypes.addressof(self._embeddings.struct),
            scores=ctypes.addressof(self._scores.struct),
            token_ids=self._ids_address,
            cosines=structs.address(cos, (positions, width), torch.float32),
            sines=structs.address(sin, (positions, width), torch.float32),
            rotated=width,
            positions=positions,
            is_bf16=self._dtype is torch.bfloat16,
            known=structs.address(known, (count,), torch.int64),
            most=limits.most,
            ends=stops.ctypes.data if len(stops) else None,
            num_ends=len(stops),
            probability=rule.probability,
            threshold=rule.threshold,
            weights=weights.ctypes.data,
            tokens=tokens.ctypes.data,
            confidences=confidences.ctypes.data,
        )
        drawn = self._layers.draft(call, chain)
        return tokens[:drawn].tolist(), confidences[:drawn].tolist()
