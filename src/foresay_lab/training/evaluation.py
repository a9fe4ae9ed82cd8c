"""Evaluation of a draft by decoding measures: acceptance, agreement, tokens per pass.

Owns the simulated decode loop over held-out texts: from each position at which a step would start, count the draft tokens in a
row that equal the target's. For greedy outputs this equals a replay of the draft. Knows no optimiser and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foresay_lab.training.batches import Batch
from foresay_lab.training.losses import aligned, forward_kl
from foresay_lab.training.students import Student


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a draft over held-out texts. Tuples are indexed by draft position."""

    acceptance: tuple[float, ...]
    """Mean of sum of min(p, q): the acceptance probability of a sampled draft token if the earlier ones were accepted."""
    agreement: tuple[float, ...]
    """Share of positions at which the draft token is the token that the target generated."""
    divergence: float
    """Mean forward KL at the first draft position."""
    tokens_per_pass: tuple[float, ...]
    """Tokens that a target pass commits with 1, 2, ... draft tokens."""
    candidates: float | None = None
    """Share of positions at which the token that the target generated is among a selector's candidates (DFlash2); None
    without a selector."""

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name, for a line of a log."""
        out = {"divergence": self.divergence, "tokens_per_pass": self.best}
        for name in ("acceptance", "agreement"):
            out |= {f"{name}_{i}": value for i, value in enumerate(getattr(self, name), 1)}
        out |= {} if self.candidates is None else {"candidates": self.candidates}
        return {name: round(value, 5) for name, value in out.items()}

    @property
    def best(self) -> float:
        """Tokens per pass at the largest draft length."""
        return self.tokens_per_pass[-1]


@torch.no_grad()
def evaluate(
    student: Student,
    batches: Iterable[Batch],
    device: torch.device,
    summed: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> Quality:
    """Return the quality of a draft over batches of held-out texts.

    summed: maps counts to their sum over all processes, if each process has its own batches.
    """
    steps = student.steps
    accepted, agreed, counts, diverged = torch.zeros(4, steps, dtype=torch.float64)
    lengths, chosen = range(1, (steps if steps > 1 else 5) + 1), torch.zeros(2, dtype=torch.float64)
    simulated = torch.zeros(2, len(lengths), dtype=torch.float64)
    ids = None if student.token_ids is None else student.token_ids.to(device)
    for batch in (one.to(device) for one in batches):
        correct = torch.zeros(steps, *batch.tokens.shape, dtype=torch.bool, device=device)
        for one in student.comparisons(batch):
            p, q = aligned(one.probs, one.logits)
            draft_tokens = one.logits.argmax(-1)
            draft_tokens = draft_tokens if ids is None else ids[draft_tokens]
            hit = draft_tokens == batch.tokens[one.rows, one.positions + 1]
            correct[one.step, one.rows, one.positions] = hit
            accepted[one.step] += float(torch.minimum(p, q)[:, :-1].sum())
            agreed[one.step] += float(hit.sum())
            counts[one.step] += len(hit)
            diverged[one.step] += float(forward_kl(p, q).sum())
            if one.unary is not None and one.labels is not None:
                scores = F.pad(one.logits, (0, 1), value=-torch.inf).gather(1, one.labels[:, None])
                chosen += torch.tensor([float(scores.isfinite().sum()), len(hit)], dtype=torch.float64)
        simulated += _simulated(batch, correct.cpu(), lengths)
    every = summed(torch.cat([accepted, agreed, counts, diverged, chosen, *simulated]))
    sums, (among, compared) = every[: 4 * steps].view(4, steps), every[4 * steps : 4 * steps + 2]
    tokens, passes = every[4 * steps + 2 :].view(2, -1)
    means = sums / sums[2].clamp(min=1.0)
    return Quality(
        tuple(means[0].tolist()),
        tuple(means[1].tolist()),
        float(means[3, 0]),
        tuple((tokens / passes.clamp(min=1.0)).tolist()),
        float(among / compared) if compared else None,
    )


def _simulated(batch: Batch, correct: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the committed tokens and the target passes of simulated decode loops over texts, [2, L]: one for each draft length.

    correct: [steps, B, S], True if the draft token at a position is correct, that many steps after the target's last states. With
    one step, it does not depend on earlier draft tokens.
    """
    out = torch.zeros(2, len(lengths), dtype=torch.float64)
    for row, (start, size) in enumerate(zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True)):
        hits = correct[:, row].tolist()
        for length_index, length in enumerate(lengths):
            position, passes = start - 1, 0  # index of the last committed token
            while position < size - 1:
                accepted = 0
                while accepted < length and hits[min(accepted, len(hits) - 1)][min(position + accepted, size - 1)]:
                    accepted += 1
                position += min(accepted + 1, size - 1 - position)
                passes += 1
            out[:, length_index] += torch.tensor([size - start, passes])
    return out
