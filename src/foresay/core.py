"""The nouns and protocols every other module speaks in.

Owns what a request asks for (`SamplingParams`), what is being decoded (`Row`, `Rows`), what was guessed
(`Proposal`), what the target said (`Verdict`) and what came of it (`Step`). Knows no model, no tokenizer and no rule.
Letters in docstrings: B rows, K draft tokens, T columns of a pass, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from foresay.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from foresay.models.base import ModelOutput
    from foresay.randomness import Streams
    from foresay.sampling import Laws

IntArray = npt.NDArray[np.int64]
LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A pure function of (token ids [1, L], scores [1, V]) -> scores [1, V], as transformers defines it."""

MAX_SEED = 2**63 - 1


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


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (low < value if open_low else low <= value) or value > high:
        left, right = ("(" if open_low else "["), (")" if high == math.inf else "]")
        raise ConfigError(f"{name}={value!r} must be a finite number in {left}{low:g}, {high:g}{right}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name}={value!r} must be an integer {bound}")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}={value!r} must be a sequence of token ids")
    ids = tuple(value)
    for token in ids:
        _integer(name, token, 0)
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Validates itself: a ConfigError names the field, the value and the bound."""

    max_new_tokens: int = 256
    """Tokens to write at most; the context limit may end the request earlier."""
    min_new_tokens: int = 0
    """No stop token, and no stop string, ends the output before this many tokens."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens (ties with the k-th stay); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches this share."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output: divided by it when positive, multiplied when negative."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """When given, no other token is ever written."""
    banned_token_ids: tuple[int, ...] = ()
    """Never written."""
    processors: tuple[LogitsProcessor, ...] = ()
    """transformers LogitsProcessors, applied after the penalties and biases, before the temperature."""
    seed: int | None = None
    """Stream of the request's randomness; None draws one and reports it."""
    stop_token_ids: tuple[int, ...] = ()
    """End the output, beside the model's own end-of-sequence tokens; the stop token stays in the ids."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; the text is cut before the first of them."""
    ignore_eos: bool = False
    """Write on past the model's end-of-sequence tokens (stop_token_ids still stop)."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many likeliest ones, under the raw logits."""

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}; "
                "raise max_new_tokens or lower min_new_tokens"
            )
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        self._check_tokens()
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 1000)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r} must be True or False")

    def _check_tokens(self) -> None:
        """Copy the collections, so that what was validated stays, and refuse contradictions among them."""
        put = object.__setattr__
        stop = (self.stop,) if isinstance(self.stop, str) else self._items("stop")
        if any(not isinstance(s, str) or not s for s in stop):
            raise ConfigError(f"stop={self.stop!r} must be non-empty strings")
        put(self, "stop", stop)
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "banned_token_ids", _token_ids("banned_token_ids", self.banned_token_ids))
        put(self, "processors", self._items("processors"))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not set(allowed) - set(self.banned_token_ids):
                raise ConfigError(
                    "allowed_token_ids is empty, or all of it is in banned_token_ids: nothing can be written"
                )
            put(self, "allowed_token_ids", allowed)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias key", token, 0)
            _number(f"logit_bias[{token}]", bias, -1e4, 1e4)
        put(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def _items(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}={value!r} must be a list or a tuple")
        return tuple(value)

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass."""
        return self.temperature == 0

    @property
    def processes(self) -> bool:
        """Whether anything changes the logits before the temperature."""
        return bool(
            self.min_new_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.processors
        )

    @classmethod
    def of(cls, params: SamplingParams | None = None, **changes: Any) -> SamplingParams:
        """`params` with some fields changed; an unknown name raises with the nearest match."""
        known = {f.name for f in fields(cls)}
        for name in changes:
            if name not in known:
                raise UnknownNameError("parameter", name, known)
        values = {name: getattr(params, name) for name in known} if params is not None else {}
        return cls(**{**values, **changes})


StopCondition = Callable[[Sequence[int]], int | None]
"""Called with the tokens about to be committed; returns how many to keep when the output ends among them, else None.
It is asked once for every committed token and may keep state."""


class Row:
    """One request while it is decoded: its tokens so far, and what it asked for."""

    __slots__ = ("_buffer", "eos", "extras", "limit", "params", "prompt_length", "request_id", "seed", "size", "stop")

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
    ) -> None:
        """prompt: at least one token id. limit: most tokens the row may ever hold, prompt included."""
        self.request_id, self.params, self.seed, self.limit = request_id, params, seed, limit
        self.stop = stop
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

    __slots__ = ("coupled", "items", "level", "memo")

    def __init__(self, items: Sequence[Row], *, coupled: bool = False, level: int = 0) -> None:
        self.items = tuple(items)
        self.coupled, self.level = coupled, level
        self.memo: dict[str, Any] = {}

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
    None when no token was sampled.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    laws: torch.Tensor | None = None
    law_index: torch.Tensor | None = None

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
    """Accepted by the rule; a stop may have cut some of them from token_ids."""
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


class LengthPolicy(Protocol):
    """How many tokens to guess."""

    def budget(self, rows: Rows) -> list[int]:
        """Most tokens to guess for each row in this step."""
        ...

    def proceed(self, index: int, laws: Laws, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """[B] bool after draft token `index`: which rows draft on; None lets all of them."""
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


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    exact: bool
    """Whether the output's law is the target's."""
    coupled: bool
    """Whether drafter and target share noise keyed by position alone."""

    def judge(self, target: Laws, proposal: Proposal, streams: Streams) -> Verdict:
        """Decide how much of the proposal stays, and the token after it."""
        ...
