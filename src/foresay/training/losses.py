"""How far a draft's law is from the target's, as losses to train a draft on.

Owns the distances and what stands for a law: all its probabilities, those of some tokens, or the likeliest k and what is left.
The total variation is one less the chance that a drafted token is accepted (METHODS: sum of min(p, q)), so it trains acceptance
itself; the divergences have gradients where it has none yet. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from foresay.errors import ConfigError, UnknownNameError

_LEAST = 1e-9
"""Probabilities below this are taken for this in logarithms."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's laws of N next tokens, as far as they are known.

    probs: [N, m] of the tokens `ids` ([m] the same for all, [N, m] each its own; None: all in order). Probability that they
    leave over belongs to tokens of which no more is known.
    """

    probs: torch.Tensor
    ids: torch.Tensor | None = None

    @staticmethod
    def of_logits(logits: torch.Tensor, ids: torch.Tensor | None = None) -> Teacher:
        """From the target's logits [N, V]; ids: [m], the tokens that the draft can write."""
        probs = torch.softmax(logits.float(), -1)
        return Teacher(probs if ids is None else probs[:, ids], ids)

    @staticmethod
    def likeliest(logits: torch.Tensor, count: int) -> Teacher:
        """The `count` likeliest tokens of each law, for laws that are kept on disk."""
        probs, ids = torch.softmax(logits.float(), -1).topk(min(count, logits.shape[-1]))
        return Teacher(probs, ids)

    def rest(self) -> torch.Tensor:
        """What the known tokens leave over, [N]."""
        return (1 - self.probs.sum(-1)).clamp(min=0)

    def both(self, logits: torch.Tensor, columns: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's and the draft's probabilities of the known tokens and of the rest as one, [N, m + 1] each.

        logits: the draft's, [N, W]. columns: [V] int64, the column of each token, -1 for those that the draft cannot write;
        None where column i is token i.
        """
        q = torch.softmax(logits.float(), -1)
        known = q
        if self.ids is not None:
            places = (self.ids if columns is None else columns[self.ids]).expand(len(q), -1)
            known = q.gather(1, places.clamp(min=0)) * (places >= 0)
        left = (1 - known.sum(-1)).clamp(min=0)
        return torch.cat([self.probs, self.rest()[:, None]], -1), torch.cat([known, left[:, None]], -1)


def forward_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """sum of p log(p / q), [N, m] each -> [N]: the draft must not miss what the target writes."""
    return (p * (p.clamp(min=_LEAST).log() - q.clamp(min=_LEAST).log())).sum(-1)


def reverse_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """sum of q log(q / p): the draft must not write what the target does not."""
    return forward_kl(q, p)


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Half the sum of |p - q|: one less the chance that a drafted token is accepted."""
    return (p - q).abs().sum(-1) / 2


LOSSES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A mixture of distances, each with its share."""

    shares: tuple[tuple[str, float], ...]

    @staticmethod
    def parse(text: str) -> Objective:
        """From "forward_kl", or "forward_kl=0.5, tv=0.5". Raises UnknownNameError and ConfigError."""
        shares = []
        for part in text.split(","):
            name, mark, value = (one.strip() for one in part.partition("="))
            if name not in LOSSES:
                raise UnknownNameError("loss", name, LOSSES)
            try:
                share = float(value) if mark else 1.0
            except ValueError:
                raise ConfigError(f"the share of {name} must be a number, not {value!r}") from None
            if not 0 < share < float("inf"):
                raise ConfigError(f"the share of {name} must be above zero, not {value}")
            shares.append((name, share))
        if len({name for name, _ in shares}) < len(shares):
            raise ConfigError(f"a loss is named twice in {text!r}")
        return Objective(tuple(shares))

    def __call__(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """The target's and the draft's probabilities, [N, m] each -> [N]."""
        return torch.stack([share * LOSSES[name](p, q) for name, share in self.shares]).sum(0)

    def __str__(self) -> str:
        return ", ".join(name if share == 1 else f"{name}={share:g}" for name, share in self.shares)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a draft would do, over N tokens."""

    acceptance: float
    """Mean of sum of min(p, q): the chance that a sampled draft token is accepted."""
    greedy: float
    """Share of tokens that both find likeliest."""
    divergence: float
    """Mean forward KL."""

    @staticmethod
    def of(p: torch.Tensor, q: torch.Tensor) -> Agreement:
        """From the probabilities that `Teacher.both` gives."""
        return Agreement(
            float(torch.minimum(p, q)[:, :-1].sum(-1).mean()),
            float((p.argmax(-1) == q.argmax(-1)).double().mean()),
            float(forward_kl(p, q).mean()),
        )
