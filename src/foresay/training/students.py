"""Drafts during training: the draft's distributions for a batch, next to the target's.

Owns the alignment of distributions, for a head unrolled over its own outputs and for a draft model. Knows no optimiser. Positions
of a text and of distributions are the same: the distribution at position t predicts token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from foresay.models.heads.files import Head
from foresay.models.huggingface.causal import CausalModel
from foresay.training.batches import Batch
from foresay.training.losses import Objective, Teacher
from foresay.training.teacher import TeacherHead, finished


@dataclass(frozen=True, slots=True)
class Comparison:
    """N distributions of a draft, `step` tokens after the last target state that it received, and the target's.

    rows, positions: [N], the text and position of each. logits: [N, K], the draft's. teacher: the target's, over the same
    columns.
    """

    step: int
    rows: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    teacher: Teacher
    labels: torch.Tensor | None = None
    """[N] int64, the column of the text's next token; K for a token outside the draft vocabulary. None if it is not needed."""
    confidence: torch.Tensor | None = None
    """[N], logits of the predicted acceptance; None if the draft predicts none."""


class Student(Protocol):
    """A draft in training."""

    steps: int
    """Tokens that it drafts in a row during training."""
    token_ids: torch.Tensor | None
    """[K], the draft vocabulary; None: all tokens."""

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """Yield the draft's and the target's distributions, step by step, at the positions of the loss mask."""
        ...


@runtime_checkable
class ChoosesAnchors(Protocol):
    """A draft in training that draws some positions of each batch."""

    def begin_batch(self, seed: int) -> None:
        """Draw the positions of the next batch by this seed, so that an interrupted run resumes exactly."""
        ...


class HeadStudent(nn.Module):
    """A head on the target's hidden states, unrolled over its own outputs."""

    def __init__(self, head: Head, target: CausalModel, *, steps: int, decay: float) -> None:
        """steps: tokens drafted in a row. decay: ratio of a step's loss weight to that of the previous step."""
        super().__init__()
        self.head, self.steps, self.decay = head.module, steps, decay
        self.token_ids = head.token_ids
        self._teacher = [TeacherHead(target, head.token_ids)]  # in a list, so that it is not a submodule
        self._embed = [target.model.get_input_embeddings()]

    def forward(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of weighted losses, sum of weights)."""
        return summed(self, batch, objective, self.decay)

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """See Student. Pair i consumes token i + 1 + step and predicts with the distribution of position i + 1 + step."""
        teacher, loss_mask = self._teacher[0], batch.loss_mask()
        index = torch.full(loss_mask.shape, -1, device=loss_mask.device)
        index[loss_mask] = torch.arange(int(loss_mask.sum()), device=loss_mask.device)
        probs = teacher.probs(batch.last[loss_mask], batch.log_sum[loss_mask])
        dtype = self.head.fc.weight.dtype
        pairs = batch.tokens.shape[1] - 1
        embedded = F.pad(self._embedded(batch.tokens[:, 1:]).to(dtype), (0, 0, 0, self.steps - 1))
        normed = self.head.unrolled(batch.states[:, :pairs].to(dtype), embedded, self.steps)
        own = self.head.lm_head
        weight = teacher.weight.to(normed[0].device) if own is None else own.weight
        for step, states in enumerate(normed):
            valid = F.pad(loss_mask[:, 1 + step :], (0, step))[:, :pairs]
            rows, pair = valid.nonzero(as_tuple=True)
            positions = pair + 1 + step
            logits = states[rows, pair] @ weight.T.to(states.dtype)
            yield Comparison(step, rows, positions, logits, Teacher(probs[index[rows, positions]]))

    @torch.no_grad()
    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.head.embed_tokens
        out: torch.Tensor = (self._embed[0] if own is None else own)(tokens)
        return out


class ModelStudent(nn.Module):
    """A draft model with the target's vocabulary, which reads the text alone."""

    def __init__(self, model: Any, target: CausalModel, token_ids: torch.Tensor | None = None) -> None:
        """model: a causal transformers model. token_ids: [K], the draft vocabulary of decoding."""
        super().__init__()
        self.model, self.steps = model, 1
        self.token_ids = token_ids
        self._teacher = [TeacherHead(target, token_ids)]

    def forward(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of losses, number of losses)."""
        return summed(self, batch, objective, 1.0)

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """See Student."""
        loss_mask = batch.loss_mask()
        positions = torch.arange(batch.tokens.shape[1], device=loss_mask.device)
        hidden = self.model.base_model(
            input_ids=batch.tokens, attention_mask=(positions < batch.sizes[:, None]).long(), use_cache=False
        ).last_hidden_state
        rows, label_positions = loss_mask.nonzero(as_tuple=True)
        probs = self._teacher[0].probs(batch.last[loss_mask], batch.log_sum[loss_mask])
        config = self.model.config.get_text_config(decoder=True)
        logits = finished(self._scores(hidden[loss_mask])[:, : probs.shape[1]], config)
        yield Comparison(0, rows, label_positions, logits, Teacher(probs))

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [N, H], over all tokens or over the draft vocabulary."""
        head = self.model.get_output_embeddings()
        if self.token_ids is None:
            return head(hidden)  # type: ignore[no-any-return]
        ids = self.token_ids.to(hidden.device)
        return F.linear(hidden, head.weight[ids], None if head.bias is None else head.bias[ids])


def summed(student: Student, batch: Batch, objective: Objective, decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum over all distributions of the weighted loss, sum of the weights), float32 scalars."""
    total = torch.zeros((), device=batch.tokens.device)
    weights = torch.zeros((), device=batch.tokens.device)
    for one in student.comparisons(batch):
        loss, _ = objective.of_logits(one.teacher, one.logits, one.labels)
        total = total + decay**one.step * loss.sum()
        weights = weights + decay**one.step * len(loss)
    return total, weights
