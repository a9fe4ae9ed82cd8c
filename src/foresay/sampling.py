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
from foresay.processing import process_row, processes
from foresay.randomness import Purpose, Streams

NUCLEUS = 256
"""Tokens among which a nucleus is looked for first."""
_BLOCK = 128
_ROWS = 4
_BINS = 0x3F80 + 1
"""High halves of the floats from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Laws:
    """The laws at [B, T] places.

    points: [B, T] int64, the token of a point mass (the argmax elsewhere). probs: [N, V] float32, rows sum to 1, or
    None when every law is a point mass. index: [B, T] int64 into probs, -1 for a point mass. scores: [B, T, V], the raw
    logits the laws were made of, for what looks behind a point mass: length policies and lossy rules.
    """

    points: torch.Tensor
    probs: torch.Tensor | None = None
    index: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    def prob_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [B, K], K <= T -> [B, K], the probability of each under the law at its place."""
        width = token_ids.shape[1]
        hits = (self.points[:, :width] == token_ids).to(torch.float32)
        if self.probs is None or self.index is None:
            return hits
        index = self.index[:, :width]
        dense = self.probs[index.clamp(min=0), token_ids]
        return torch.where(index >= 0, dense, hits.to(dense.dtype))

    def confidence(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [B, K], K <= T -> [B, K] float32, their softmax probabilities at temperature 1, unprocessed."""
        assert self.scores is not None
        scores = self.scores[:, : token_ids.shape[1]].float()
        return (scores.gather(-1, token_ids[..., None])[..., 0] - scores.logsumexp(-1)).exp()


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """Entropy of laws in nats, [..., V] -> [...]."""
    out: torch.Tensor = -torch.special.xlogy(probs, probs).sum(-1)
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
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


def _plan(rows: Rows, device: torch.device) -> _Plan:
    key = f"plan {device}"
    if key in rows.memo:
        plan: _Plan = rows.memo[key]
        return plan
    params = [row.params for row in rows]
    sampled = [i for i, p in enumerate(params) if not p.greedy]
    cut = [j for j, i in enumerate(sampled) if params[i].top_k or params[i].top_p < 1]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(params[i], name)) for i in sampled], device=device)

    rows.memo[key] = plan = _Plan(
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


def build_laws(
    logits: torch.Tensor,
    rows: Rows,
    continuation: torch.Tensor | None = None,
    first: int = 0,
    counts: Sequence[int] | None = None,
) -> Laws:
    """Laws of the next token at T consecutive places of each row.

    logits: [B, T, V] raw scores. continuation: [B, >= first + T - 1] tokens guessed behind the committed ones, needed
    where a processor looks at the context; column t is scored after `first + t` of them. counts: how many guesses of each
    row are real, so that place counts[i] is the last one that matters; None for a draft, whose laws may be anything.
    """
    plan = _plan(rows, logits.device)
    processed = _process(logits, rows, continuation, first, counts)
    batch, width, vocab = logits.shape
    if plan.sampled is None:
        points = logits.max(-1).indices
        for i, scores in processed.items():
            points[i, : len(scores)] = scores.max(-1).indices
        return Laws(points, scores=logits)
    count = len(plan.sampled)
    points = torch.zeros(batch, width, dtype=torch.int64, device=logits.device)
    if count < batch:
        points = logits.max(-1).indices
    chosen = logits if count == batch else logits.index_select(0, plan.sampled)
    flat = chosen.reshape(count * width, vocab).to(torch.float32, copy=True)  # it is overwritten
    for i, scores in processed.items():
        if i in plan.places:
            flat.view(count, width, vocab)[plan.places[i], : len(scores)] = scores
        else:
            points[i, : len(scores)] = scores.max(-1).indices
    index = torch.full((batch, width), -1, dtype=torch.int64, device=logits.device)
    index[plan.sampled] = torch.arange(count * width, device=logits.device).view(count, width)
    return Laws(points, _probabilities(flat, plan, width), index, logits)


def _process(
    logits: torch.Tensor, rows: Rows, continuation: torch.Tensor | None, first: int, counts: Sequence[int] | None
) -> dict[int, torch.Tensor]:
    """The processed scores of the rows that ask for processing, [places that matter, V] float32 each."""
    asking = [i for i, row in enumerate(rows) if processes(row)]
    if not asking:
        return {}
    guessed = continuation.tolist() if continuation is not None else [[]] * len(rows)
    out: dict[int, torch.Tensor] = {}
    for i in asking:
        matter = logits.shape[1] if counts is None else counts[i] + 1
        out[i] = logits[i, :matter].to(torch.float32, copy=True)
        process_row(out[i], rows[i], guessed[i], first, strict=counts is not None)
    return out


def _probabilities(logits: torch.Tensor, plan: _Plan, width: int) -> torch.Tensor:
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
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, plan: _Plan
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


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Draw by inverting the distribution function, in two levels: a block of the vocabulary, then a token in it.

    probs: [N, V], non-negative, any positive total (it is normalised here). uniform: [M] float64 in (0, 1). rows: [M]
    int64, which laws to draw from; None draws from each in order. Returns [M] int64. A token of probability zero is
    never drawn.
    """
    if rows is not None and 2 * len(rows) < len(probs):
        probs, rows = probs[rows], None
    count, vocab = probs.shape
    if vocab % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab % _BLOCK))
    blocks = probs.view(count, probs.shape[1] // _BLOCK, _BLOCK)
    sums = blocks.sum(-1).double()
    if rows is None:
        rows = torch.arange(count, device=probs.device)
    else:
        sums = sums[rows]
    ends = sums.cumsum(-1)
    goal = uniform[:, None] * ends[:, -1:]
    block = torch.minimum((ends <= goal).sum(-1), _last_positive(sums))
    chosen = blocks[rows, block].double()
    inner = chosen.cumsum(-1)
    before = ends.gather(1, block[:, None]) - sums.gather(1, block[:, None])
    rest = (goal - before)[:, 0]
    place = torch.minimum((inner <= rest[:, None]).sum(-1), _last_positive(chosen))
    # rounding may leave `rest` a hair below zero: the first positive entry is then meant
    place = torch.maximum(place, (chosen > 0).to(torch.int8).argmax(-1))
    return block * _BLOCK + place


def _last_positive(values: torch.Tensor) -> torch.Tensor:
    reverse = (values > 0).flip(-1).to(torch.int8).argmax(-1)
    return values.shape[-1] - 1 - reverse


def draw(
    laws: Laws, streams: Streams, purpose: Purpose, first: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """One token from each law, [B, T] int64; place t uses the streams' number at offset `first + t`.

    Under coupled streams the token is argmax(log law + noise at its position), whatever the purpose. counts: places past
    counts[i] of row i are not drawn; None draws all.
    """
    if laws.probs is None or laws.index is None:
        return laws.points
    wanted = laws.index >= 0
    if counts is not None:
        limit = torch.tensor(counts, device=wanted.device)[:, None]
        wanted &= torch.arange(wanted.shape[1], device=wanted.device) <= limit
    where, column = torch.nonzero(wanted, as_tuple=True)
    rows = laws.index[where, column]
    if streams.coupled:
        tokens = _coupled(laws.probs, rows, streams, where, column + first)
    else:
        offsets = torch.arange(first, first + laws.index.shape[1], device=where.device)
        tokens = inverse_cdf(laws.probs, streams.uniform(purpose, offsets)[where, column], rows)
    out = laws.points.clone()
    out[where, column] = tokens
    return out


def _coupled(
    probs: torch.Tensor, rows: torch.Tensor, streams: Streams, where: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """argmax(log p + Gumbel noise) at each place, [M]. Noise is made for the tokens of the law alone, place by place."""
    out = torch.empty_like(rows)
    for i in range(len(rows)):
        law = probs[rows[i]]
        tokens = torch.nonzero(law)[:, 0]
        noise = streams.gumbel(where[i], offsets[i], tokens)
        out[i] = tokens[noise.add_(law[tokens].log()).argmax()]
    return out
