"""Losses that measure the distance of a draft's distribution from the target's.

Owns the distances, the cross-entropy of the tokens that were generated, and the alignment of distributions over different tokens.
The total variation equals 1 - sum of min(p, q), the rejection probability of a draft token, so it trains acceptance directly; the
divergences have gradients where the supports do not overlap yet. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from foresay.errors import ConfigError, UnknownNameError

_MIN_PROB = 1e-9
"""Lower bound of probabilities in logarithms."""
_ROWS = 64
"""Rows of logits whose losses are computed at once: some MB for each value between them."""


def aligned(probs: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the tokens of a draft and of all others combined, [N, K + 1]: the target's, and the draft's.

    probs: [N, K], the target's of these tokens; the others are tokens that the draft cannot propose. logits: [N, K], the draft's.
    The draft's probability of others is 0, not the rest of a sum, whose rounding would have a gradient.
    """
    rest = (1 - probs.sum(-1, keepdim=True)).clamp(min=0)
    q = torch.softmax(logits.float(), -1)
    return torch.cat([probs, rest], -1), torch.cat([q, torch.zeros_like(rest, dtype=q.dtype)], -1)


def forward_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return sum of p log(p / q), [N, m] each -> [N]. It is large where the draft misses tokens that the target generates."""
    return (p * (p.clamp(min=_MIN_PROB).log() - q.clamp(min=_MIN_PROB).log())).sum(-1)


def reverse_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return sum of q log(q / p). It is large where the draft proposes tokens that the target does not generate."""
    return forward_kl(q, p)


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return half the sum of |p - q|: the rejection probability of a draft token."""
    return (p - q).abs().sum(-1) / 2


LOSSES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
}
CROSS_ENTROPY = "ce"
"""Name of the cross-entropy of the text's tokens, which does not read the target's distribution."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A weighted sum of distances."""

    shares: tuple[tuple[str, float], ...]

    @staticmethod
    def parse(text: str) -> Objective:
        """Parse "forward_kl" or "forward_kl=0.5, tv=0.5". Raises UnknownNameError and ConfigError."""
        shares = []
        for part in text.split(","):
            name, mark, value = (one.strip() for one in part.partition("="))
            if name not in (*LOSSES, CROSS_ENTROPY):
                raise UnknownNameError("loss", name, (*LOSSES, CROSS_ENTROPY))
            try:
                share = float(value) if mark else 1.0
            except ValueError:
                problem = f"has the share {value!r} of {name}, which must be a number"
                raise ConfigError(problem, param="loss", value=text) from None
            if not 0 < share < float("inf"):
                problem = f"has the share {value} of {name}, which must be positive and finite"
                raise ConfigError(problem, param="loss", value=text)
            shares.append((name, share))
        if len({name for name, _ in shares}) < len(shares):
            raise ConfigError("names a loss twice; name each once", param="loss", value=text)
        return Objective(tuple(shares))

    def __call__(self, p: torch.Tensor, q: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of target and draft probabilities, [N, m] each -> [N].

        labels: [N] int64, the column of each text's token, the last one for a token that cannot be drafted, which "ce" leaves
        out; None if they are not known, which "ce" requires.
        """
        parts = []
        for name, share in self.shares:
            if name != CROSS_ENTROPY:
                parts.append(share * LOSSES[name](p, q))
                continue
            if labels is None:
                text = f"applies to block drafters; choose one of {', '.join(LOSSES)}"
                raise ConfigError(text, param="loss", value=CROSS_ENTROPY)
            found = q.gather(1, labels[:, None])[:, 0].clamp(min=_MIN_PROB).log()
            parts.append(-share * torch.where(labels < q.shape[1] - 1, found, 0.0))
        return torch.stack(parts).sum(0)

    def of_logits(
        self, probs: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (losses, acceptance probabilities of a sampled draft token), [N] each; only losses have gradients.

        probs, logits: as in `aligned`. labels: as above. The gradients are computed at once, a few rows at a time: the values
        between logits and losses stay in the processor's cache, and no [N, K] tensor of them is kept for the backward pass.
        """
        return _RowLosses.apply(logits, self, probs, labels)  # type: ignore[no-any-return, no-untyped-call]

    def __str__(self) -> str:
        return ", ".join(name if share == 1 else f"{name}={share:g}" for name, share in self.shares)


class _RowLosses(torch.autograd.Function):
    """Losses of rows of logits, whose gradients are computed together with them."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, objective: Objective, probs: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (losses, acceptance probabilities), [N] each."""
        losses, accepted = torch.empty(2, len(logits), device=logits.device).unbind()
        gradients = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for start in range(0, len(logits), _ROWS):
            rows = slice(start, start + _ROWS)
            part = logits[rows].detach().requires_grad_(gradients is not None)
            with torch.set_grad_enabled(gradients is not None):
                p, q = aligned(probs[rows], part)
                loss = objective(p, q, None if labels is None else labels[rows])
                if gradients is not None:
                    (gradients[rows],) = torch.autograd.grad(loss.sum(), part)
            losses[rows] = loss.detach()
            accepted[rows] = torch.minimum(p, q.detach())[:, :-1].sum(-1)
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(accepted)
        return losses, accepted

    @staticmethod
    def backward(ctx: Any, *sums: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradients of the logits, scaled by those of the losses."""
        (gradients,) = ctx.saved_tensors
        return gradients * sums[0][:, None].to(gradients.dtype), None, None, None
