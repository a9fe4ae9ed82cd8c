"""Chains of draft tokens, drawn on the device: a head, or a small draft model, runs without the host between its tokens.

After a pass over the tokens that the cache lacks, one captured step is replayed for each further token. All that it reads and
changes stays on the device: the token, the features, their position and slot, and the uniforms that draw. So the host starts a
chain of any length without waiting, and reads nothing of it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from foresay.decoding import sampling_kernels, sampling_rows
from foresay.decoding.chains import Drawn, Sampling, widened
from foresay.decoding.devices import launching_on, moved, to_device
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_kernels import Cuts
from foresay.models.gpu.flat import FIELDS, Buffers, PagedTokens, size_of
from foresay.models.gpu.pages import PagedCache
from foresay.models.gpu.passes import Outputs, PagedPasses, Replay

MOST = 64
"""Most tokens of a chain."""
_ROWS, _POSITIONS, _SLOTS, _FIRSTS, _ENDS, _STARTS, _COUNTS, _ROW_ENDS, _ = range(len(FIELDS))


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
    # the first token's position is that of the first pass; a row without another token stays where it is
    moves = tl.where(is_row & (step > 0) & (rest > 0), 1, 0)
    for field in tl.static_range(1, 5):  # positions, slots, firsts, ends
        value = tl.load(fields + field * size + row) + moves
        if field == 2:
            value = tl.where(rest > 0, value, -1)  # a row without another token writes no keys
        tl.store(fields + field * size + row, value)


class _Rows:
    """The state of chains of a number of rows, at fixed addresses."""

    def __init__(self, buffers: Buffers, num_scores: int, of_kind: Sequence[torch.Tensor]) -> None:
        """buffers: inputs of a pass. of_kind: what a kind of chain reads, too; a step overwrites the last of it."""
        size, device = buffers.size, buffers.token_ids.device
        self.size, self.buffers, self.of_kind, self._num_scores = size, buffers, list(of_kind), num_scores
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

    def begin(self, tokens: PagedTokens, ids: torch.Tensor, left: Sequence[int], features: torch.Tensor | None) -> None:
        """Set the inputs of each row's first pass. ids: [R, 1]. left: [R], tokens after the first. features: [R, 1, H]."""
        count = len(tokens)
        self.buffers.fill(tokens, ids, features)
        self.steps.zero_()
        self.left.zero_()
        self.left[:count].copy_(to_device(left, self.left.device, torch.int32), non_blocking=True)

    def set_sampling(self, sampling: Sampling, rows: Sequence[int]) -> None:
        """Copy the parameters of the rows that draft."""
        if not len(self.probs):
            self.probs = self.probs.new_empty(self.size, self._num_scores)
        warm = [1.0 if greedy else one for one, greedy in zip(sampling.temperature, sampling.greedy, strict=True)]
        columns = [
            [float(values[i]) for i in rows]
            for values in (warm, sampling.top_k, sampling.top_p, sampling.min_p, sampling.greedy)
        ]
        device, count = self.numbers.device, len(rows)
        self.numbers[:, :count].copy_(to_device(columns, device, torch.float32), non_blocking=True)
        self.numbers[0].clamp_(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
        self.uniforms[:count, : sampling.uniforms.shape[1]] = sampling.uniforms[to_device(rows, device), :MOST]

    @property
    def changed(self) -> list[torch.Tensor]:
        """The state that a step reads and overwrites."""
        at = self.buffers
        features = [] if at.features is None else [at.features]
        return [self.of_kind[-1], *features, self.drawn, self.steps, self.left, at.fields, at.token_ids]


class _Chains(ABC):
    """Steps that are captured once for a number of rows, and replayed for each token."""

    def __init__(self, passes: PagedPasses, num_scores: int, token_ids: torch.Tensor | None, vocab_size: int) -> None:
        """token_ids: [num_scores] int64, the token of each score; None if both are the same."""
        self.passes, self._num_scores = passes, num_scores
        self._token_ids, self._vocab_size = token_ids, vocab_size
        self._rows: dict[int, _Rows] = {}
        self._replays: dict[tuple[int, bool, tuple[bool, bool, bool] | None], Replay] = {}

    @abstractmethod
    def _of_kind(self, size: int) -> list[torch.Tensor]:
        """Make what a step of a number of rows reads beyond the state of all kinds; it overwrites the last tensor."""

    @abstractmethod
    def _scores(self, state: _Rows, *, first: bool) -> torch.Tensor:
        """Compute the scores of each row's next token, [size, num_scores]. first: True for the first token of a chain."""

    def _state(self, size: int) -> _Rows:
        if size not in self._rows:
            buffers = self.passes.buffers(size)
            self._rows[size] = _Rows(buffers, self._num_scores, self._of_kind(size))
        return self._rows[size]

    def _tokens(self, rows: Sequence[int], slots: npt.NDArray[np.int64]) -> PagedTokens:
        """Return one token for each row. slots: [R]."""
        count = len(rows)
        fields = np.zeros((len(FIELDS), count), dtype=np.int32)
        fields[_ROWS], fields[_STARTS], fields[_COUNTS] = rows, np.arange(count), 1
        fields[_POSITIONS] = fields[_SLOTS] = fields[_FIRSTS] = slots
        fields[_ENDS] = fields[_ROW_ENDS] = slots + 1
        return PagedTokens(np.arange(count, dtype=np.int64), fields)

    def _draw(self, state: _Rows, room: Sequence[int], sampling: Sampling | None) -> Drawn:
        """Replay a step for each token."""
        rows = [i for i, n in enumerate(room) if n]
        count, most, probs, kinds = len(rows), max(room), None, None
        if sampling is not None:
            state.set_sampling(sampling, rows)
            kinds, probs = sampling.kinds, state.probs.new_empty(most, count, self._num_scores)
        with launching_on(state.drawn.device):
            for step in range(most):
                self._replay(state, first=step == 0, kinds=kinds)()
                if probs is not None:
                    probs[step].copy_(state.probs[:count], non_blocking=True)
        drawn = state.drawn[:count, :most].clone()
        if count < len(room):
            every = drawn.new_zeros(len(room), most)
            every[to_device(rows, drawn.device)] = drawn
            drawn = every
        return Drawn(drawn, None if probs is None else widened(probs.flatten(0, 1), self._token_ids, self._vocab_size))

    def _replay(self, state: _Rows, *, first: bool, kinds: tuple[bool, bool, bool] | None) -> Replay:
        """Return the captured choice of each row's next token."""
        key = (state.size, first, kinds)
        if key not in self._replays:
            saved = [one.clone() for one in state.changed]
            self._replays[key] = self.passes.captured(lambda: self._step(state, first, kinds))
            for one, before in zip(state.changed, saved, strict=True):  # capturing runs the step
                one.copy_(before)
        return self._replays[key]

    def _step(self, state: _Rows, first: bool, kinds: tuple[bool, bool, bool] | None) -> Outputs:
        chosen, at = _chosen(state, self._scores(state, first=first), kinds), state.buffers
        _settle[(state.size,)](
            chosen, chosen if self._token_ids is None else self._token_ids, state.drawn, at.token_ids, at.fields,
            state.steps, state.left, state.size, MOST=MOST, MAPS=self._token_ids is not None,
        )  # fmt: skip
        return None, {}


class DecoderChains(_Chains):
    """Chains drafted by one decoder over its pages; see DrawsChains."""

    def __init__(
        self, passes: PagedPasses, *, outputs: int, nexts: int | None, token_ids: torch.Tensor | None, vocab_size: int
    ) -> None:
        """outputs, nexts: keys of the hidden states that scores are computed of, and that the next pass reads as features.

        nexts: None for a decoder that reads token ids alone. token_ids: see _Chains.
        """
        super().__init__(passes, passes.decoder.num_scores, token_ids, vocab_size)
        self._outputs, self._nexts = outputs, nexts
        self._keys = (outputs,) if nexts is None else (nexts, outputs)

    def draw(
        self, known: ModelInput, cache: PagedCache, room: Sequence[int], sampling: Sampling | None
    ) -> Drawn | None:
        """Draw chains; see DrawsChains.draw_chains. Raises OutOfMemoryError if the pool has too few pages."""
        rows = [i for i, n in enumerate(room) if n]
        size = size_of(len(rows))
        if size is None or max(room) > MOST:
            return None
        with self.passes.pool.lock:
            for i in rows:
                cache.reserve(i, known.num_tokens[i] + room[i] - 1)
            state = self._state(size)
            self._begin(known, cache, rows, room, state)
            drawn = self._draw(state, room, sampling)
        for i in rows:
            cache.lengths[i] += room[i] - 1
        return drawn

    def _begin(
        self, known: ModelInput, cache: PagedCache, rows: Sequence[int], room: Sequence[int], state: _Rows
    ) -> None:
        """Run the pass over the known tokens, and let each row's first draft token follow them."""
        hidden = after_known(self.passes, known, cache, rows, self._keys)
        (normed,), count = state.of_kind[:1], len(rows)
        normed[:count] = hidden[self._outputs]
        features = None if self._nexts is None else hidden[self._nexts][:, None]
        tokens = self._tokens(rows, np.array([cache.lengths[i] for i in rows]))
        state.begin(tokens, state.drawn.new_zeros(count, 1), [room[i] - 1 for i in rows], features)

    def _of_kind(self, size: int) -> list[torch.Tensor]:
        like = self.passes.decoder.like
        return [like.new_zeros(size, like.shape[1])]

    def _scores(self, state: _Rows, *, first: bool) -> torch.Tensor:
        decoder, at, normed = self.passes.decoder, state.buffers, state.of_kind[0]
        if not first:
            _, hidden = decoder.states(at, self.passes.pool, self._keys)
            normed.copy_(hidden[self._outputs])
            if at.features is not None and self._nexts is not None:
                at.features.copy_(hidden[self._nexts])
        return decoder.scores(normed)


def after_known(
    passes: PagedPasses, known: ModelInput, cache: PagedCache, rows: Sequence[int], keys: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """Run the pass over the known tokens; return the hidden states [R, H] of the last token of each row, by key."""
    given = dataclasses.replace(known, logits=Logits.NONE, hidden_layers=keys)
    _, (_, hidden) = passes.flat(given, cache, scored=False, captured=True)
    ends = np.cumsum(np.array(known.num_tokens))[list(rows)] - 1
    last = moved(torch.from_numpy(ends), hidden[keys[0]].device)
    return {key: hidden[key][last] for key in keys}


After = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""BlockModel.after."""


class BlockChains(_Chains):
    """Chains of the tokens of blocks, whose scores may depend on the tokens before them."""

    def __init__(
        self,
        passes: PagedPasses,
        after: After,
        *,
        length: int,
        state_size: int,
        token_ids: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        """passes: of the block's layers. length: tokens of a block. state_size: see BlockModel. token_ids: see _Chains."""
        super().__init__(passes, passes.decoder.num_scores, token_ids, vocab_size)
        self._after, self._length, self._state_size = after, length, state_size

    def draw(
        self,
        last: torch.Tensor,
        outputs: torch.Tensor,
        scores: torch.Tensor,
        room: Sequence[int],
        sampling: Sampling | None,
    ) -> Drawn | None:
        """Draw the first tokens of blocks; see DrawsChains.draw_chains.

        last: [B] int64, each row's last committed token. outputs, scores: [B, T, D] and [B, T, K], of the blocks.
        """
        rows = [i for i, n in enumerate(room) if n]
        size = size_of(len(rows))
        if size is None or max(room) > MOST:
            return None
        count, index = len(rows), to_device(rows, outputs.device)
        with self.passes.pool.lock:
            state = self._state(size)
            kept_outputs, kept_scores, states = state.of_kind
            kept_outputs[:count, : outputs.shape[1]] = outputs[index]
            kept_scores[:count, : scores.shape[1]] = scores[index]
            states.zero_()
            tokens = self._tokens(rows, np.zeros(count, dtype=np.int64))
            unread = outputs[index][:, :1] if self.passes.decoder.features else None  # no step of a block runs layers
            state.begin(tokens, last[index][:, None], [room[i] - 1 for i in rows], unread)
            return self._draw(state, room, sampling)

    def _of_kind(self, size: int) -> list[torch.Tensor]:
        like, length = self.passes.decoder.like, self._length
        scores = like.new_zeros(size, length, self._num_scores)
        states = torch.zeros(size, self._state_size, device=like.device)  # float32, as where a token is drawn by itself
        return [like.new_zeros(size, length, like.shape[1]), scores, states]

    def _scores(self, state: _Rows, *, first: bool) -> torch.Tensor:
        outputs, scores, states = state.of_kind
        index = state.steps.clamp(max=self._length - 1).long()
        rows = torch.arange(state.size, device=index.device)
        found, after = self._after(scores[rows, index], outputs[rows, index], state.buffers.token_ids, index, states)
        states.copy_(after)
        return found.contiguous()


def _chosen(state: _Rows, scores: torch.Tensor, kinds: tuple[bool, bool, bool] | None) -> torch.Tensor:
    """Return the index of the chosen score of each row, [R] int64. kinds: see Sampling; None takes the likeliest."""
    if scores.shape[1] <= sampling_rows.MOST:
        return sampling_rows.choose(scores, state.numbers, state.uniforms, state.steps, state.probs, kinds)
    likeliest, _ = sampling_kernels.likeliest(scores)
    if kinds is None:
        return likeliest
    temperature, *numbers, greedy = state.numbers
    cuts = Cuts(*(one if on else None for one, on in zip(numbers, kinds, strict=True)))
    state.probs.copy_(sampling_kernels.probabilities(scores, temperature, cuts))
    uniforms = state.uniforms.gather(1, state.steps.clamp(max=MOST - 1).long()[:, None])[:, 0]
    sampled = sampling_kernels.inverse_cdf(state.probs, uniforms, torch.arange(state.size, device=scores.device))
    return torch.where(greedy > 0, likeliest, sampled)
