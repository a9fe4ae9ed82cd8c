"""Penalties, biases and the minimum length: changes of a batch's scores in a few operations, none of which waits for a device.

Repetition (Keskar et al. 2019, CTRL) over prompt and output; presence and frequency over the output. Each position also counts
the draft tokens before it. Owns the tokens of a row by which it is penalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foresay.decoding.devices import moved, to_device
from foresay.decoding.proposal import ancestors_of
from foresay.decoding.rows import Row
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.state import StateKey


class _Seen:
    """The distinct tokens of a row, and how often each occurs in its output."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._counts = np.empty((2, 0), dtype=np.int64)
        self._size = 0

    def of(self, row: Row) -> npt.NDArray[np.int64]:
        """Return tokens and counts of a row, [2, L], of which those added since the last call are new."""
        if not self._size:
            tokens = np.unique(row.tokens[: row.prompt_length])
            self._index = dict(zip(tokens.tolist(), range(len(tokens)), strict=True))
            self._counts = np.stack([tokens, np.zeros_like(tokens)])
            self._size = row.prompt_length
        for token in row.tokens[self._size :].tolist():
            index = self._index.setdefault(token, len(self._index))
            if index == self._counts.shape[1]:
                self._counts = np.pad(self._counts, ((0, 0), (0, max(64, index // 4))))
            self._counts[0, index] = token
            self._counts[1, index] += 1
        self._size = row.size
        return self._counts[:, : len(self._index)]


_SEEN = StateKey[_Seen](_Seen)
_VECTORS = StateKey[dict[tuple[torch.device, int], torch.Tensor]](dict)
"""Biases and masks of a row, by device and vocabulary size."""


def is_penalised(params: SamplingParams) -> bool:
    """True if scores depend on the tokens of the row."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


@dataclass(frozen=True, slots=True)
class Paths:
    """The draft tokens before each of T positions of R rows."""

    token_ids: torch.Tensor
    """[R, K] int64."""
    before: torch.Tensor
    """[R, T, K] bool: token k is before position t, on its path in a tree."""

    @classmethod
    def of(
        cls, token_ids: torch.Tensor, positions: int, num_before: int, parents: torch.Tensor | None, vocab: int
    ) -> Paths:
        """Return the paths to positions after the committed tokens and `num_before` drafted ones; see `process_rows`.

        token_ids: [R, >= num_before + T - 1]. parents: [R, >= T - 1] of a tree.
        """
        rows, device = len(token_ids), token_ids.device
        count = num_before + positions - 1
        ids = token_ids[:, :count].clamp(0, vocab - 1)  # those after a row's own are meaningless
        columns = torch.arange(count, device=device)
        if parents is None:
            ends = num_before + torch.arange(positions, device=device)
            return cls(ids, (columns < ends[:, None]).expand(rows, positions, count))
        before = torch.zeros(rows, positions, count, dtype=torch.bool, device=device)
        before[:, :, :num_before] = True
        before[:, 1:, num_before:] = ancestors_of(parents[:, : positions - 1])
        return cls(ids, before)


def penalise(scores: torch.Tensor, rows: Sequence[Row], paths: Paths) -> None:
    """Apply the penalties of R rows in place. scores: [R, T, V] float32, raw logits."""
    device, vocab = scores.device, scores.shape[2]
    params = [row.params for row in rows]
    where, counts, is_known = _known(rows, vocab)
    ids, occurrences, is_seen = _sent(where, device), _sent(counts, device), _sent(is_known, device)
    change = _Change(
        *(
            to_device([getattr(one, name) for one in params], device, torch.float32)[:, None, None]
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
    )
    drafted, before = paths.token_ids, paths.before.float()
    same = drafted[:, :, None] == drafted[:, None, :]
    on_path = before @ same.float()  # [R, T, K], how often each draft token is before each position
    earlier = (drafted[:, :, None] == ids[:, None, :]) & is_seen[:, None, :]
    of_output = torch.where(earlier, occurrences[:, None, :], 0).amax(-1)  # [R, K]
    at = drafted[:, None, :].expand(on_path.shape)
    of_drafts = change(
        scores.gather(2, at), earlier.any(-1)[:, None, :] | (on_path > 0), of_output[:, None, :] + on_path
    )
    everywhere = ids[:, None, :].expand(-1, scores.shape[1], -1)
    of_known = change(scores.gather(2, everywhere), is_seen[:, None, :], occurrences[:, None, :])
    scores.scatter_(2, everywhere, of_known)
    scores.scatter_(2, at, of_drafts)


def _known(
    rows: Sequence[Row], vocab: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool]]:
    """Return distinct tokens of each row, their counts, and True; [R, L] each.

    A row with fewer repeats its first token; one without any has token 0, and False.
    """
    seen, is_known = [], []
    for row in rows:
        found = _SEEN.of(row).of(row)
        inside = found[0] < vocab
        if row.params.repetition_penalty == 1.0:  # tokens of the prompt alone change nothing
            inside &= found[1] > 0
        is_known.append(bool(inside.any()))
        seen.append(found[:, inside].T if is_known[-1] else np.zeros((1, 2), dtype=np.int64))
    width = max(map(len, seen))
    whole = np.stack([np.concatenate([one, one[:1].repeat(width - len(one), 0)]) for one in seen])
    return whole[..., 0], whole[..., 1], np.array(is_known)[:, None].repeat(width, 1)


@dataclass(frozen=True, slots=True)
class _Change:
    """The penalties of R rows, [R, 1, 1] each."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    def __call__(self, scores: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return penalised scores of tokens, [R, T, N]. seen: in prompt, output or draft. counts: in output or draft."""
        repeated = torch.where(scores < 0, scores * self.repetition, scores / self.repetition)
        scores = torch.where(seen, repeated, scores)
        return torch.where(counts > 0, scores - (self.presence + self.frequency * counts), scores)


def add_constants(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Add the biases and masks of R rows in place: vectors that are built once per request. scores: [R, T, V] float32."""
    vocab = scores.shape[2]
    for row, own in zip(rows, scores, strict=True):
        params = row.params
        if not params.logit_bias and params.allowed_token_ids is None and not params.banned_token_ids:
            continue
        vectors, key = _VECTORS.of(row), (scores.device, vocab)
        if key not in vectors:
            vectors[key] = moved(_constant_vector(params, vocab), scores.device)
        own += vectors[key]


def _constant_vector(params: SamplingParams, vocab: int) -> torch.Tensor:
    vector = torch.zeros(vocab)
    if params.allowed_token_ids is not None:
        vector.fill_(-torch.inf)
        vector[[token for token in params.allowed_token_ids if token < vocab]] = 0.0
    for token, bias in params.logit_bias.items():
        if token < vocab:
            vector[token] += bias
    vector[[token for token in params.banned_token_ids if token < vocab]] = -torch.inf
    return vector


def forbid_ends(scores: torch.Tensor, rows: Sequence[Row], paths: Paths) -> None:
    """Forbid the end tokens of R rows before their minimum length, in place. scores: [R, T, V] float32."""
    vocab = scores.shape[2]
    short = [j for j, row in enumerate(rows) if row.num_new < row.params.min_new_tokens]
    ends = {j: sorted(token for token in rows[j].eos if token < vocab) for j in short}
    chosen = [j for j in short if ends[j]]
    if not chosen:
        return
    device, width = scores.device, max(len(ends[j]) for j in chosen)
    ids = to_device([[*ends[j], *[ends[j][0]] * (width - len(ends[j]))] for j in chosen], device)
    left = to_device([rows[j].params.min_new_tokens - rows[j].num_new for j in chosen], device)
    index = to_device(chosen, device)
    forbidden = paths.before.sum(-1)[index] < left[:, None]  # [C, T]
    every = torch.arange(scores.shape[1], device=device)
    at = index[:, None, None], every[:, None], ids[:, None, :]
    scores[at] = torch.where(forbidden[:, :, None], -torch.inf, scores[at])


def _sent(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return moved(torch.from_numpy(np.ascontiguousarray(values)), device)
