"""Logits to distributions over the next token, after all processing: the only module that builds them.

A greedy distribution is a point mass, stored as its token and never as a [V] one-hot; a sampled one is a row of probabilities.
Target and draft go through the same code, so that p and q are processed identically. Knows no models and no acceptance rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from foresay.decoding import devices, kernels
from foresay.decoding.devices import is_remote
from foresay.decoding.processors import Processed, process_rows, processes
from foresay.decoding.rows import Rows
from foresay.decoding.sums import row_sums
from foresay.decoding.truncation import plan_of, probabilities
from foresay.errors import RequestError


@dataclass(frozen=True, slots=True)
class VocabularySubset:
    """K of the V tokens of a vocabulary: those that a draft with a trimmed output layer can generate."""

    token_ids: torch.Tensor
    """[K] int64."""
    of_token: torch.Tensor
    """[V] int64, index of each token in the subset; K for tokens outside."""

    @classmethod
    def of(cls, token_ids: torch.Tensor, vocab_size: int) -> VocabularySubset:
        """Build the subset of distinct token_ids, [K] int64."""
        count = len(token_ids)
        of_token = torch.full((vocab_size,), count, dtype=torch.int64, device=token_ids.device)
        of_token[token_ids] = torch.arange(count, device=token_ids.device)
        return cls(token_ids, of_token)

    def widened(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., V]; tokens outside the subset get -inf."""
        whole = scores.new_full((*scores.shape[:-1], len(self.of_token)), -torch.inf)
        # a tenth of the time of assigning to an index
        return whole.scatter_(-1, self.token_ids.expand_as(scores), scores)


@dataclass(frozen=True, slots=True)
class Distributions:
    """Distributions of the next token at [B, T] positions."""

    greedy_ids: torch.Tensor
    """[B, T] int64, the token of each point mass; undefined elsewhere."""
    probs: torch.Tensor | None = None
    """[N, V] float32, rows sum to 1; None if every distribution is a point mass."""
    probs_row: torch.Tensor | None = None
    """[B, T] int64, rows of `probs`, -1 for a point mass; None if every distribution is one."""
    scores: torch.Tensor | None = None
    """[B, T, V], the raw logits, which length policies and lossy rules read; [B, T, K] by `subset` if all distributions are point
    masses."""
    subset: VocabularySubset | None = None
    """The tokens that have scores; None for the whole vocabulary."""
    failures: Mapping[tuple[int, int], RequestError] = field(default_factory=dict)
    """(row, position) -> why no token can be generated there; the distribution at such a position is undefined."""

    def prob_of(self, token_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the probability of each token at its position, [B, K].

        Args:
            token_ids: [B, K] int64.
            positions: [B, K] int64; None stands for 0, 1, ..., K - 1 (K <= T).
        """
        width = token_ids.shape[1]
        greedy = self.greedy_ids[:, :width] if positions is None else self.greedy_ids.gather(1, positions)
        hits = (greedy == token_ids).to(torch.float32)
        if self.probs is None or self.probs_row is None:
            return hits
        index = self.probs_row[:, :width] if positions is None else self.probs_row.gather(1, positions)
        dense = self.probs[index.clamp(min=0), token_ids]
        return torch.where(index >= 0, dense, hits.to(dense.dtype))

    def confidence(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return softmax probabilities of the raw logits at temperature 1, [B, K] float32.

        Args:
            token_ids: [B, K] int64, K <= T, the tokens at the first K positions.
        """
        assert self.scores is not None
        scores, at = self.scores[:, : token_ids.shape[1]].float(), token_ids
        if self.subset is not None:
            at = self.subset.of_token[token_ids].clamp(max=scores.shape[-1] - 1)
        top = scores.amax(-1, keepdim=True)
        found = (scores.gather(-1, at[..., None]) - top).exp()[..., 0] / row_sums((scores - top).exp())
        return found if self.subset is None else found * (self.subset.token_ids[at] == token_ids)


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, [..., V] -> [...]."""
    return -row_sums(torch.special.xlogy(probs, probs))


def likeliest(scores: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
    """Argmax of the scores at each position, [B, T, V] -> [B, T] int64. The first of equal scores; NaN counts as the greatest.

    counts: as in `build_distributions`; positions after counts[i] of row i are left 0.
    """
    if is_remote(scores.device):
        return scores.max(-1).indices
    if counts is None or scores.shape[1] == 1:
        return torch.from_numpy(_readable(scores).argmax(-1))
    out = np.zeros(scores.shape[:2], dtype=np.int64)
    for row, found, count in zip(scores, out, counts, strict=True):
        _readable(row[: count + 1]).argmax(-1, out=found[: count + 1])
    return torch.from_numpy(out)


def _readable(scores: torch.Tensor) -> npt.NDArray[np.floating]:
    """Scores as a NumPy array: NumPy's argmax takes a tenth of the time of torch's on two cores, but has no bf16."""
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
    """Return the distributions of the next token at T positions of each row.

    logits: [B, T, V], raw. draft_ids: [B, >= num_before + T - 1], tokens drafted after the committed ones, required if a
    processor reads the context: position 0 follows `num_before` of them, position 1 + j also token num_before + j. counts:
    number of draft tokens of each row, so that position counts[i] is the last one used; None for a draft model, whose
    distributions may be arbitrary. parents: [B, K] of a tree, as `Proposal.parents`. greedy: point masses for sampled rows too,
    which only a draft may have.
    """
    plan, device = plan_of(rows, logits.device), logits.device
    processed = process_rows(logits, rows, draft_ids, num_before, counts, parents)
    failures = {} if processed is None else processed.failures
    batch, width, vocab = logits.shape
    if plan.sampled is None or greedy:
        greedy_ids = likeliest(logits, counts)
        if processed is not None:
            _take_likeliest(greedy_ids, processed, processed.rows)
        return Distributions(greedy_ids, scores=logits, failures=failures)
    count = len(plan.sampled)
    greedy_ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
    if count < batch:
        greedy_ids = likeliest(logits, counts)
    chosen = logits if count == batch else logits.index_select(0, plan.sampled)
    flat = chosen.reshape(count * width, vocab)
    if processed is not None or not kernels.uses_kernels(flat.device):
        flat = flat.to(torch.float32, copy=True)  # it is overwritten
    if processed is not None:
        sampled = {plan.index_of[i]: j for j, i in enumerate(processed.rows) if i in plan.index_of}
        own = processed.scores.index_select(0, devices.to_device(list(sampled.values()), device))
        flat.view(count, width, vocab)[:, : own.shape[1]].index_copy_(0, devices.to_device(list(sampled), device), own)
        _take_likeliest(greedy_ids, processed, [i for i in processed.rows if i not in plan.index_of])
    index = torch.full((batch, width), -1, dtype=torch.int64, device=device)
    index[plan.sampled] = torch.arange(count * width, device=device).view(count, width)
    return Distributions(greedy_ids, probabilities(flat, plan, width), index, logits, failures=failures)


def _take_likeliest(greedy_ids: torch.Tensor, processed: Processed, rows: Sequence[int]) -> None:
    """Replace the greedy tokens [B, T] of some rows by those of their processed scores, in place."""
    if not rows:
        return
    device, scores = greedy_ids.device, processed.scores
    own = scores
    if len(rows) < len(processed.rows):
        own = scores.index_select(0, devices.to_device([processed.rows.index(i) for i in rows], device))
    greedy_ids[:, : scores.shape[1]].index_copy_(0, devices.to_device(list(rows), device), likeliest(own))


def subset_distributions(
    logits: torch.Tensor, subset: VocabularySubset, rows: Rows, *, greedy: bool
) -> Distributions | None:
    """Distributions of subset scores [B, T, K] if all are point masses and no row is processed, else None.

    greedy: as in `build_distributions`. The scores are then never widened to the whole vocabulary.
    """
    if not (greedy or all(row.params.greedy for row in rows)) or any(map(processes, rows)):
        return None
    return Distributions(subset.token_ids[likeliest(logits)], scores=logits, subset=subset)
