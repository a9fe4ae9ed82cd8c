"""Logits to probabilities: temperature, top-k, top-p and min-p, without sorting the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foresay.decoding.rows import Rows

NUCLEUS = 256
"""Tokens among which a nucleus is looked for first."""


_ROWS = 4


_BINS = 0x3F80 + 1
"""High halves of the floats from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch's parameters ask of the law builder; depends on the membership alone."""

    sampled: torch.Tensor | None
    places: dict[int, int]
    """Row -> its place among the sampled rows."""
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    truncated: torch.Tensor | None
    """Places among the sampled rows with top-k or top-p; None when there are none."""
    any_min_p: bool
    any_top_p: bool
    most: int
    """The greatest top-k, 0 when there is none."""


def plan_of(rows: Rows, device: torch.device) -> Plan:
    """The rows' plan on a device, made once for a membership."""
    key = f"plan {device}"
    if key in rows.memo:
        plan: Plan = rows.memo[key]
        return plan
    params = [row.params for row in rows]
    sampled = [i for i, p in enumerate(params) if not p.greedy]
    cut = [j for j, i in enumerate(sampled) if params[i].top_k or params[i].top_p < 1]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(params[i], name)) for i in sampled], device=device)

    rows.memo[key] = plan = Plan(
        sampled=torch.tensor(sampled, device=device) if sampled else None,
        places={i: j for j, i in enumerate(sampled)},
        temperature=column("temperature"),
        top_k=column("top_k").long(),
        top_p=column("top_p"),
        min_p=column("min_p"),
        truncated=torch.tensor(cut, device=device) if cut else None,
        any_min_p=any(params[i].min_p > 0 for i in sampled),
        any_top_p=any(params[i].top_p < 1 for i in sampled),
        most=max((params[i].top_k for i in sampled), default=0),
    )
    return plan


def probabilities(logits: torch.Tensor, plan: Plan, width: int) -> torch.Tensor:
    """logits: [S * width, V] float32 of the sampled rows -> their laws, [S * width, V] float32."""

    def per_place(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(width) if width > 1 else values

    temperature = per_place(plan.temperature).clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
    logits = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    min_p = per_place(plan.min_p)
    if plan.truncated is None:
        return _min_p(logits.softmax(-1), min_p) if plan.any_min_p else logits.softmax(-1)
    top_k, top_p = per_place(plan.top_k), per_place(plan.top_p)
    if len(plan.truncated) * width == len(logits):
        return _truncate(logits, top_k, top_p, min_p, plan)
    probs = _min_p(logits.softmax(-1), min_p) if plan.any_min_p else logits.softmax(-1)
    offsets = torch.arange(width, device=logits.device)
    cut = (plan.truncated[:, None] * width + offsets).reshape(-1)
    probs[cut] = _truncate(logits[cut], top_k[cut], top_p[cut], min_p[cut], plan)
    return probs


def _min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    kept = torch.where(probs >= probs.amax(-1, keepdim=True) * min_p[:, None], probs, 0.0)
    # a row without min-p must not change by the rounding of a division when another row has it
    return torch.where(min_p[:, None] > 0, kept / kept.sum(-1, keepdim=True), probs)


def _truncate(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Top-k, then top-p, then min-p, as transformers orders them, without sorting the vocabulary.

    logits: [N, V], the greatest of a row 0, overwritten; top_k [N] (0 = all), top_p [N], min_p [N] -> laws [N, V]. Each of
    the three keeps the tokens at least as likely as some least likely one, so a law is the weights above a threshold.
    Tokens tied with the last one stay: which tokens a law holds must not depend on the order of a sort.
    """
    vocab = logits.shape[1]
    # below e^-80 a weight is 0: denormal numbers would slow every later pass down
    weights = torch.threshold_(logits, -80.0, -torch.inf).exp_()
    if plan.most:
        limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
        heaviest = weights.topk(min(plan.most, vocab)).values
        kth = heaviest.gather(1, limit.clamp(max=heaviest.shape[1])[:, None] - 1)
        weights.masked_fill_((weights < kth) & (limit < vocab)[:, None], 0.0)
    least = min_p
    if plan.any_top_p:
        # a few rows at a time: their temporaries stay in the processor's cache
        pairs = zip(torch.split(weights, _ROWS), torch.split(top_p, _ROWS), strict=True)
        nuclei = torch.cat([_nucleus_threshold(w, p) for w, p in pairs])
        least = torch.maximum(torch.where(top_p < 1, nuclei, 0.0), min_p)
    weights.masked_fill_(weights < least[:, None], 0.0)
    return weights.div_(weights.sum(-1, keepdim=True))


def _nucleus_threshold(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least weight in each row's nucleus. weights: [N, V] in [0, 1], top_p: [N] -> [N].

    The nucleus is looked for among the NUCLEUS heaviest tokens, and by histogram in the rows whose nucleus is wider.
    """
    goal = top_p.double() * weights.sum(-1).double()
    heaviest = weights.topk(min(NUCLEUS, weights.shape[1])).values
    place = (heaviest.cumsum(-1, dtype=torch.float64) < goal[:, None]).sum(-1)
    least = heaviest.gather(1, place.clamp(max=heaviest.shape[1] - 1)[:, None])[:, 0]
    wide = torch.nonzero((place == heaviest.shape[1]) & (top_p < 1))[:, 0]
    if len(wide):
        least[wide] = _wide_threshold(weights[wide], goal[wide])
    return least


def _wide_threshold(weights: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The least weight whose tokens, with all heavier ones, reach `goal`. weights: [N, V] in [0, 1], goal: [N] -> [N].

    Positive floats are ordered as their bits are, so the high 16 bits are a bin; only the tokens of the bin in which the
    goal is reached are sorted.
    """
    bins = (weights.view(torch.int32) >> 16).long()
    masses = torch.zeros(len(weights), _BINS, dtype=torch.float64, device=weights.device)
    masses.scatter_add_(1, bins, weights.double())
    above = masses.flip(-1).cumsum_(-1)  # column i: all bins from the heaviest to the i-th from above
    place = (above < goal[:, None]).sum(-1).clamp(max=_BINS - 1)
    heavier = (above.gather(1, place[:, None]) - masses.gather(1, _BINS - 1 - place[:, None]))[:, 0]
    out = torch.empty_like(weights[:, 0])
    for row, bin_ in enumerate((_BINS - 1 - place).tolist()):
        inside = weights[row][bins[row] == bin_].sort(descending=True).values
        if len(inside):
            last = (heavier[row] + inside.cumsum(-1, dtype=torch.float64) < goal[row]).sum()
            out[row] = inside[last.clamp(max=len(inside) - 1)]
        else:  # the goal is above the whole mass by a rounding
            out[row] = 0.0
    return out
