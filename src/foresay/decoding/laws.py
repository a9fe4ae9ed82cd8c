"""Logits to laws: the only place that builds one.

A law is a distribution over the next token after all processing. A greedy law is a point mass and is held as its
token, never as a [V] one-hot; a sampled law is a row of probabilities. Target and draft go through the same code, so
that p and q are processed identically. Knows nothing of models, acceptance or why a token is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.processors import process_row, processes
from foresay.decoding.rows import Rows
from foresay.decoding.truncation import plan_of, probabilities


@dataclass(frozen=True, slots=True)
class Laws:
    """The laws at [B, T] places.

    greedy_ids: [B, T] int64, the token of a point mass; at other places it means nothing. probs: [N, V] float32, rows sum
    to 1, or None when every law is a point mass. probs_row: [B, T] int64 into probs, -1 for a point mass. scores:
    [B, T, V], the raw logits the laws were made of, for what looks behind a point mass: length policies and lossy rules.
    """

    greedy_ids: torch.Tensor
    probs: torch.Tensor | None = None
    probs_row: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    def prob_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [B, K], K <= T -> [B, K], the probability of each under the law at its place."""
        width = token_ids.shape[1]
        hits = (self.greedy_ids[:, :width] == token_ids).to(torch.float32)
        if self.probs is None or self.probs_row is None:
            return hits
        index = self.probs_row[:, :width]
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
    plan = plan_of(rows, logits.device)
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
    return Laws(points, probabilities(flat, plan, width), index, logits)


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
