"""Sequences that are being decoded: a `Row` for each request, and the `Rows` of one step in cache order.

Owns a row's tokens and the keys of its random streams. Knows no model, no text and no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.randomness import Streams, derive
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.state import StateKey

IntArray = npt.NDArray[np.int64]


StopCondition = Callable[[Sequence[int]], int | None]
"""Called with the tokens about to be committed; returns the number to keep if the output ends among them, else None.
Each committed token is passed once, so that the condition may keep state."""


class Row:
    """One request while it is decoded: its tokens so far and its parameters."""

    __slots__ = (
        "_buffer",
        "_committed",
        "_hidden",
        "eos",
        "limit",
        "num_cached",
        "params",
        "prompt_length",
        "request_id",
        "rng_key",
        "seed",
        "size",
        "source",
        "state",
        "stop",
    )

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        seed: int = 0,
        limit: int,
        eos: frozenset[int] = frozenset(),
        stop: StopCondition | None = None,
        source: Sequence[int] | IntArray | None = None,
        committed: Row | None = None,
    ) -> None:
        """Start with the prompt.

        Args:
            request_id: Id of the request.
            prompt: At least one token id.
            params: The request's parameters.
            seed: Seed of the row's random numbers.
            limit: Maximum length of the row, prompt included.
            eos: The model's end-of-sequence ids.
            stop: Ends the output by committed tokens.
            source: Input of an encoder-decoder's encoder; the prompt is then the start of its decoder.
            committed: The engine's row that this one stands for, if it is not the engine's own.
        """
        self.request_id, self.params, self.seed, self.limit = request_id, params, seed, limit
        self.stop = stop
        self.source = None if source is None else np.asarray(source, dtype=np.int64)
        self.rng_key = seed
        self._committed = committed
        self.eos = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        self.prompt_length = self.size = len(prompt)
        self._buffer = np.empty(max(self.size + 64, 128), dtype=np.int64)
        self._buffer[: self.size] = prompt
        self.state: dict[StateKey[Any], Any] = {}
        self.num_cached = 0
        """Prompt tokens whose keys and values were copied from another row."""
        self._hidden: list[Mapping[int, torch.Tensor]] = []

    @property
    def committed(self) -> Row:
        """The engine's row that this one extends by draft tokens or stands for; an engine's row is its own.

        It holds no reference to itself: its memory is freed when it leaves, not when cycles are collected.
        """
        return self if self._committed is None else self._committed

    @property
    def tokens(self) -> IntArray:
        """Prompt and committed output, [size] int64; a view that the next `extend` may invalidate."""
        return self._buffer[: self.size]

    @property
    def prompt_hidden(self) -> Mapping[int, torch.Tensor]:
        """The target's hidden states of the prompt without its last token, layer -> [size - 1, H], if the drafter requests them.

        Available while the drafter admits the row, and while other rows may share its prefix.
        """
        if len(self._hidden) > 1:
            layers = self._hidden[0]
            self._hidden = [{layer: torch.cat([part[layer] for part in self._hidden]) for layer in layers}]
        return self._hidden[0] if self._hidden else {}

    @prompt_hidden.setter
    def prompt_hidden(self, hidden: Mapping[int, torch.Tensor]) -> None:
        self._hidden = [hidden] if hidden else []

    def add_prompt_hidden(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Add the hidden states of the prompt's next positions. All parts are joined when they are read.

        Args:
            hidden: Layer -> [n, H].
        """
        self._hidden.append(hidden)

    def num_prompt_hidden(self, layer: int) -> int:
        """Number of positions of the prompt with known hidden states of a layer.

        Args:
            layer: Number of the layer.
        """
        return sum(len(part[layer]) for part in self._hidden if layer in part)

    @property
    def num_new(self) -> int:
        """Number of committed output tokens."""
        return self.size - self.prompt_length

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be committed."""
        return self.limit - self.size

    def ends_with(self, token: int, num_new: int) -> bool:
        """True if the output ends with a token: an end token after the minimum length.

        Args:
            token: The token's id.
            num_new: Number of output tokens up to and including it.
        """
        return token in self.eos and num_new > self.params.min_new_tokens

    @property
    def knows_text(self) -> bool:
        """True if the request has a prediction, or a processor that may force tokens."""
        return bool(self.params.prediction) or any(hasattr(one, "forced_tokens") for one in self.params.processors)

    @property
    def full_context(self) -> IntArray:
        """Encoder source (if any), then prompt and output."""
        if self.source is None:
            return self.tokens
        return np.concatenate([self.source, self.tokens[self.prompt_length :]])

    def as_decoder_only(self) -> Row:
        """Return this row for a decoder-only model: source and output as one sequence."""
        prompt, own = self.full_context, self.committed
        out = Row(self.request_id, prompt, self.params, seed=self.seed, limit=self.limit, eos=self.eos, committed=own)
        out.rng_key = self.rng_key
        return out

    def with_draft(self, token_ids: Sequence[int], key: int) -> Row:
        """Return this row extended by draft tokens, as input of a further drafter.

        `committed` stays the engine's row. The result never stops on strings, which are conditions of committed text.

        Args:
            token_ids: Draft tokens.
            key: Key of the result's random streams.
        """
        out = Row.__new__(Row)
        out.request_id, out.params, out.seed, out.limit = self.request_id, self.params, self.seed, self.limit
        out.stop, out.source, out.rng_key, out._committed = None, self.source, key, self.committed
        out.eos, out.prompt_length, out.state, out._hidden = self.eos, self.prompt_length, {}, []
        out._buffer = np.empty(self.size + len(token_ids) + 64, dtype=np.int64)
        out._buffer[: self.size] = self.tokens
        out.size = self.size
        out.num_cached = 0
        out.extend(token_ids)
        return out

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens.

        Args:
            token_ids: The tokens.
        """
        end = self.size + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int64)
            grown[: self.size] = self.tokens
            self._buffer = grown
        self._buffer[self.size : end] = token_ids
        self.size = end


@dataclass(frozen=True, slots=True)
class RuleNeeds:
    """Requirements of an acceptance rule on drafters."""

    shares_noise: bool = False
    """Drafter and target draw with the same noise, keyed by position."""
    confidence: bool = False
    """The rule reads `Proposal.confidence`."""
    ignores_drafts: bool = False
    """The output depends on the target alone, never on the draft tokens."""


NO_NEEDS = RuleNeeds()
NO_CAPABILITIES = Capabilities()


class Rows:
    """The active rows of one step, in cache order, with their random streams.

    Membership is fixed: the engine builds new Rows when rows join or leave, so that `state` may cache anything that depends on
    the membership and the parameters alone.
    """

    __slots__ = ("capabilities", "level", "needs", "rows", "state")

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        needs: RuleNeeds = NO_NEEDS,
        level: int = 0,
        capabilities: Capabilities = NO_CAPABILITIES,
    ) -> None:
        """Fix the membership.

        Args:
            rows: The rows in cache order.
            needs: Requirements of the rule.
            level: 0 for the engine's rows, plus one for each drafter that runs the step itself.
            capabilities: The target's; without trees if the rule takes none.
        """
        self.rows, self.capabilities = tuple(rows), capabilities
        self.needs, self.level = needs, level
        self.state: dict[StateKey[Any], Any] = {}

    def with_draft(self, drafted: Sequence[Sequence[int]], tag: int) -> Rows:
        """Return the rows extended by draft tokens, one level deeper, with independent random streams.

        Keys are derived from (key, level, start, tag), so that no two drafters draw the same numbers.

        Args:
            drafted: B lists of tokens.
            tag: Distinguishes drafters that extend the same rows in one step.
        """
        rows = [
            row.with_draft(tokens, derive(row.rng_key, self.level, row.size, tag))
            for row, tokens in zip(self.rows, drafted, strict=True)
        ]
        out = self.like(rows)
        out.level += 1
        return out

    def as_decoder_only(self) -> Rows:
        """Return an encoder-decoder's rows for a decoder-only model: source and output as one sequence."""
        return self.like([row.as_decoder_only() for row in self.rows])

    def like(self, rows: Sequence[Row], *, confidence: bool | None = None) -> Rows:
        """Return Rows of other rows with the same settings and state.

        Args:
            rows: The other rows.
            confidence: True or False for a rule that needs confidence or not; None keeps the need.
        """
        needs = self.needs if confidence is None else replace(self.needs, confidence=confidence)
        out = Rows(rows, needs=needs, level=self.level, capabilities=self.capabilities)
        out.state = self.state
        return out

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def streams(self, device: torch.device, most: int = 127) -> Streams:
        """Return the rows' random streams at their present lengths.

        Args:
            device: Device of the random numbers.
            most: Largest offset of a uniform, if they are on a device.
        """
        seeds, starts, keys = torch.tensor([(row.seed, row.size, row.rng_key) for row in self]).view(-1, 3).unbind(1)
        noise = self.needs.shares_noise
        return Streams(seeds, starts, keys=keys, level=self.level, shares_noise=noise, device=device, most=most)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix of two contexts."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
