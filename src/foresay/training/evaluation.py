"""How good a draft is, in the terms of decoding: acceptance, agreement, tokens per pass.

Owns the walk over held-out texts: from each place that a decode loop would stand at, how many guesses in a row are what the
target wrote. For greedy outputs that is what a replay of the draft gives. Knows no optimiser and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from foresay.training.batches import Batch
from foresay.training.losses import forward_kl
from foresay.training.students import Student


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a draft, over held-out texts; tuples are by step, the first guess after a pass first."""

    acceptance: tuple[float, ...]
    """Mean of sum of min(p, q): the chance that a sampled guess is accepted, when those before it were."""
    agreement: tuple[float, ...]
    """Share of places where the guess is the token that the target wrote."""
    divergence: float
    """Mean forward KL of the first guess."""
    tokens_per_pass: tuple[float, ...]
    """Tokens that a pass of the target commits, when 1, 2, ... tokens are guessed."""

    def as_dict(self) -> dict[str, float]:
        """Numbers by name, for a line of a log."""
        out = {"divergence": self.divergence, "tokens_per_pass": self.best}
        for name in ("acceptance", "agreement"):
            out |= {f"{name}_{i}": value for i, value in enumerate(getattr(self, name), 1)}
        return {name: round(value, 5) for name, value in out.items()}

    @property
    def best(self) -> float:
        """Tokens per pass at the longest drafts."""
        return self.tokens_per_pass[-1]


@torch.no_grad()
def evaluate(
    student: Student,
    batches: Iterable[Batch],
    device: torch.device,
    summed: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> Quality:
    """The quality of a draft over batches of texts that it does not learn from.

    summed: counts -> their sum over all processes, where each has batches of its own.
    """
    steps = student.steps
    accepted, agreed, counts, diverged = torch.zeros(4, steps, dtype=torch.float64)
    walks = _Walks(_lengths(steps))
    ids = None if student.token_ids is None else student.token_ids.to(device)
    for batch in (one.to(device) for one in batches):
        right = torch.zeros(steps, *batch.tokens.shape, dtype=torch.bool, device=device)
        for one in student.compared(batch):
            p, q = one.teacher.both(one.logits)
            draft_tokens = one.logits.argmax(-1)
            draft_tokens = draft_tokens if ids is None else ids[draft_tokens]
            hit = draft_tokens == batch.tokens[one.rows, one.places + 1]
            right[one.step, one.rows, one.places] = hit
            accepted[one.step] += float(torch.minimum(p, q)[:, :-1].sum())
            agreed[one.step] += float(hit.sum())
            counts[one.step] += len(hit)
            diverged[one.step] += float(forward_kl(p, q).sum())
        walks.add(batch, right, chains=steps == 1)
    every = summed(torch.cat([accepted, agreed, counts, diverged, walks.tokens, walks.passes]))
    sums, (tokens, passes) = every[: 4 * steps].view(4, steps), every[4 * steps :].view(2, -1)
    means = sums / sums[2].clamp(min=1.0)
    return Quality(
        tuple(means[0].tolist()),
        tuple(means[1].tolist()),
        float(means[3, 0]),
        tuple((tokens / passes.clamp(min=1.0)).tolist()),
    )


def _lengths(steps: int) -> Sequence[int]:
    return range(1, (steps if steps > 1 else 5) + 1)


class _Walks:
    """Decode loops over texts, one for each length of drafts."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.tokens, self.passes = torch.zeros(2, len(lengths), dtype=torch.float64)
        """[L], committed tokens and passes so far."""

    def add(self, batch: Batch, right: torch.Tensor, *, chains: bool) -> None:
        """right: [steps, B, S], whether the guess at a place is right, made that many steps on from what was shown.

        chains: the guess at a place is the same whatever was guessed before it.
        """
        right = right.cpu()
        for row, (start, size) in enumerate(zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True)):
            hits = right[:, row].tolist()
            for which, length in enumerate(self._lengths):
                place, passes = start - 1, 0  # of the last token that is there
                while place < size - 1:
                    good = 0
                    while good < length and hits[0 if chains else good][min(place + good, size - 1)]:
                        good += 1
                    place += min(good + 1, size - 1 - place)
                    passes += 1
                self.tokens[which] += size - start
                self.passes[which] += passes
