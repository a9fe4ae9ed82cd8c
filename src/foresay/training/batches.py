"""Batches of texts with what the target showed of them.

Owns the order of texts and how they are padded. Texts of like length share a batch; which ones, and when, depends on the seed
and the epoch alone, so that a run that was killed goes on where it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from foresay.training.outputs import Text
from foresay.training.teacher import Shown

_WINDOW = 16
"""Batches among which texts are sorted by length."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts of at most S tokens.

    tokens: [B, S]. starts, sizes: [B], as Text.start and its length. Else as in Shown, [B, S, ...].
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor
    log_sum: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, one.name).to(device, non_blocking=True) for one in fields(self)))

    def taught(self) -> torch.Tensor:
        """[B, S] bool: places whose law predicts a token that counts."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (place >= self.starts[:, None] - 1) & (place < self.sizes[:, None] - 1)


def make_batch(texts: Sequence[Text], shown: Sequence[Shown]) -> Batch:
    """One batch, padded with zeros."""

    def padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    return Batch(
        padded([torch.from_numpy(text.tokens) for text in texts]),
        torch.tensor([text.start for text in texts]),
        torch.tensor([len(text.tokens) for text in texts]),
        padded([one.states for one in shown]),
        padded([one.last for one in shown]),
        padded([one.log_sum for one in shown]),
    )


def in_order(texts: Sequence[Text], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the texts of each batch of an epoch, of about `tokens` tokens, pads included."""
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
    for index in order:  # ascending by length: the newcomer is the longest
        if out and (len(out[-1]) + 1) * len(texts[index].tokens) <= tokens:
            out[-1].append(index)
        else:
            out.append([index])
    return out


def batch_of(indices: Sequence[int], texts: Sequence[Text], show: Callable[[int], Shown]) -> Batch:
    """The texts of these indices as a batch."""
    return make_batch([texts[i] for i in indices], [show(i) for i in indices])
