"""Drafts during training: the draft's distributions for a batch, next to the target's.

Owns the alignment of distributions, for a head unrolled over its own outputs and for a draft model. Knows no optimiser. Positions
of a text and of distributions are the same: the distribution at position t predicts token t + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foresay.models.drafts.base import StoredDraft, embeddings_of
from foresay.models.drafts.block_config import BlockConfig
from foresay.models.drafts.block_module import BlockModule
from foresay.models.drafts.head import HeadModule
from foresay.models.drafts.path import CandidateSelector, MarkovHead, Step
from foresay.models.huggingface.causal import CausalModel
from foresay_lab.training.batches import Batch
from foresay_lab.training.losses import Objective
from foresay_lab.training.teacher import TeacherHead, finished


@dataclass(frozen=True, slots=True)
class Comparison:
    """N distributions of a draft, `step` tokens after the last target state that it received, and the target's.

    rows, positions: [N], the text and position of each. logits: [N, K], the draft's. probs: [N, K], the target's of the same
    tokens.
    """

    step: int
    rows: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    probs: torch.Tensor
    labels: torch.Tensor | None = None
    """[N] int64, the column of the text's next token; K for a token outside the draft vocabulary. None if it is not needed."""
    unary: torch.Tensor | None = None
    """[N, K], the logits that choose the candidates of a selector, which are trained, too; None without a selector."""
    confidence: torch.Tensor | None = None
    """[N], logits of the predicted acceptance; None if the draft predicts none."""


class Student(nn.Module, ABC):
    """A draft in training."""

    steps = 1
    """Tokens that it drafts in a row during training."""

    def __init__(self, target: CausalModel, token_ids: torch.Tensor | None, decay: float = 1.0) -> None:
        """token_ids: [K], the draft vocabulary; None: all tokens.

        decay: ratio of a position's loss weight to that of the position before it.
        """
        super().__init__()
        self.token_ids, self.decay = token_ids, decay
        self._teacher = TeacherHead(target, token_ids)

    def begin_batch(self, seed: int) -> None:
        """Draw the positions of the next batch, if any are drawn, by this seed, so that an interrupted run resumes exactly."""

    @abstractmethod
    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """Yield the draft's and the target's distributions, step by step, at the positions of the loss mask."""

    def forward(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum over all distributions of the weighted loss, sum of the weights), float32 scalars.

        The losses of a confidence and of the logits that choose candidates are added to that of their distribution.
        """
        total, weights = torch.zeros(2, device=batch.tokens.device).unbind()
        for one in self.comparisons(batch):
            loss, accepted = objective.of_logits(one.probs, one.logits, one.labels)
            if one.unary is not None:
                loss = loss + objective.of_logits(one.probs, one.unary, one.labels)[0]
            if one.confidence is not None:
                predicted, right = one.confidence.float(), accepted.clamp(0, 1)
                loss = loss + F.binary_cross_entropy_with_logits(predicted, right, reduction="none")
            total = total + self.decay**one.step * loss.sum()
            weights = weights + self.decay**one.step * len(loss)
        return total, weights

    def _probs(self, batch: Batch, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return the target's probabilities of the draft vocabulary at the N positions of a loss mask, [N, K]."""
        return self._teacher.probs(batch.last[loss_mask], batch.log_sum[loss_mask])


class DraftStudent(Student):
    """Base of drafts on the target's hidden states in training."""

    def __init__(self, draft: StoredDraft, target: CausalModel, *, decay: float) -> None:
        super().__init__(target, draft.token_ids, decay)
        self.draft = draft.module
        self._embed = [embeddings_of(target, draft.config)]  # in a list, so that it is not a submodule

    def _teachers(self, batch: Batch, loss_mask: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a function from the rows and positions [N] of a loss mask to the target's probabilities there, [N, K]."""
        index = torch.full(loss_mask.shape, -1, device=loss_mask.device)
        index[loss_mask] = torch.arange(int(loss_mask.sum()), device=loss_mask.device)
        probs = self._probs(batch, loss_mask)
        return lambda rows, positions: probs[index[rows, positions]]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, K] of the inputs of the output layer [N, D]."""
        own = self.draft.lm_head
        weight = self._teacher.weight.to(states.device) if own is None else own.weight
        return states @ weight.T.to(states.dtype)

    @torch.no_grad()
    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.draft.embed_tokens
        out: torch.Tensor = (self._embed[0] if own is None else own)(tokens)
        return out.to(self.draft.fc.weight.dtype)


class HeadStudent(DraftStudent):
    """A head, unrolled over its own outputs."""

    def __init__(self, draft: StoredDraft, target: CausalModel, *, decay: float, steps: int) -> None:
        """steps: tokens drafted in a row. decay: ratio of a step's loss weight to that of the previous step."""
        super().__init__(draft, target, decay=decay)
        self.steps = steps

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """See Student. Pair i consumes token i + 1 + step and predicts with the distribution of position i + 1 + step."""
        assert isinstance(self.draft, HeadModule)
        loss_mask = batch.loss_mask()
        teacher_at = self._teachers(batch, loss_mask)
        pairs = batch.tokens.shape[1] - 1
        embedded = F.pad(self._embedded(batch.tokens[:, 1:]), (0, 0, 0, self.steps - 1))
        normed = self.draft.unrolled(batch.states[:, :pairs].to(embedded.dtype), embedded, self.steps)
        for step, states in enumerate(normed):
            valid = F.pad(loss_mask[:, 1 + step :], (0, step))[:, :pairs]
            rows, pair = valid.nonzero(as_tuple=True)
            positions = pair + 1 + step
            yield Comparison(step, rows, positions, self._logits(states[rows, pair]), teacher_at(rows, positions))


class BlockStudent(DraftStudent):
    """A block drafter on many blocks of each text.

    An anchor is a position whose next token is the target's own output; its block predicts the tokens after it.
    """

    def __init__(self, draft: StoredDraft, target: CausalModel, *, decay: float, anchors: int | None) -> None:
        """anchors: blocks of each text in a training step; None for one at each possible position."""
        super().__init__(draft, target, decay=decay)
        assert isinstance(draft.config, BlockConfig)
        self.anchors, self.config = anchors, draft.config
        self.steps = draft.config.num_draft_tokens
        self._columns: torch.Tensor | None = None
        self._seed = 0
        if draft.token_ids is not None:
            self._columns = torch.full((target.vocab_size,), len(draft.token_ids))
            self._columns[draft.token_ids] = torch.arange(len(draft.token_ids))

    def begin_batch(self, seed: int) -> None:
        """Choose the anchors of the next batch by this seed."""
        self._seed = seed

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """See Student. The block of anchor a predicts token a + 1 + step with the distribution of position a + step."""
        assert isinstance(self.draft, BlockModule)
        loss_mask = batch.loss_mask()
        anchors, valid = self._anchors(loss_mask)
        length, first = self.config.block_size, self.config.block_size - self.steps
        tokens = batch.tokens
        ids = torch.full((*anchors.shape, length), self.config.mask_token_id, device=tokens.device)
        ids[..., 0] = tokens.gather(1, anchors)
        embedded = self._embedded(ids) * self.config.embedding_scale
        outputs = self.draft.blocks(batch.states.to(embedded.dtype), embedded, anchors)[:, :, first:]
        teacher_at = self._teachers(batch, loss_mask)
        padded = F.pad(loss_mask, (0, length))
        path, head = self.draft.path, self.draft.confidence_head
        states = outputs.new_zeros(*anchors.shape, 0 if path is None else path.state_size, dtype=torch.float32)
        for step in range(self.steps):
            inside = valid & padded.gather(1, anchors + step)
            rows, columns = inside.nonzero(as_tuple=True)
            positions = anchors[rows, columns] + step
            hidden, previous = outputs[rows, columns, step], tokens[rows, positions]
            unary = logits = self.config.scaled(self._logits(hidden))
            if path is not None:
                index, before = torch.full_like(rows, step), states[rows, columns]
                at = Step(unary, hidden, previous, self._embedded(previous), index, before)
                logits, after = path.step(at, lambda weight, x: F.linear(x, weight))
                states = states.index_put((rows, columns), after.to(states.dtype))
            confidence = None
            if head is not None:
                parts = [hidden]
                if self.config.confidence_reads_markov and isinstance(path, MarkovHead):
                    parts.append(path.markov_w1(previous))
                confidence = head.proj(torch.cat(parts, -1))[:, 0]
            following = tokens[rows, positions + 1]
            labels = following if self._columns is None else self._columns.to(tokens.device)[following]
            chooses = unary if isinstance(path, CandidateSelector) else None
            yield Comparison(step, rows, positions, logits, teacher_at(rows, positions), labels, chooses, confidence)

    def _anchors(self, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the anchors of each text, [B, A] int64 ascending, and which of them are real, [B, A] bool.

        loss_mask: [B, S], the positions that may be anchors. Evaluation takes them all.
        """
        counts = loss_mask.sum(1)
        most = int(counts.max())
        keys = torch.where(loss_mask, 0.0, 2.0)
        if self.training and self.anchors is not None and self.anchors < most:
            most = self.anchors
            chance = torch.Generator().manual_seed(self._seed)
            keys = keys + torch.rand(loss_mask.shape, generator=chance).to(loss_mask.device)
        chosen = keys.argsort(dim=1, stable=True)[:, :most]
        valid = torch.arange(most, device=loss_mask.device) < counts[:, None]
        order = torch.where(valid, chosen, loss_mask.shape[1]).argsort(dim=1)
        return chosen.gather(1, order) * valid, valid


class ModelStudent(Student):
    """A draft model with the target's vocabulary, which reads the text alone."""

    def __init__(self, model: Any, target: CausalModel, token_ids: torch.Tensor | None = None) -> None:
        """model: a causal transformers model. token_ids: [K], the draft vocabulary of decoding."""
        super().__init__(target, token_ids)
        self.model = model

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """See Student."""
        loss_mask = batch.loss_mask()
        positions = torch.arange(batch.tokens.shape[1], device=loss_mask.device)
        hidden = self.model.base_model(
            input_ids=batch.tokens, attention_mask=(positions < batch.sizes[:, None]).long(), use_cache=False
        ).last_hidden_state
        rows, label_positions = loss_mask.nonzero(as_tuple=True)
        probs = self._probs(batch, loss_mask)
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config(decoder=True)
        if self.token_ids is None:
            logits = head(hidden[loss_mask])
        else:
            ids = self.token_ids.to(hidden.device)
            logits = F.linear(hidden[loss_mask], head.weight[ids], None if head.bias is None else head.bias[ids])
        yield Comparison(0, rows, label_positions, finished(logits[:, : probs.shape[1]], config), probs)
