"""A block drafter during training: its distributions for all positions of many blocks, next to the target's.

Owns the choice of anchors, the Markov head's conditioning on the text's tokens and the confidence loss. An anchor is a position
whose next token is the target's own output; its block predicts the tokens after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from foresay.models.blocks.files import Block
from foresay.models.huggingface.causal import CausalModel
from foresay.training.batches import Batch
from foresay.training.losses import Objective, Teacher
from foresay.training.students import Comparison
from foresay.training.teacher import TeacherHead


class BlockStudent(nn.Module):
    """A block drafter on the target's hidden states."""

    def __init__(
        self, block: Block, target: CausalModel, *, anchors: int | None, decay: float, confidence: float = 1.0
    ) -> None:
        """anchors: blocks of each text in a training step; None for one at each possible position. decay: ratio of a position's
        loss weight to that of the position before it. confidence: weight of the confidence loss."""
        super().__init__()
        self.block, self.decay, self.anchors, self.confidence = block.module, decay, anchors, confidence
        self.steps, self.token_ids = block.config.num_draft_tokens, block.token_ids
        self._teacher = [TeacherHead(target, block.token_ids)]  # in a list, so that it is not a submodule
        self._embed = [target.model.get_input_embeddings()]
        self._columns: torch.Tensor | None = None
        self._seed = 0
        if block.token_ids is not None:
            self._columns = torch.full((target.vocab_size,), len(block.token_ids))
            self._columns[block.token_ids] = torch.arange(len(block.token_ids))

    def begin_batch(self, seed: int) -> None:
        """Choose the anchors of the next batch by this seed, so that an interrupted run resumes exactly."""
        self._seed = seed

    def forward(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of weighted losses, sum of weights), the confidence loss included."""
        total = torch.zeros((), device=batch.tokens.device)
        weights = torch.zeros((), device=batch.tokens.device)
        for one in self.comparisons(batch):
            loss, accepted = objective.of_logits(one.teacher, one.logits, one.labels)
            if one.confidence is not None:
                loss = loss + self.confidence * F.binary_cross_entropy_with_logits(
                    one.confidence.float(), accepted.clamp(0, 1), reduction="none"
                )
            total = total + self.decay**one.step * loss.sum()
            weights = weights + self.decay**one.step * len(loss)
        return total, weights

    def comparisons(self, batch: Batch) -> Iterator[Comparison]:
        """See Student. The block of anchor a predicts token a + 1 + step with the distribution of position a + step."""
        teacher, loss_mask = self._teacher[0], batch.loss_mask()
        anchors, valid = self._anchors(loss_mask)
        config, dtype = self.block.config, self.block.fc.weight.dtype
        length, first = config.block_size, config.block_size - self.steps
        tokens = batch.tokens
        ids = torch.full((*anchors.shape, length), config.mask_token_id, device=tokens.device)
        ids[..., 0] = tokens.gather(1, anchors)
        outputs = self.block.blocks(batch.states.to(dtype), self._embedded(ids).to(dtype), anchors)[:, :, first:]
        index = torch.full(loss_mask.shape, -1, device=loss_mask.device)
        index[loss_mask] = torch.arange(int(loss_mask.sum()), device=loss_mask.device)
        probs = teacher.probs(batch.last[loss_mask], batch.log_sum[loss_mask])
        own = self.block.lm_head
        weight = teacher.weight.to(tokens.device) if own is None else own.weight
        padded = F.pad(loss_mask, (0, length))
        for step in range(self.steps):
            inside = valid & padded.gather(1, anchors + step)
            rows, columns = inside.nonzero(as_tuple=True)
            positions = anchors[rows, columns] + step
            states, previous = outputs[rows, columns, step], tokens[rows, positions]
            logits = states @ weight.T.to(states.dtype)
            markov, head = self.block.markov_head, self.block.confidence_head
            if markov is not None:
                logits = logits + markov.markov_w2(markov.markov_w1(previous))
            confidence = None
            if head is not None:
                parts = [states]
                if config.confidence_reads_markov and markov is not None:
                    parts.append(markov.markov_w1(previous))
                confidence = head.proj(torch.cat(parts, -1))[:, 0]
            following = tokens[rows, positions + 1]
            labels = following if self._columns is None else self._columns.to(tokens.device)[following]
            yield Comparison(step, rows, positions, logits, Teacher(probs[index[rows, positions]]), labels, confidence)

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

    @torch.no_grad()
    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.block.embed_tokens
        out: torch.Tensor = (self._embed[0] if own is None else own)(tokens)
        return out
