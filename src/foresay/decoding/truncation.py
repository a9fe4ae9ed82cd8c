"""Logits to probabilities: temperature, top-k, top-p and min-p, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foresay.decoding import devices, kernels
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.decoding.sums import row_sums

NUCLEUS = 256
"""Number of heaviest tokens in which the nucleus is searched first."""
_ROWS = 4
"""Rows whose nucleus is searched at once: their temporaries stay in the processor's cache."""
_BINS = 0x3F80 + 1
"""Number of distinct upper 16 bits of floats from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sampling parameters of a batch as tensors; a function of the batch's members alone."""

    sampled: torch.Tensor | None
    """Indices of the sampled rows; None if every row is greedy."""
    index_of: dict[int, int]
    """Row -> its index among the sampled rows."""
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    truncated: torch.Tensor | None
    """Indices among the sampled rows of those with top-k or top-p; None if there are none."""
    any_min_p: bool
    any_top_p: bool
    most: int
    """Largest top-k, 0 if there is none."""


_PLANS = StateKey[dict[torch.device, Plan]](dict)


def plan_of(rows: Rows, device: torch.device) -> Plan:
    """Return the rows' plan on a device; it is built once per batch membership."""
    plans = _PLANS.of(rows)
    if device in plans:
        return plans[device]
    params = [row.params for row in rows]
    sampled = [i for i, p in enumerate(params) if not p.greedy]
    cut = [j for j, i in enumerate(sampled) if params[i].top_k or params[i].top_p < 1]

    def column(name: str) -> torch.Tensor:
        return devices.to_device([float(getattr(params[i], name)) for i in sampled], device, torch.float32)

    plans[device] = plan = Plan(
        sampled=devices.to_device(sampled, device) if sampled else None,
        index_of={i: j for j, i in enumerate(sampled)},
        temperature=column("temperature"),
        top_k=column("top_k").long(),
        top_p=column("top_p"),
        min_p=column("min_p"),
        truncated=devices.to_device(cut, device) if cut else None,
        any_min_p=any(params[i].min_p > 0 for i in sampled),
        any_top_p=any(params[i].top_p < 1 for i in sampled),
        most=max((params[i].top_k for i in sampled), default=0),
    )
    return plan


def probabilities(logits: torch.Tensor, plan: Plan, width: int) -> torch.Tensor:
    """Logits of the sampled rows -> probabilities, both [S * width, V] float32. The logits are overwritten."""

    def per_position(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(width) if width > 1 else values

    if kernels.uses_kernels(logits.device):
        return _by_kernels(logits, plan, per_position)
    temperature = _bounded(per_position(plan.temperature))
    logits = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    min_p = per_position(plan.min_p)
    if plan.truncated is None:
        return _min_p(logits.softmax(-1), min_p) if plan.any_min_p else logits.softmax(-1)
    top_k, top_p = per_position(plan.top_k), per_position(plan.top_p)
    if len(plan.truncated) * width == len(logits):
        return _truncate(logits, top_k, top_p, min_p, plan)
    probs = _min_p(logits.softmax(-1), min_p) if plan.any_min_p else logits.softmax(-1)
    offsets = torch.arange(width, device=logits.device)
    cut = (plan.truncated[:, None] * width + offsets).reshape(-1)
    probs[cut] = _truncate(logits[cut], top_k[cut], top_p[cut], min_p[cut], plan)
    return probs


def _by_kernels(logits: torch.Tensor, plan: Plan, per_position: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    from foresay.decoding import sampling_kernels  # Triton

    cuts = sampling_kernels.Cuts(
        per_position(plan.top_k) if plan.most else None,
        per_position(plan.top_p) if plan.any_top_p else None,
        per_position(plan.min_p) if plan.any_min_p else None,
    )
    return sampling_kernels.probabilities(logits.contiguous(), _bounded(per_position(plan.temperature)), cuts)


def _bounded(temperature: torch.Tensor) -> torch.Tensor:
    return temperature.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)


def _min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    kept = torch.where(probs >= probs.amax(-1, keepdim=True) * min_p[:, None], probs, 0.0)
    # the rounding of a division must not change a row without min-p because another row has it
    return torch.where(min_p[:, None] > 0, kept / row_sums(kept)[:, None], probs)


def _truncate(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Top-k, then top-p, then min-p, as transformers orders them, without sorting the vocabulary.

    logits: [N, V], each row's maximum 0, overwritten; top_k [N] (0 = all), top_p [N], min_p [N] -> probabilities [N, V]. Each of
    the three keeps the tokens whose weight reaches a threshold. Tokens tied with the last one are kept: the support must not
    depend on the order of a sort.
    """
    vocab = logits.shape[1]
    # below e^-80 a weight is 0: denormal numbers would slow every later pass down
    weights = torch.threshold_(logits, -80.0, -torch.inf).exp_()
    if plan.most:
        limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
        heaviest = weights.topk(min(plan.most, vocab)).values
        kth = heaviest.gather(1, limit.clamp(max=heaviest.shape[1])[:, None] - 1)
        weights.masked_fill_((weights < kth) & (limit < vocab)[:, None], 0.0)
    threshold = min_p
    if plan.any_top_p:
        pairs = zip(torch.split(weights, _ROWS), torch.split(top_p, _ROWS), strict=True)
        nuclei = torch.cat([_nucleus_threshold(w, p) for w, p in pairs])
        threshold = torch.maximum(torch.where(top_p < 1, nuclei, 0.0), min_p)
    weights.masked_fill_(weights < threshold[:, None], 0.0)
    return weights.div_(row_sums(weights)[:, None])


def _nucleus_threshold(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Smallest weight in each row's nucleus. weights: [N, V] in [0, 1], top_p: [N] -> [N].

    The nucleus is searched among the NUCLEUS heaviest tokens, and by histogram in rows whose nucleus is wider.
    """
    goal = top_p.double() * row_sums(weights).double()
    heaviest = weights.topk(min(NUCLEUS, weights.shape[1])).values
    index = (heaviest.cumsum(-1, dtype=torch.float64) < goal[:, None]).sum(-1)
    smallest = heaviest.gather(1, index.clamp(max=heaviest.shape[1] - 1)[:, None])[:, 0]
    wide = torch.nonzero((index == heaviest.shape[1]) & (top_p < 1))[:, 0]
    if len(wide):
        smallest[wide] = _wide_threshold(weights[wide], goal[wide])
    return smallest


def _wide_threshold(weights: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Smallest weight whose tokens, with all heavier ones, sum to `goal`. weights: [N, V] in [0, 1], goal: [N] -> [N].

    Positive floats are ordered as their bits, so the upper 16 bits give a bin; only the tokens of the bin in which the goal is
    reached are sorted.
    """
    bins = (weights.view(torch.int32) >> 16).long()
    masses = torch.zeros(len(weights), _BINS, dtype=torch.float64, device=weights.device)
    masses.scatter_add_(1, bins, weights.double())
    above = masses.flip(-1).cumsum_(-1)  # column i: the mass of the i + 1 heaviest bins
    index = (above < goal[:, None]).sum(-1).clamp(max=_BINS - 1)
    heavier = (above.gather(1, index[:, None]) - masses.gather(1, _BINS - 1 - index[:, None]))[:, 0]
    out = torch.empty_like(weights[:, 0])
    for row, bin_ in enumerate((_BINS - 1 - index).tolist()):
        inside = weights[row][bins[row] == bin_].sort(descending=True).values
        if len(inside):
            last = (heavier[row] + inside.cumsum(-1, dtype=torch.float64) < goal[row]).sum()
            out[row] = inside[last.clamp(max=len(inside) - 1)]
        else:  # rounding put the goal above the whole mass
            out[row] = 0.0
    return out
