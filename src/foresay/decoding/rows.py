"""What is being decoded: a `Row` for each request, and the `Rows` of one step in cache order.

Owns a row's tokens and where its random streams come from. Knows no model, no text and no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foresay.decoding.randomness import Streams, derive
from foresay.decoding.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]


StopCondition = Callable[[Sequence[int]], int | None]
"""Called with the tokens about to be committed; returns how many to keep when the output ends among them, else None.
It is asked once for every committed token and may keep state."""


class Row:
    """One request while it is decoded: its tokens so far, and what it asked for."""

    __slots__ = (
        "_buffer",
        "committed",
        "eos",
        "extras",
        "limit",
        "num_cached",
        "params",
        "prompt_hidden",
        "prompt_length",
        "request_id",
        "rng_key",
        "seed",
        "size",
        "source",
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
    ) -> None:
        """prompt: at least one token id. limit: most tokens the row may ever hold, prompt included.

        source: what an encoder-decoder's encoder reads; the prompt is then what its decoder starts from.
        """
        self.request_id, self.params, self.seed, self.limit = request_id, params, seed, limit
        self.stop = stop
        self.source = None if source is None else np.asarray(source, dtype=np.int64)
        self.rng_key, self.committed = seed, self
        self.eos = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        self.prompt_length = self.size = len(prompt)
        self._buffer = np.empty(max(self.size + 64, 128), dtype=np.int64)
        self._buffer[: self.size] = prompt
        self.extras: dict[str, Any] = {}
        self.num_cached = 0
        """Prompt tokens whose slots were another row's."""
        self.prompt_hidden: Mapping[int, torch.Tensor] = {}
        """The target's hidden states of the prompt but its last token, layer -> [size - 1, H], for a drafter that asked for
        them; there while it admits the row, and as long as others may begin with what it holds."""

    @property
    def tokens(self) -> IntArray:
        """Prompt and committed output, [size] int64; a view that the next `extend` may outdate."""
        return self._buffer[: self.size]

    @property
    def num_new(self) -> int:
        """Committed output tokens."""
        return self.size - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - self.size

    def ends_with(self, token: int, num_new: int) -> bool:
        """Whether the output ends with `token` as its `num_new`-th: an end token behind the least length."""
        return token in self.eos and num_new > self.params.min_new_tokens

    @property
    def full_context(self) -> IntArray:
        """Encoder source (if any), then prompt and output."""
        if self.source is None:
            return self.tokens
        return np.concatenate([self.source, self.tokens[self.prompt_length :]])

    def as_decoder_only(self) -> Row:
        """This row as a decoder-only model reads it: source and output as one text."""
        out = Row(self.request_id, self.full_context, self.params, seed=self.seed, limit=self.limit, eos=self.eos)
        out.rng_key, out.committed = self.rng_key, self.committed
        return out

    def with_draft(self, token_ids: Sequence[int], key: int) -> Row:
        """This row with tokens guessed behind it: what a drafter that drafts further sees.

        `committed` stays the engine's row, whose tokens are committed; `key` seeds what is drawn for it. It never stops on
        strings, which are conditions of committed text.
        """
        out = Row.__new__(Row)
        out.request_id, out.params, out.seed, out.limit = self.request_id, self.params, self.seed, self.limit
        out.stop, out.source, out.rng_key, out.committed = None, self.source, key, self.committed
        out.eos, out.prompt_length, out.extras, out.prompt_hidden = self.eos, self.prompt_length, {}, {}
        out._buffer = np.empty(self.size + len(token_ids) + 64, dtype=np.int64)
        out._buffer[: self.size] = self.tokens
        out.size = self.size
        out.num_cached = 0
        out.extend(token_ids)
        return out

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        end = self.size + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int64)
            grown[: self.size] = self.tokens
            self._buffer = grown
        self._buffer[self.size : end] = token_ids
        self.size = end


@dataclass(frozen=True, slots=True)
class RuleNeeds:
    """What an acceptance rule asks of whoever drafts for it, and lets them know."""

    shares_noise: bool = False
    """Drafter and target draw with the same noise, keyed by position."""
    confidence: bool = False
    """It looks at `Proposal.confidence`."""
    ignores_drafts: bool = False
    """What is written depends on the target alone, never on what was guessed."""


NO_NEEDS = RuleNeeds()


class Rows:
    """The active rows of one step, in cache order, with their random streams.

    Immutable in membership: the engine makes a new one when rows join or leave, so that `memo` may hold what
    depends on the membership and the parameters alone.
    """

    __slots__ = ("column_cost", "level", "memo", "needs", "ragged", "rows")

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        needs: RuleNeeds = NO_NEEDS,
        level: int = 0,
        ragged: bool = False,
        column_cost: float | None = None,
    ) -> None:
        """needs: the rule's. level: 0 for the engine's rows, one more for each drafter that drafts by decoding itself.

        ragged: the target's passes over them take the time of their real tokens, not that of the longest row. column_cost: what
        is known of them before any was timed; see Capabilities.
        """
        self.rows, self.column_cost = tuple(rows), column_cost
        self.needs, self.level, self.ragged = needs, level, ragged
        self.memo: dict[str, Any] = {}

    def with_draft(self, drafted: Sequence[Sequence[int]], tag: int) -> Rows:
        """The rows with tokens guessed behind them, a level deeper, with random streams of their own.

        drafted: B lists of tokens. tag: tells apart those who draft from the same rows in one step. Keys are derived
        from (key, level, start, tag), so that nothing drawn for one drafter is drawn again for another.
        """
        rows = [
            row.with_draft(tokens, derive(row.rng_key, self.level, row.size, tag))
            for row, tokens in zip(self.rows, drafted, strict=True)
        ]
        out = self.like(rows)
        out.level += 1
        return out

    def as_decoder_only(self) -> Rows:
        """The rows as a decoder-only model reads an encoder-decoder's requests: source and output as one text."""
        return self.like([row.as_decoder_only() for row in self.rows])

    def like(self, rows: Sequence[Row], *, confidence: bool | None = None) -> Rows:
        """Other rows in the place of these, with the same parameters; perhaps for a rule that needs confidence."""
        needs = self.needs if confidence is None else replace(self.needs, confidence=confidence)
        out = Rows(rows, needs=needs, level=self.level, ragged=self.ragged, column_cost=self.column_cost)
        out.memo = self.memo
        return out

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def streams(self, device: torch.device) -> Streams:
        """The rows' random streams at their present lengths."""
        key = f"seeds {device}"
        if key not in self.memo:
            self.memo[key] = torch.tensor([row.seed for row in self], device=device)
        starts = torch.tensor([row.size for row in self], device=device)
        keys = torch.tensor([row.rng_key for row in self], device=device)
        return Streams(self.memo[key], starts, keys=keys, level=self.level, shares_noise=self.needs.shares_noise)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many tokens two contexts share from the start."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
