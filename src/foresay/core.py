"""The nouns and protocols every other module speaks in.

Owns what a request asks for (`SamplingParams`), what is being decoded (`Row`, `Rows`), what was guessed
(`Proposal`), what the target said (`Verdict`) and what came of it (`Step`). Knows no model, no tokenizer and no rule.
Letters in docstrings: B rows, K draft tokens, T columns of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from foresay.params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from foresay.models.base import ModelOutput
    from foresay.randomness import Streams
    from foresay.sampling import Laws

IntArray = npt.NDArray[np.int64]


class Origin(StrEnum):
    """Who produced a token."""

    DRAFT = "draft"
    RESIDUAL = "residual"
    BONUS = "bonus"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


StopCondition = Callable[[Sequence[int]], int | None]
"""Called with the tokens about to be committed; returns how many to keep when the output ends among them, else None.
It is asked once for every committed token and may keep state."""


class Row:
    """One request while it is decoded: its tokens so far, and what it asked for."""

    __slots__ = (
        "_buffer",
        "eos",
        "extras",
        "key",
        "limit",
        "params",
        "prompt_length",
        "request_id",
        "root",
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
        self.key, self.root = seed, self
        self.eos = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        self.prompt_length = self.size = len(prompt)
        self._buffer = np.empty(max(self.size + 64, 128), dtype=np.int64)
        self._buffer[: self.size] = prompt
        self.extras: dict[str, Any] = {}

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

    @property
    def history(self) -> IntArray:
        """All that was read and written: the tokens, behind the source where an encoder reads one."""
        if self.source is None:
            return self.tokens
        return np.concatenate([self.source, self.tokens[self.prompt_length :]])

    def flat(self) -> Row:
        """This row with its history for tokens."""
        out = Row(self.request_id, self.history, self.params, seed=self.seed, limit=self.limit, eos=self.eos)
        out.key, out.root = self.key, self.root
        return out

    def ahead(self, token_ids: Sequence[int], key: int) -> Row:
        """This row with tokens guessed behind it: what a drafter that drafts further sees.

        `root` stays the engine's row, whose tokens are committed; `key` seeds what is drawn for it. It never stops on
        strings, which are conditions of committed text.
        """
        out = Row.__new__(Row)
        out.request_id, out.params, out.seed, out.limit = self.request_id, self.params, self.seed, self.limit
        out.stop, out.source, out.key, out.root = None, self.source, key, self.root
        out.eos, out.prompt_length, out.extras = self.eos, self.prompt_length, {}
        out._buffer = np.empty(self.size + len(token_ids) + 64, dtype=np.int64)
        out._buffer[: self.size] = self.tokens
        out.size = self.size
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


class Rows:
    """The active rows of one step, in cache order, with their random streams.

    Immutable in membership: the engine makes a new one when rows join or leave, so that `memo` may hold what
    depends on the membership and the parameters alone.
    """

    __slots__ = ("confident", "coupled", "items", "level", "memo")

    def __init__(self, items: Sequence[Row], *, coupled: bool = False, confident: bool = False, level: int = 0) -> None:
        """coupled: the rule shares noise with the drafter. confident: the rule looks at `Proposal.confidence`.

        level: 0 for the engine's rows, one more for each drafter that drafts by decoding itself.
        """
        self.items = tuple(items)
        self.coupled, self.confident, self.level = coupled, confident, level
        self.memo: dict[str, Any] = {}

    def ahead(self, drafted: Sequence[Sequence[int]], tag: int) -> Rows:
        """The rows with tokens guessed behind them, a level deeper, with random streams of their own.

        drafted: B lists of tokens. tag: tells apart those who draft from the same rows in one step. Keys are derived
        from (key, level, start, tag), so that nothing drawn for one drafter is drawn again for another.
        """
        from foresay.randomness import derive

        items = [
            row.ahead(tokens, derive(row.key, self.level, row.size, tag))
            for row, tokens in zip(self.items, drafted, strict=True)
        ]
        out = self.of(items)
        out.level += 1
        return out

    def flat(self) -> Rows:
        """The rows as a decoder-only model reads an encoder-decoder's requests: source and output as one text."""
        return self.of([row.flat() for row in self.items])

    def of(self, items: Sequence[Row], *, confident: bool | None = None) -> Rows:
        """Other rows in the place of these, with the same parameters; perhaps for a rule that needs confidence."""
        needs = self.confident if confident is None else confident
        out = Rows(items, coupled=self.coupled, confident=needs, level=self.level)
        out.memo = self.memo
        return out

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.items)

    def __getitem__(self, index: int) -> Row:
        return self.items[index]

    def streams(self, device: torch.device) -> Streams:
        """The rows' random streams at their present lengths."""
        from foresay.randomness import Streams

        return Streams.of(self, device)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter guessed.

    token_ids: [B, K] int64, right-padded. num_tokens: B ints, 0 <= n <= K.
    laws: [N, V] float32, the laws that sampled tokens were drawn from. law_index: [B, K] into laws, -1 = point mass;
    None when no token was sampled. confidence: [B, K] float32, the draft model's softmax probability of each token at
    temperature 1, which no exact rule looks at; None where no model made a guess.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    laws: torch.Tensor | None = None
    law_index: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """K, the length of the longest guess."""
        return int(self.token_ids.shape[1])

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        """No guesses: plain decoding."""
        return cls(torch.empty(batch, 0, dtype=torch.int64, device=device), [0] * batch)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said: num_accepted [B] int64, and token_ids [B], the residual after a rejection, else the bonus."""

    num_accepted: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one written token under the raw logits, and the likeliest tokens at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass over one row: what was guessed, accepted and committed."""

    request_id: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_drafted: int
    num_accepted: int
    """Draft tokens committed. Those behind a stop are counted neither here nor as drafted."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    batch_size: int = 1
    draft_s: float = 0.0
    target_s: float = 0.0
    total_s: float = 0.0
    """Seconds of the whole step, and of the time in draft and target forwards, shared by the rows of its batch."""

    @property
    def num_tested(self) -> int:
        """Draft tokens the rule looked at: those behind the first rejection were not."""
        return min(self.num_accepted + 1, self.num_drafted)


Move = tuple[int, int]
"""(from, to): the row at `from` takes the place `to`, whose row is gone."""


class KVCache(Protocol):
    """What a model remembers of each row."""

    lengths: list[int]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set row i to min(its length, lengths[i]); rows behind the given ones stay as they are."""
        ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves; rows from `count` on are gone."""
        ...


@dataclass(frozen=True, slots=True)
class Guess:
    """One token that a draft model has just added to each row's draft, and what it thought.

    token_ids: [B] int64. laws: the laws [B, 1] they were drawn from, with the raw scores. hidden: [B, H] or None, the draft's
    last hidden state.
    """

    token_ids: torch.Tensor
    laws: Laws
    hidden: torch.Tensor | None = None


class LengthPolicy(Protocol):
    """How many tokens to guess."""

    def budget(self, rows: Rows) -> list[int]:
        """Most tokens to guess for each row in this step."""
        ...

    def proceed(self, index: int, guess: Guess) -> torch.Tensor | None:
        """[B] bool after a draft model's token `index`: which rows draft on; None lets all of them.

        A token stays in the draft whatever it is: dropping it for its own value would condition its law.
        """
        ...

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """See what a step did to each row, after it."""
        ...


class Drafter(Protocol):
    """What guesses tokens. Rows are named by their place in the batch; `rearrange` keeps the places true."""

    hidden_layers: tuple[int, ...]
    """Layers of the target whose hidden states `observe` wants to see."""

    def admit(self, rows: Rows, first: int) -> None:
        """Rows from place `first` on are new."""
        ...

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Guess up to `budget` tokens for each row."""
        ...

    def observe(self, rows: Rows, verdict: Verdict | None, target: ModelOutput | None) -> None:
        """See what was committed (already in `rows`) and what the target computed."""
        ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves of rows."""
        ...

    def reset(self) -> None:
        """Forget every row."""
        ...


@runtime_checkable
class BorrowsCache(Protocol):
    """A drafter that drafts in the target's own cache."""

    def borrow(self, cache: KVCache) -> None:
        """Called once, before anything is admitted."""
        ...


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    exact: bool
    """Whether the output's law is the target's."""
    coupled: bool
    """Whether drafter and target share noise keyed by position alone."""
    confident: bool
    """Whether it looks at the draft's confidence, and not at its laws alone."""

    def judge(self, target: Laws, proposal: Proposal, streams: Streams) -> Verdict:
        """Decide how much of the proposal stays, and the token after it."""
        ...
