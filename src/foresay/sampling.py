"""Logits to laws, and laws to tokens: the only place that builds a law or draws from one.

A law is a distribution over the next token after all processing. A greedy law is a point mass and is held as its
token, never as a [V] one-hot; a sampled law is a row of probabilities. Target and draft go through the same code, so
that p and q are processed identically. Knows nothing of models, acceptance or why a token is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.core import Rows
from foresay.processing import process_row
from foresay.randomness import Purpose, Streams

NUCLEUS = 256
"""Tokens looked at first when a law is truncated; eight times as many when they do not hold the nucleus."""
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Laws:
    """The laws at [B, T] places.

    points: [B, T] int64, the token of a point mass (the argmax elsewhere). probs: [N, V] float32, rows sum to 1, or
    None when every law is a point mass. index: [B, T] int64 into probs, -1 for a point mass.
    """

    points: torch.Tensor
    probs: torch.Tensor | None = None
    index: torch.Tensor | None = None

    def prob_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [B, K], K <= T -> [B, K], the probability of each under the law at its place."""
        width = token_ids.shape[1]
        hits = (self.points[:, :width] == token_ids).to(torch.float32)
        if self.probs is None or self.index is None:
            return hits
        index = self.index[:, :width]
        dense = self.probs[index.clamp(min=0), token_ids]
        return torch.where(index >= 0, dense, hits.to(dense.dtype))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a batch's parameters ask of the law builder; depends on the membership alone."""

    processed: tuple[int, ...]
    sampled: torch.Tensor | None
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    truncated: torch.Tensor | None
    """Places among the sampled rows with top-k or top-p; None when there are none."""
    any_min_p: bool


def _plan(rows: Rows, device: torch.device) -> _Plan:
    params = [row.params for row in rows]
    sampled = [i for i, p in enumerate(params) if not p.greedy]
    cut = [j for j, i in enumerate(sampled) if params[i].top_k or params[i].top_p < 1]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(params[i], name)) for i in sampled], device=device)

    return _Plan(
        processed=tuple(i for i, p in enumerate(params) if p.processes),
        sampled=torch.tensor(sampled, device=device) if sampled else None,
        temperature=column("temperature"),
        top_k=column("top_k").long(),
        top_p=column("top_p"),
        min_p=column("min_p"),
        truncated=torch.tensor(cut, device=device) if cut else None,
        any_min_p=any(params[i].min_p > 0 for i in sampled),
    )


def build_laws(logits: torch.Tensor, rows: Rows, continuation: torch.Tensor | None = None, first: int = 0) -> Laws:
    """Laws of the next token at T consecutive places of each row.

    logits: [B, T, V] raw scores. continuation: [B, >= first + T - 1] tokens guessed behind the committed ones, needed
    where a processor looks at the context; column t is scored after `first + t` of them.
    """
    plan: _Plan = rows.memo.get("plan") or rows.memo.setdefault("plan", _plan(rows, logits.device))
    if plan.processed:
        logits = _process(logits, rows, plan.processed, continuation, first)
    if plan.sampled is None:
        return Laws(logits.max(-1).indices)
    batch, width, vocab = logits.shape
    count = len(plan.sampled)
    points = (
        logits.max(-1).indices if count < batch else torch.zeros(batch, width, dtype=torch.int64, device=logits.device)
    )
    flat = logits.index_select(0, plan.sampled).reshape(count * width, vocab).float()
    index = torch.full((batch, width), -1, dtype=torch.int64, device=logits.device)
    index[plan.sampled] = torch.arange(count * width, device=logits.device).view(count, width)
    return Laws(points, _probabilities(flat, plan, width), index)


def _process(
    logits: torch.Tensor, rows: Rows, processed: Sequence[int], continuation: torch.Tensor | None, first: int
) -> torch.Tensor:
    out = logits.to(torch.float32, copy=True)
    guessed = continuation.tolist() if continuation is not None else [[]] * len(rows)
    for i in processed:
        for t in range(out.shape[1]):
            process_row(out[i, t], rows[i], guessed[i][: first + t])
    return out


def _probabilities(logits: torch.Tensor, plan: _Plan, width: int) -> torch.Tensor:
    """logits: [S * width, V] float32 of the sampled rows -> their laws, [S * width, V] float32."""

    def per_place(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(width) if width > 1 else values

    temperature = per_place(plan.temperature).clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    min_p = per_place(plan.min_p)
    if plan.truncated is None:
        return _min_p(logits.softmax(-1), min_p) if plan.any_min_p else logits.softmax(-1)
    top_k, top_p = per_place(plan.top_k), per_place(plan.top_p)
    if len(plan.truncated) * width == len(logits):
        return _truncate(logits, top_k, top_p, min_p)
    probs = _min_p(logits.softmax(-1), min_p)
    offsets = torch.arange(width, device=logits.device)
    cut = (plan.truncated[:, None] * width + offsets).reshape(-1)
    probs[cut] = _truncate(logits[cut], top_k[cut], top_p[cut], min_p[cut])
    return probs


def _min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    kept = torch.where(probs >= probs.amax(-1, keepdim=True) * min_p[:, None], probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Top-k, then top-p, then min-p, as transformers orders them, without sorting the vocabulary.

    logits: [N, V]; top_k [N] (0 = all), top_p [N], min_p [N] -> laws [N, V]. Looks at the NUCLEUS likeliest tokens
    and widens only when a nucleus does not fit.
    """
    vocab = logits.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    log_total = logits.logsumexp(-1)
    size = min(NUCLEUS, vocab) if logits.device.type == "cpu" else vocab
    while True:
        values, ids = logits.topk(size)
        weights = (values - values[:, :1]).exp()
        kth = values.gather(1, limit.clamp(max=size)[:, None] - 1)
        keep = values >= kth
        masses = (weights * keep).double()
        cumulative = masses.cumsum(-1)
        total = torch.where(limit < vocab, cumulative[:, -1], (log_total - values[:, 0]).double().exp())
        target = torch.where(top_p < 1, top_p.double() * total, torch.inf)
        last = values[:, -1]
        inside = (limit < size) & (last < kth[:, 0])
        # the nucleus' mass is a share of all that top-k keeps, which must be in sight or be everything
        known = inside | (limit == vocab) | (top_p >= 1)
        complete = inside | known & ((cumulative[:, -1] >= target) | (weights[:, -1] < min_p))
        if size == vocab or bool(complete.all()):
            break
        size = min(8 * size, vocab)
    keep &= cumulative - masses < target[:, None]
    keep &= weights >= min_p[:, None]
    kept = torch.where(keep, weights, 0.0)
    kept /= kept.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, ids, kept)


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw by inverting the distribution function, in two levels of float64 sums.

    probs: [N, V], non-negative, any positive total (it is normalised here). uniform: [N] float64 in (0, 1) -> [N] int64.
    A token of probability zero is never drawn.
    """
    count, vocab = probs.shape
    if vocab % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab % _BLOCK))
    blocks = probs.view(count, probs.shape[1] // _BLOCK, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    goal = uniform[:, None] * ends[:, -1:]
    block = torch.minimum((ends <= goal).sum(-1), _last_positive(sums))
    chosen = blocks[torch.arange(count, device=probs.device), block].double()
    inner = chosen.cumsum(-1)
    rest = goal[:, 0] - ends.gather(1, block[:, None])[:, 0] + inner[:, -1]
    place = torch.minimum((inner <= rest[:, None]).sum(-1), _last_positive(chosen))
    # rounding may leave `rest` a hair below zero: the first positive entry is then meant
    place = torch.maximum(place, (chosen > 0).to(torch.int8).argmax(-1))
    return block * _BLOCK + place


def _last_positive(values: torch.Tensor) -> torch.Tensor:
    reverse = (values > 0).flip(-1).to(torch.int8).argmax(-1)
    return values.shape[-1] - 1 - reverse


def draw(laws: Laws, streams: Streams, purpose: Purpose, first: int = 0) -> torch.Tensor:
    """One token from each law, [B, T] int64; place t uses the streams' number at offset `first + t`.

    Under coupled streams the token is argmax(log law + noise at its position), whatever the purpose.
    """
    if laws.probs is None or laws.index is None:
        return laws.points
    where, column = torch.nonzero(laws.index >= 0, as_tuple=True)
    probs = laws.probs[laws.index[where, column]]
    if streams.coupled:
        noise = streams.gumbel(where, column + first, probs.shape[1])
        tokens = (probs.log() + noise).argmax(-1)
    else:
        offsets = torch.arange(first, first + laws.index.shape[1], device=where.device)
        tokens = inverse_cdf(probs, streams.uniform(purpose, offsets)[where, column])
    out = laws.points.clone()
    out[where, column] = tokens
    return out
