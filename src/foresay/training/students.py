"""Drafts while they learn: what a draft makes of a batch, compared with what the target says.

Owns which law is compared with which, for a head that is unrolled over its own outputs and for a draft model. Knows no
optimiser. Places of a text and laws are counted alike: the law at place t is that of token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from foresay.models.heads.files import Head
from foresay.models.huggingface.causal import CausalModel
from foresay.training.batches import Batch
from foresay.training.losses import Objective, Teacher
from foresay.training.teacher import TeacherHead, finished


@dataclass(frozen=True, slots=True)
class Compared:
    """N laws of a draft, j tokens after the last that it was shown, and the target's.

    rows, places: [N], the text and place of each. logits: [N, K], the draft's. teacher: the target's laws, over the same columns.
    """

    step: int
    rows: torch.Tensor
    places: torch.Tensor
    logits: torch.Tensor
    teacher: Teacher


class Student(Protocol):
    """A draft that learns."""

    steps: int
    """Tokens that it drafts in a row while it learns."""
    token_ids: torch.Tensor | None
    """[K], the tokens that it can write; None: all."""

    def compared(self, batch: Batch) -> Iterator[Compared]:
        """Its laws and the target's, step by step, at the places that count."""
        ...


class HeadStudent(nn.Module):
    """A head on the target's hidden states, unrolled over its own outputs."""

    def __init__(self, head: Head, target: CausalModel, *, steps: int, decay: float) -> None:
        """steps: tokens that it drafts in a row. decay: the weight of each step's loss, as a share of that of the step before."""
        super().__init__()
        self.head, self.steps, self.decay = head.module, steps, decay
        self.token_ids = head.token_ids
        self._teacher = [TeacherHead(target, head.token_ids)]  # in a list: no part of this module
        self._embed = [target.model.get_input_embeddings()]

    def forward(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of weighted losses, sum of weights)."""
        return summed(self, batch, objective, self.decay)

    def compared(self, batch: Batch) -> Iterator[Compared]:
        """See Student. Pair i, j steps on, holds token i + 1 + j and has the law of place i + 1 + j."""
        teacher, taught = self._teacher[0], batch.taught()
        index = torch.full(taught.shape, -1, device=taught.device)
        index[taught] = torch.arange(int(taught.sum()), device=taught.device)
        probs = teacher.probs(batch.last[taught], batch.log_sum[taught])
        dtype = self.head.fc.weight.dtype
        pairs = batch.tokens.shape[1] - 1
        embedded = F.pad(self._embedded(batch.tokens[:, 1:]).to(dtype), (0, 0, 0, self.steps - 1))
        normed = self.head.unrolled(batch.states[:, :pairs].to(dtype), embedded, self.steps)
        own = self.head.lm_head
        weight = teacher.weight.to(normed[0].device) if own is None else own.weight
        for step, states in enumerate(normed):
            valid = F.pad(taught[:, 1 + step :], (0, step))[:, :pairs]
            rows, pair = valid.nonzero(as_tuple=True)
            places = pair + 1 + step
            logits = states[rows, pair] @ weight.T.to(states.dtype)
            yield Compared(step, rows, places, logits, Teacher(probs[index[rows, places]]))

    @torch.no_grad()
    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.head.embed_tokens
        out: torch.Tensor = (self._embed[0] if own is None else own)(tokens)
        return out


class ModelStudent(nn.Module):
    """A draft model of the target's vocabulary; it sees the text alone."""

    def __init__(self, model: Any, target: CausalModel, token_ids: torch.Tensor | None = None) -> None:
        """model: a causal transformers model. token_ids: [K], the tokens that its head is cut down to when it drafts."""
        super().__init__()
        self.model, self.steps = model, 1
        self.token_ids = token_ids
        self._teacher = [TeacherHead(target, token_ids)]

    def forward(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of losses, how many)."""
        return summed(self, batch, objective, 1.0)

    def compared(self, batch: Batch) -> Iterator[Compared]:
        """See Student."""
        taught = batch.taught()
        places = torch.arange(batch.tokens.shape[1], device=taught.device)
        hidden = self.model.base_model(
            input_ids=batch.tokens, attention_mask=(places < batch.sizes[:, None]).long(), use_cache=False
        ).last_hidden_state
        rows, at = taught.nonzero(as_tuple=True)
        probs = self._teacher[0].probs(batch.last[taught], batch.log_sum[taught])
        config = self.model.config.get_text_config(decoder=True)
        logits = finished(self._scores(hidden[taught])[:, : probs.shape[1]], config)
        yield Compared(0, rows, at, logits, Teacher(probs))

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head makes of hidden states [N, H], of all tokens or of those that it is cut down to."""
        head = self.model.get_output_embeddings()
        if self.token_ids is None:
            return head(hidden)  # type: ignore[no-any-return]
        ids = self.token_ids.to(hidden.device)
        return F.linear(hidden, head.weight[ids], None if head.bias is None else head.bias[ids])


def summed(student: Student, batch: Batch, objective: Objective, decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over all laws of the weighted loss, sum of the weights), float32 scalars."""
    total = torch.zeros((), device=batch.tokens.device)
    weights = torch.zeros((), device=batch.tokens.device)
    for one in student.compared(batch):
        loss = objective(*one.teacher.both(one.logits))
        total = total + decay**one.step * loss.sum()
        weights = weights + decay**one.step * len(loss)
    return total, weights
