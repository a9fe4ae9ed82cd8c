"""Training and evaluation of the acceptance head (SpecDec++, Huang et al. 2024).

Owns the loss, weighted binary cross-entropy on soft labels, and the quality measures: mean KL divergence of labels from
predictions, and calibration. The draft is frozen; its hidden states come from files. Knows no decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foresay.checks import check_float, check_int
from foresay.errors import ConfigError
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay_lab.training.accepted import Examples

_WARMUP = 0.03
_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePlan:
    """Hyperparameters for training an acceptance head. Raises ConfigError for values out of range."""

    blocks: int = 3
    rejection_weight: float = 6.0
    """Weight of the loss term of rejection."""
    mixing: float = 0.15
    """Loss weight of a token whose predecessors are certainly rejected; the weight is 1 if they are certainly accepted."""
    epochs: int = 3
    batch_size: int = 256
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("blocks", self.blocks, 0, 64)
        check_float("rejection_weight", self.rejection_weight, 0.0, 1e6)
        check_float("mixing", self.mixing, 0.0, 1.0)
        check_int("epochs", self.epochs, 1, 10_000)
        check_int("batch_size", self.batch_size, 1)
        check_float("rate", self.rate, 0.0, 1.0)
        check_int("seed", self.seed, 0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Quality of an acceptance head over N tokens."""

    divergence: float
    """Mean KL(label || prediction), in nats."""
    without: float
    """The same for a head that always predicts the mean label."""
    error: float
    """Expected calibration error: mean |prediction - label| over bins of the prediction, weighted by their tokens."""
    bins: tuple[tuple[float, float, int], ...]
    """(mean prediction, mean label, tokens) of each bin that is not empty."""


def weighted_loss(scores: torch.Tensor, labels: torch.Tensor, rejection_weight: float) -> torch.Tensor:
    """Return -(label log c + weight (1 - label) log(1 - c)), [N, 2] and [N] -> [N]; c is the softmax of the second score."""
    logs = F.log_softmax(scores.float(), -1)
    return -(labels * logs[:, 1] + rejection_weight * (1 - labels) * logs[:, 0])


def train_acceptance(
    examples: Examples, plan: AcceptancePlan, on_progress: Callable[[float, str], None] = lambda share, note: None
) -> AcceptanceHead:
    """Train a head that predicts the labels of `examples`. Raises ConfigError for empty examples."""
    count = len(examples)
    if count == 0:
        text = "has no drafted tokens to train on; collect data with another draft or more prompts"
        raise ConfigError(text, param="examples")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        head = AcceptanceHead(int(examples.hidden.shape[1]), plan.blocks)
    generator = torch.Generator().manual_seed(plan.seed)
    weight = plan.mixing + (1 - plan.mixing) * examples.reached.float()
    optimiser = torch.optim.AdamW(head.parameters(), lr=plan.rate, weight_decay=0.0)
    steps = plan.epochs * -(-count // plan.batch_size)
    step, last = 0, 0.0
    for _ in range(plan.epochs):
        for indices in torch.randperm(count, generator=generator).split(plan.batch_size):  # type: ignore[no-untyped-call]
            share = step / steps
            rate = share / _WARMUP if share < _WARMUP else (1 + math.cos(math.pi * share)) / 2
            for group in optimiser.param_groups:
                group["lr"] = plan.rate * rate
            scores, labels = head(examples.hidden[indices].float()), examples.labels[indices].float()
            losses = weighted_loss(scores, labels, plan.rejection_weight)
            loss = (losses * weight[indices]).sum() / weight[indices].sum().clamp(min=1e-6)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()
            step, last = step + 1, float(loss.detach())
            on_progress(step / steps, f"loss {last:.3f}")
    return head.eval()


def unshifted(predictions: torch.Tensor, rejection_weight: float) -> torch.Tensor:
    """Invert the shift by a rejection weight w, elementwise: c -> w c / (1 - c + w c).

    The weighted loss is minimal at c = a / (a + w (1 - a)) for acceptance probability a, which is below a for w > 1.
    """
    weighted = rejection_weight * predictions
    return weighted / (1 - predictions + weighted)


@torch.no_grad()
def evaluate_acceptance(head: AcceptanceHead, examples: Examples, rejection_weight: float = 1.0) -> Calibration:
    """Compare a head's predictions with the labels. Raises ConfigError for hidden states of another draft.

    rejection_weight: the weight used in training, whose shift is first removed from the predictions; 1 leaves them unchanged.
    """
    if examples.hidden.shape[1] != head.hidden_size:
        text = f"takes hidden states of size {head.hidden_size}, and the data has size {examples.hidden.shape[1]}"
        raise ConfigError(text, param="head")
    labels = examples.labels.double()
    predicted = torch.cat([head.accepted(part.float()) for part in examples.hidden.split(4096)]).double()  # type: ignore[no-untyped-call]
    predicted = unshifted(predicted, rejection_weight)
    bin_of = (predicted * _BINS).long().clamp(max=_BINS - 1)
    bins = []
    for bin_index in range(_BINS):
        inside = bin_of == bin_index
        if bool(inside.any()):
            bins.append((float(predicted[inside].mean()), float(labels[inside].mean()), int(inside.sum())))
    error = sum(abs(a - b) * n for a, b, n in bins) / len(labels)
    constant = labels.mean().expand_as(labels)
    return Calibration(_divergence(labels, predicted), _divergence(labels, constant), error, tuple(bins))


def _divergence(labels: torch.Tensor, predicted: torch.Tensor) -> float:
    """Return the mean KL of Bernoulli(label) from Bernoulli(predicted)."""
    q = predicted.clamp(1e-6, 1 - 1e-6)
    p = labels
    terms = torch.xlogy(p, p) - p * q.log() + torch.xlogy(1 - p, 1 - p) - (1 - p) * (1 - q).log()
    return float(terms.mean())
