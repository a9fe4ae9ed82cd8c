"""Logits to laws: the only place that builds one.

A law is a distribution over the next token after all processing. A greedy law is a point mass and is held as its
token, never as a [V] one-hot; a sampled law is a row of probabilities. Target and draft go through the same code, so
that p and q are processed identically. Knows nothing of models, acceptance or why a token is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from foresay.decoding.processors import process_row, processes
from foresay.decoding.rows import Rows
from foresay.decoding.truncation import plan_of, probabilities
from foresay.errors import RequestError


@dataclass(frozen=True, slots=True)
class VocabularySubset:
    """Which tokens the columns of narrow scores are: those of a draft that can write K of the V tokens."""

    token_ids: torch.Tensor
    """[K] int64."""
    of_token: torch.Tensor
    """[V] int64, the column of each token; K for one that has none."""

    @classmethod
    def of(cls, token_ids: torch.Tensor, vocab_size: int) -> VocabularySubset:
        """token_ids: [K] int64, each once."""
        count = len(token_ids)
        of_token = torch.full((vocab_size,), count, dtype=torch.int64, device=token_ids.device)
        of_token[token_ids] = torch.arange(count, device=token_ids.device)
        return cls(token_ids, of_token)

    def widened(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., V]; tokens without a column get -inf."""
        whole = scores.new_full((*scores.shape[:-1], len(self.of_token)), -torch.inf)
        # a tenth of the time of assigning to an index
        return whole.scatter_(-1, self.token_ids.expand_as(scores), scores)


@dataclass(frozen=True, slots=True)
class Distributions:
    """The laws at [B, T] places.

    greedy_ids: [B, T] int64, the token of a point mass; at other places it means nothing. probs: [N, V] float32, rows sum
    to 1, or None when every law is a point mass. probs_row: [B, T] int64 into probs, -1 for a point mass. scores:
    [B, T, V], the raw logits the laws were made of, for what looks behind a point mass: length policies and lossy rules; of
    point masses alone they may be narrow, [B, T, K], by `subset`.
    """

    greedy_ids: torch.Tensor
    probs: torch.Tensor | None = None
    probs_row: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    subset: VocabularySubset | None = None
    failures: Mapping[tuple[int, int], RequestError] = field(default_factory=dict)
    """(row, place) -> why nothing can be written there; the law at such a place means nothing."""

    def prob_of(self, token_ids: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """The probability of each token under the law at its place. token_ids: [B, K] -> [B, K].

        places: [B, K] int64; None takes them in order, K <= T.
        """
        width = token_ids.shape[1]
        greedy = self.greedy_ids[:, :width] if places is None else self.greedy_ids.gather(1, places)
        hits = (greedy == token_ids).to(torch.float32)
        if self.probs is None or self.probs_row is None:
            return hits
        index = self.probs_row[:, :width] if places is None else self.probs_row.gather(1, places)
        dense = self.probs[index.clamp(min=0), token_ids]
        return torch.where(index >= 0, dense, hits.to(dense.dtype))

    def confidence(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [B, K], K <= T -> [B, K] float32, their softmax probabilities at temperature 1, unprocessed."""
        assert self.scores is not None
        scores, at = self.scores[:, : token_ids.shape[1]].float(), token_ids
        if self.subset is not None:
            at = self.subset.of_token[token_ids].clamp(max=scores.shape[-1] - 1)
        found = (scores.gather(-1, at[..., None])[..., 0] - scores.logsumexp(-1)).exp()
        return found if self.subset is None else found * (self.subset.token_ids[at] == token_ids)


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """Entropy of laws in nats, [..., V] -> [...]."""
    out: torch.Tensor = -torch.special.xlogy(probs, probs).sum(-1)
    return out


def likeliest(scores: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
    """The token of the greatest score at each place, the first of equals, [B, T, V] -> [B, T] int64; not a number is greatest.

    counts: as for `build_distributions`; 0 where nothing matters.
    """
    if scores.device.type != "cpu":
        return scores.max(-1).indices
    if counts is None or scores.shape[1] == 1:
        return torch.from_numpy(_readable(scores).argmax(-1))
    out = np.zeros(scores.shape[:2], dtype=np.int64)
    for row, found, count in zip(scores, out, counts, strict=True):
        _readable(row[: count + 1]).argmax(-1, out=found[: count + 1])
    return torch.from_numpy(out)


def _readable(scores: torch.Tensor) -> npt.NDArray[np.floating]:
    """For NumPy, whose argmax takes a tenth of the time of torch's on two cores, but knows no bf16."""
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    out: npt.NDArray[np.floating] = wide.detach().numpy()
    return out


def build_distributions(
    logits: torch.Tensor,
    rows: Rows,
    draft_ids: torch.Tensor | None = None,
    num_before: int = 0,
    counts: Sequence[int] | None = None,
    parents: torch.Tensor | None = None,
    *,
    greedy: bool = False,
) -> Distributions:
    """Distributions of the next token at T places of each row.

    logits: [B, T, V] raw scores. draft_ids: [B, >= num_before + T - 1] tokens drafted after the committed ones, needed
    where a processor looks at the context: place 0 follows `num_before` of them, place 1 + j also token num_before + j.
    counts: how many draft tokens of each row are real, so that place counts[i] is the last one that matters; None for a draft,
    whose laws may be anything. parents: [B, K] of a tree of draft tokens, as `Proposal.parents`. greedy: point masses for sampled
    rows too, as a draft may have them.
    """
    plan = plan_of(rows, logits.device)
    processed, failures = _process(logits, rows, draft_ids, num_before, counts, parents)
    batch, width, vocab = logits.shape
    if plan.sampled is None or greedy:
        greedy_ids = likeliest(logits, counts)
        for i, scores in processed.items():
            greedy_ids[i, : len(scores)] = likeliest(scores)
        return Distributions(greedy_ids, scores=logits, failures=failures)
    count = len(plan.sampled)
    greedy_ids = torch.zeros(batch, width, dtype=torch.int64, device=logits.device)
    if count < batch:
        greedy_ids = likeliest(logits, counts)
    chosen = logits if count == batch else logits.index_select(0, plan.sampled)
    flat = chosen.reshape(count * width, vocab).to(torch.float32, copy=True)  # it is overwritten
    for i, scores in processed.items():
        if i in plan.places:
            flat.view(count, width, vocab)[plan.places[i], : len(scores)] = scores
        else:
            greedy_ids[i, : len(scores)] = likeliest(scores)
    index = torch.full((batch, width), -1, dtype=torch.int64, device=logits.device)
    index[plan.sampled] = torch.arange(count * width, device=logits.device).view(count, width)
    return Distributions(greedy_ids, probabilities(flat, plan, width), index, logits, failures=failures)


def subset_distributions(
    logits: torch.Tensor, subset: VocabularySubset, rows: Rows, *, greedy: bool
) -> Distributions | None:
    """The laws of narrow scores [B, T, K] where all of them are point masses and nothing is processed; None elsewhere.

    greedy: as for `build_distributions`. A vocabulary is then never written out.
    """
    if not (greedy or all(row.params.greedy for row in rows)) or any(map(processes, rows)):
        return None
    return Distributions(subset.token_ids[likeliest(logits)], scores=logits, subset=subset)


def _process(
    logits: torch.Tensor,
    rows: Rows,
    draft_ids: torch.Tensor | None,
    num_before: int,
    counts: Sequence[int] | None,
    parents: torch.Tensor | None,
) -> tuple[dict[int, torch.Tensor], dict[tuple[int, int], RequestError]]:
    """The processed scores of the rows that ask for processing, [places that matter, V] float32 each, and what failed."""
    failures: dict[tuple[int, int], RequestError] = {}
    wanted = [i for i, row in enumerate(rows) if processes(row)]
    if not wanted:
        return {}, failures
    drafted = draft_ids.tolist() if draft_ids is not None else [[]] * len(rows)
    above = None if parents is None else parents.tolist()
    out: dict[int, torch.Tensor] = {}
    for i in wanted:
        places = logits.shape[1] if counts is None else counts[i] + 1
        out[i] = logits[i, :places].to(torch.float32, copy=True)
        tree = None if above is None else above[i]
        failed = process_row(out[i], rows[i], drafted[i], num_before, for_target=counts is not None, parents=tree)
        failures |= {(i, place): error for place, error in failed.items()}
    return out, failures
