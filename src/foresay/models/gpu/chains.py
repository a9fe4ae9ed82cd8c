"""Chains of draft tokens, drawn on the device: a head, or a small draft model, runs without the host between its tokens.

After a pass over the tokens that the cache lacks, one captured step is replayed for each further token. All that it reads and
changes stays on the device: the token, the features, their position and slot, and the uniforms that draw. So the host starts a
chain of any length without waiting, and reads nothing of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from foresay.decoding import sampling_kernels
from foresay.decoding.chains import Drawn, Sampling, widened
from foresay.decoding.devices import moved, to_device
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_kernels import Cuts
from foresay.models.gpu.flat import FIELDS, FlatTokens, size_of
from foresay.models.gpu.pages import PagedCache
from foresay.models.gpu.passes import Outputs, PagedPasses, Replay

MOST = 64
"""Most tokens of a chain."""
_ROWS, _POSITIONS, _SLOTS, _FIRSTS, _ENDS, _STARTS, _COUNTS = range(len(FIELDS))


@triton.jit
def _settle(chosen, ids, drawn, token_ids, fields, steps, left, size, MOST: tl.constexpr, MAPS: tl.constexpr):
    """Keep each row's chosen token, and let the next pass read it at the next position."""
    row = tl.program_id(0)
    step, rest = tl.load(steps + row), tl.load(left + row)
    is_row = tl.load(fields + 6 * size + row) > 0  # its tile has a token
    token = tl.load(chosen + row)
    if MAPS:
        token = tl.load(ids + token)
    tl.store(drawn + row * MOST + step, token)
    tl.store(token_ids + row, token)
    tl.store(steps + row, step + 1)
    tl.store(left + row, rest - 1)
    moves = tl.where(is_row & (step > 0), 1, 0)  # the first token's position is that of the first pass
    for field in tl.static_range(1, 5):  # positions, slots, firsts, ends
        value = tl.load(fields + field * size + row) + moves
        if field == 2:
            value = tl.where(rest > 0, value, -1)  # a row without another token writes no keys
        tl.store(fields + field * size + row, value)


class _Rows:
    """The state of chains of a number of rows, at fixed addresses."""

    def __init__(self, passes: PagedPasses, size: int) -> None:
        like = passes.decoder.like
        device = like.device
        self.size, self.buffers = size, passes.buffers(size)
        self.normed = like.new_zeros(size, like.shape[1])
        self.drawn = torch.zeros(size, MOST, dtype=torch.int64, device=device)
        self.steps = torch.zeros(size, dtype=torch.int32, device=device)
        self.left = torch.zeros(size, dtype=torch.int32, device=device)
        """Tokens that follow the next one."""
        self.uniforms = torch.full((size, MOST), 0.5, dtype=torch.float64, device=device)
        self.numbers = torch.zeros(5, size, device=device)
        """Temperature, top-k, top-p, min-p, and 1 for rows that take the likeliest token."""
        self.numbers[:3] = 1.0
        self.probs = torch.empty(0, device=device)
        """[size, outputs], the distributions of the last token."""

    def begin(self, tokens: FlatTokens, ids: torch.Tensor, left: Sequence[int], features: torch.Tensor | None) -> None:
        """Set the inputs of each row's first pass. ids: [R, 1], any. left: [R], tokens after the first. features: [R, 1, H]."""
        count = len(tokens)
        self.buffers.fill(tokens, ids, features)
        self.steps.zero_()
        self.left.zero_()
        self.left[:count].copy_(to_device(left, self.left.device, torch.int32), non_blocking=True)

    def set_sampling(self, sampling: Sampling, rows: Sequence[int], num_scores: int) -> None:
        """Copy the parameters of the rows that draft."""
        if not len(self.probs):
            self.probs = self.probs.new_empty(self.size, num_scores)
        columns = [
            [float(values[i]) for i in rows]
            for values in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.greedy)
        ]
        device, count = self.numbers.device, len(rows)
        self.numbers[:, :count].copy_(to_device(columns, device, torch.float32), non_blocking=True)
        self.numbers[0].clamp_(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
        self.uniforms[:count, : sampling.uniforms.shape[1]] = sampling.uniforms[to_device(rows, device), :MOST]


class Chains:
    """Chains drafted by one decoder over its pages; see DrawsChains."""

    def __init__(
        self, passes: PagedPasses, *, outputs: int, nexts: int | None, token_ids: torch.Tensor | None, vocab_size: int
    ) -> None:
        """outputs, nexts: keys of the hidden states that scores are computed of, and that the next pass reads as features.

        nexts: None for a decoder that reads token ids alone. token_ids: [outputs] int64, the token of each score; None if both
        are the same.
        """
        self._passes, self._outputs, self._nexts = passes, outputs, nexts
        self._token_ids, self._vocab_size = token_ids, vocab_size
        self._keys = (outputs,) if nexts is None else (nexts, outputs)
        self._rows: dict[int, _Rows] = {}
        self._replays: dict[tuple[int, bool, tuple[bool, bool, bool] | None], Replay] = {}

    def draw(
        self, known: ModelInput, cache: PagedCache, room: Sequence[int], sampling: Sampling | None
    ) -> Drawn | None:
        """Draw chains; see DrawsChains.draw_chains. Raises OutOfMemoryError if the pool has too few pages."""
        rows = [i for i, n in enumerate(room) if n]
        size = size_of(len(rows))
        if size is None:
            return None
        for i in rows:
            cache.reserve(i, known.num_tokens[i] + room[i] - 1)
        state = self._state(size)
        self._begin(known, cache, rows, room, state)
        probs = self._draw(state, len(rows), max(room), sampling, rows)
        for i in rows:
            cache.lengths[i] += room[i] - 1
        drawn = state.drawn[: len(rows), : max(room)].clone()
        if len(rows) < len(room):
            every = drawn.new_zeros(len(room), max(room))
            every[to_device(rows, drawn.device)] = drawn
            drawn = every
        return Drawn(drawn, None if probs is None else widened(probs.flatten(0, 1), self._token_ids, self._vocab_size))

    def _draw(
        self, state: _Rows, count: int, most: int, sampling: Sampling | None, rows: Sequence[int]
    ) -> torch.Tensor | None:
        """Replay a step for each token; return the distributions, [K, R, outputs], if tokens are sampled."""
        if sampling is None:
            for step in range(most):
                self._replay(state, after_pass=step > 0, kinds=None)()
            return None
        state.set_sampling(sampling, rows, self._passes.decoder.num_scores)
        probs = state.probs.new_empty(most, count, state.probs.shape[1])
        for step in range(most):
            self._replay(state, after_pass=step > 0, kinds=sampling.kinds)()
            probs[step].copy_(state.probs[:count], non_blocking=True)
        return probs

    def _state(self, size: int) -> _Rows:
        if size not in self._rows:
            self._rows[size] = _Rows(self._passes, size)
        return self._rows[size]

    def _begin(
        self, known: ModelInput, cache: PagedCache, rows: Sequence[int], room: Sequence[int], state: _Rows
    ) -> None:
        """Run the pass over the known tokens, and let each row's first draft token follow them."""
        given = dataclasses.replace(known, logits=Logits.NONE, hidden_layers=self._keys)
        _, (_, hidden) = self._passes.flat(given, cache, scored=False, captured=True)
        count = len(rows)
        ends = np.cumsum(np.array(known.num_tokens))[list(rows)] - 1
        last = moved(torch.from_numpy(ends), state.normed.device)
        torch.index_select(hidden[self._outputs], 0, last, out=state.normed[:count])
        features = None if self._nexts is None else hidden[self._nexts][last][:, None]
        fields = np.zeros((len(FIELDS), count), dtype=np.int32)
        fields[_ROWS], fields[_STARTS], fields[_COUNTS] = rows, np.arange(count), 1
        slots = np.array([cache.lengths[i] for i in rows])
        fields[_POSITIONS] = fields[_SLOTS] = fields[_FIRSTS] = slots
        fields[_ENDS] = slots + 1
        tokens = FlatTokens(np.arange(count, dtype=np.int64), fields, np.ones(count, dtype=np.int64))
        state.begin(tokens, state.drawn.new_zeros(count, 1), [room[i] - 1 for i in rows], features)

    def _replay(self, state: _Rows, *, after_pass: bool, kinds: tuple[bool, bool, bool] | None) -> Replay:
        """Return the captured choice of each row's next token; after_pass: after a pass over the last one."""
        key = (state.size, after_pass, kinds)
        if key not in self._replays:
            saved = [one.clone() for one in self._changed(state)]
            self._replays[key] = self._passes.captured(lambda: self._step(state, after_pass, kinds))
            for one, before in zip(self._changed(state), saved, strict=True):  # capturing runs the step
                one.copy_(before)
        return self._replays[key]

    @staticmethod
    def _changed(state: _Rows) -> list[torch.Tensor]:
        """The state that a step reads and overwrites."""
        at = state.buffers
        features = [] if at.features is None else [at.features]
        return [*features, state.normed, state.drawn, state.steps, state.left, at.fields, at.token_ids]

    def _step(self, state: _Rows, after_pass: bool, kinds: tuple[bool, bool, bool] | None) -> Outputs:
        decoder, at = self._passes.decoder, state.buffers
        if after_pass:
            _, hidden = decoder.states(at, self._passes.pool, self._keys)
            state.normed.copy_(hidden[self._outputs])
            if at.features is not None and self._nexts is not None:
                at.features.copy_(hidden[self._nexts])
        chosen = _chosen(state, decoder.scores(state.normed), kinds)
        _settle[(state.size,)](
            chosen, chosen if self._token_ids is None else self._token_ids, state.drawn, at.token_ids, at.fields,
            state.steps, state.left, state.size, MOST=MOST, MAPS=self._token_ids is not None,
        )  # fmt: skip
        return None, {}


def _chosen(state: _Rows, scores: torch.Tensor, kinds: tuple[bool, bool, bool] | None) -> torch.Tensor:
    """Return the index of the chosen score of each row, [R] int64. kinds: see Sampling; None takes the likeliest."""
    likeliest, _ = sampling_kernels.likeliest(scores)
    if kinds is None:
        return likeliest
    temperature, *numbers, greedy = state.numbers
    cuts = Cuts(*(one if on else None for one, on in zip(numbers, kinds, strict=True)))
    state.probs.copy_(sampling_kernels.probabilities(scores, temperature, cuts))
    uniforms = state.uniforms.gather(1, state.steps.clamp(max=MOST - 1).long()[:, None])[:, 0]
    sampled = sampling_kernels.inverse_cdf(state.probs, uniforms, torch.arange(state.size, device=scores.device))
    return torch.where(greedy > 0, likeliest, sampled)
