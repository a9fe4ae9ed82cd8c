"""Attention and masks of all forward passes, registered with transformers as "foresay".

Owns which slots of its row a query attends to. A mask evaluates the family's own mask function (causal, sliding, chunked) at
each row's absolute positions, so ragged rows need no padding. Grouped query heads are folded into query rows and padded to a
multiple of four on a CPU: PyTorch's kernel takes another code path for fewer there, and bits would depend on whether a pass
contains draft tokens. Outside a foresay pass both functions call those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from foresay.decoding.devices import is_remote
from foresay.models.cache.slot_cache import Placement, spans

NAME = "foresay"
QUERY_ROWS = 4
"""Query rows are padded to a multiple of this. PyTorch's CPU kernel works on blocks of 32 rows (64 from 192 on) and takes another
code path for any block, also the last one, of fewer than 4."""
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_current: ContextVar[Placement | None] = ContextVar("foresay_pass", default=None)


@contextmanager
def during(at: Placement) -> Iterator[None]:
    """Set the token placement that masks and attention read inside the `with` block."""
    token = _current.set(at)
    try:
        yield
    finally:
        _current.reset(token)


def current_pass() -> Placement | None:
    """Return the placement of the pass running in this context, or None outside a pass."""
    return _current.get()


def register() -> None:
    """Register the implementation with transformers; repeated calls have no effect."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, additive_mask)


def additive_mask(
    *args: Any, mask_function: Callable[..., Any], dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Any:
    """Return the additive mask [B, 1, T, width]: 0 where the family's mask function is true, the dtype's minimum elsewhere."""
    at = _current.get()
    if at is None:
        from transformers.masking_utils import eager_mask

        return eager_mask(*args, mask_function=mask_function, dtype=dtype, **kwargs)
    device = at.positions.device
    batch = torch.arange(at.batch, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    seen = mask_function(batch, head, at.positions[:, None, :, None], at.slot_positions()[:, None, None, :])
    seen = at.mask_other_paths(seen)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def attention(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention: query [B, Hq, T, D], key and value [B, Hk, S, D] -> ([B, T, Hq, D], None).

    softcap: scores become softcap * tanh(scores / softcap) (Gemma 2). s_aux: [Hq] sink logits (gpt-oss). position_bias:
    [B or 1, Hq, T, S], added to the scores (T5).
    """
    at = _current.get()
    if at is None and softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs["position_bias"] = position_bias
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    if softcap is not None or s_aux is not None:
        attention_mask = _add_bias(attention_mask, position_bias)
        return _explicit(query, key, value, attention_mask, scaling, softcap, s_aux), None
    assert at is not None and attention_mask is not None
    batch, heads, columns, dim = query.shape
    group = heads // key.shape[1]
    rows = group * columns
    folded = query.reshape(batch, key.shape[1], rows, dim)
    folded = _padded(folded)
    whole = is_remote(query.device) or key.shape[-1] != value.shape[-1]  # not supported by the CPU kernel
    masks = _folded_masks(at, attention_mask.to(query.device), position_bias, group, rows, whole)
    if len(masks) == 1:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=masks[0], scale=scaling)
    else:
        out = _in_spans(folded, key, value, masks, scaling)
    out = out[:, :, :rows].reshape(batch, heads, columns, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _padded(folded: torch.Tensor) -> torch.Tensor:
    """Pad [..., rows, D] on a CPU with zero rows to a multiple of QUERY_ROWS."""
    missing = 0 if is_remote(folded.device) else -folded.shape[-2] % QUERY_ROWS
    return F.pad(folded, (0, 0, 0, missing)) if missing else folded


def _folded_masks(
    at: Placement, mask: torch.Tensor, bias: torch.Tensor | None, group: int, rows: int, whole: bool
) -> list[torch.Tensor]:
    """Return the mask of each span with the bias added, folded like the query heads and padded; computed once per pass.

    Each is [B, 1, rows, S], or [B, Hk, rows, S] if the bias differs between heads. whole: return a single mask over all spans.
    """
    key = (id(mask), id(bias))
    cached = at.folded.get(key)
    if cached is not None and cached[0] is mask and cached[1] is bias:
        return cached[2]
    folded = _add_bias(mask, bias)
    assert folded is not None
    if folded.shape[1] > 1:
        folded = folded.reshape(folded.shape[0], -1, rows, folded.shape[3])
    elif group > 1:
        folded = folded.repeat(1, 1, group, 1)
    folded = _padded(folded)
    masks = [folded] if whole else [folded[..., a:b].contiguous() for a, b in spans(mask.shape[-1])]
    at.folded[key] = (mask, bias, masks)
    return masks


def _add_bias(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Add the bias to the mask; masked entries stay at the dtype's minimum, since less would be minus infinity."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return (mask + bias).clamp_(min=torch.finfo(mask.dtype).min)


def _in_spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: list[torch.Tensor], scaling: float | None
) -> torch.Tensor:
    """Compute attention span by span and combine the results by their log-sum-exps in float32 (Milakov & Gimelshein 2018).

    A span that is masked for a row has a log-sum-exp near the dtype's minimum, so its weight is exactly zero.
    """
    start, parts = 0, []
    for mask in masks:
        end = start + mask.shape[-1]
        k, v = key[:, :, start:end], value[:, :, start:end]
        parts.append(_FLASH(query, k, v, 0.0, False, attn_mask=mask, scale=scaling))
        start = end
    top = parts[0][1]
    for _, mass in parts[1:]:
        top = torch.maximum(top, mass)
    total: torch.Tensor | None = None
    out: torch.Tensor | None = None
    for part, mass in parts:
        weight = (mass - top).exp_()
        share = part.float() * weight[..., None]
        total = weight if total is None else total + weight
        out = share if out is None else out.add_(share)
    assert out is not None and total is not None
    return out.div_(total[..., None]).to(query.dtype)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention in float32 by separate operations, for soft caps and sinks, which the fused kernel does not support."""
    batch, heads, columns, dim = query.shape
    group = heads // key.shape[1]
    folded = query.float().reshape(batch, key.shape[1], group * columns, dim)
    scores = torch.matmul(folded, key.float().transpose(2, 3)).view(batch, heads, columns, -1)
    scores = scores * (scaling if scaling is not None else dim**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask[..., : scores.shape[-1]].to(scores.device)
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(batch, -1, columns, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.reshape(batch, key.shape[1], group * columns, -1)
    out = torch.matmul(weights, value.float()).view(batch, heads, columns, -1)
    return out.transpose(1, 2).to(query.dtype).contiguous()
