"""Batches of texts with the target's outputs for them.

Owns the order of texts and their padding. Texts of similar length share a batch. The batches and their order depend only on the
seed and the epoch, so that an interrupted run resumes exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from foresay_lab.training.outputs import Text
from foresay_lab.training.teacher import TargetOutputs

_WINDOW = 16
"""Number of batches among which texts are sorted by length."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts of at most S tokens.

    tokens: [B, S]. starts, sizes: [B], each text's `start` and length. Other fields: as in TargetOutputs, [B, S, ...].
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor
    log_sum: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return a copy on a device."""
        return Batch(*(getattr(self, one.name).to(device, non_blocking=True) for one in fields(self)))

    def loss_mask(self) -> torch.Tensor:
        """Return the loss mask [B, S] bool: positions whose distribution predicts a token from `start` on."""
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (position >= self.starts[:, None] - 1) & (position < self.sizes[:, None] - 1)


def batch_of(indices: Sequence[int], texts: Sequence[Text], outputs_of: Callable[[int], TargetOutputs]) -> Batch:
    """Return the texts of these indices as a batch, padded with zeros."""
    chosen, outputs = [texts[i] for i in indices], [outputs_of(i) for i in indices]
    padded = partial(pad_sequence, batch_first=True)
    return Batch(
        padded([torch.from_numpy(text.tokens) for text in chosen]),
        torch.tensor([text.start for text in chosen]),
        torch.tensor([len(text.tokens) for text in chosen]),
        *(padded([getattr(one, field.name) for one in outputs]) for field in fields(TargetOutputs)),
    )


def epoch_batches(texts: Sequence[Text], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the text indices of each batch of an epoch; a batch has about `tokens` tokens, including padding."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(texts), generator=generator).tolist()
    average = sum(len(text.tokens) for text in texts) / max(1, len(texts))
    window = max(1, round(_WINDOW * tokens / max(1.0, average)))
    out: list[list[int]] = []
    for start in range(0, len(shuffled), window):
        out += _packed(sorted(shuffled[start : start + window], key=lambda i: len(texts[i].tokens)), texts, tokens)
    return [out[i] for i in torch.randperm(len(out), generator=generator).tolist()]


def _packed(order: Sequence[int], texts: Sequence[Text], tokens: int) -> list[list[int]]:
    out: list[list[int]] = []
    for index in order:  # ascending by length: the new text is the longest
        if out and (len(out[-1]) + 1) * len(texts[index].tokens) <= tokens:
            out[-1].append(index)
        else:
            out.append([index])
    return out
