"""Greedy drafts of a head in one call of the compiled kernels.

On a CPU, PyTorch's calls for a pass take longer than the pass. Owns the structs that the kernels read. Knows no drafter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from foresay.decoding.stopping import StoppingRule
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cpu import structs
from foresay.models.cpu.flat_tokens import FlatTokens
from foresay.models.cpu.layers import NativeLayers
from foresay.models.cpu.product import NativeProduct


@dataclass(frozen=True, slots=True)
class Start:
    """The end of the text that a draft follows: tokens whose keys and values the cache lacks.

    known: [N] int64, at least one. features: [N, D], those before each. rotary: cosines and sines of all positions, [P, R]
    float32 each.
    """

    known: torch.Tensor
    features: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]


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
        *,
        feeds_norm: bool = False,
    ) -> None:
        """embeddings: of all tokens. scores: the output layer. token_ids: [K] int64, the token of each of its outputs; None if
        they are the same. dtype: that embeddings and the layers' outputs are rounded to. feeds_norm: True if a pass reads the
        last one's output after the last norm.
        """
        self._layers, self._embeddings, self._scores, self._dtype = layers, embeddings, scores, dtype
        self._feeds_norm = feeds_norm
        self._token_ids = None if token_ids is None else token_ids.contiguous()
        self._ids_address = (
            None if self._token_ids is None else structs.address(self._token_ids, (scores.out_features,), torch.int64)
        )

    @torch.inference_mode()
    def draft(
        self, start: Start, cache: SlotCache, most: int, ends: Sequence[int], rule: StoppingRule
    ) -> tuple[list[int], list[float]]:
        """Return (token ids, confidences) of at most `most` tokens after the known ones; nothing follows a token in `ends`.

        cache: of one row, which keeps its length: keys and values are written after it.
        """
        known, (cos, sin) = start.known, start.rotary
        at = cache.begin_pass(0, 1, len(known) + most - 1, torch.device("cpu"))
        positions, width = map(int, cos.shape)
        # the kernels overwrite it
        x = start.features.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        normed = torch.empty_like(x)
        call, _kept = self._layers.call(FlatTokens.of(at, None).first(len(known)), cache, x, normed)
        call.turns = 1
        tokens, confidences = np.zeros(most, np.int64), np.zeros(most, np.float32)
        stops, weights = np.array(ends, np.int64), np.array(rule.weights, np.float64)
        struct = structs.ChainStruct(
            embeddings=ctypes.addressof(self._embeddings.struct),
            scores=ctypes.addressof(self._scores.struct),
            token_ids=self._ids_address,
            cosines=structs.address(cos, (positions, width), torch.float32),
            sines=structs.address(sin, (positions, width), torch.float32),
            rotated=width,
            positions=positions,
            feeds_norm=int(self._feeds_norm),
            is_bf16=self._dtype is torch.bfloat16,
            known=structs.address(known, (len(known),), torch.int64),
            most=most,
            ends=stops.ctypes.data if len(stops) else None,
            num_ends=len(stops),
            probability=rule.probability[0],
            threshold=rule.threshold + rule.per_row,
            weights=weights.ctypes.data,
            tokens=tokens.ctypes.data,
            confidences=confidences.ctypes.data,
        )
        count = self._layers.draft(call, struct)
        return tokens[:count].tolist(), confidences[:count].tolist()
