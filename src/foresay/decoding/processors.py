"""Changes of the logits before the temperature: penalties, biases, masks and transformers' LogitsProcessors.

Each is a pure function of (context, logits), applied equally to target and draft at every draft position. Owns no state;
processors that are known to keep state are refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from foresay.decoding.rows import Row
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams
from foresay.decoding.state import StateKey
from foresay.errors import ConfigError, RequestError

STATEFUL_PROCESSORS = frozenset(
    {
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "AlternatingCodebooksLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "ContinuousBatchingLogitsProcessorList",
    }
)
"""transformers processors that are not functions of (ids, scores): they keep state, or need the encoder's input or the beam."""


_VECTORS = StateKey[dict[tuple[torch.device, int], torch.Tensor]](dict)
"""Biases and masks of a row, by device and vocabulary size."""


def check_processors(processors: Sequence[LogitsProcessor]) -> None:
    """Raise ConfigError for a processor that is not callable or is known to keep state."""
    for processor in processors:
        if isinstance(processor, list):  # transformers' LogitsProcessorList
            check_processors(processor)
        if not callable(processor):
            raise ConfigError("is not callable as (input_ids, scores) -> scores", param="processors", value=processor)
        stateful = [c.__name__ for c in type(processor).__mro__ if c.__name__ in STATEFUL_PROCESSORS]
        if stateful:
            raise ConfigError(
                f"processors: {stateful[0]} is not a pure function of (input_ids, scores); speculation scores a position "
                "more than once, so it would see calls that plain decoding never makes. Remove it, or decode with transformers",
                param="processors",
            )


def check_token_ids(params: SamplingParams, vocab_size: int, eos: frozenset[int] = frozenset()) -> None:
    """Raise ConfigError for token ids outside the vocabulary, and if no token is left that may be generated.

    eos: end-of-sequence tokens, which min_new_tokens forbids at first.
    """
    named = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                raise ConfigError(
                    f"{name} names token {token}, but the vocabulary has ids 0 to {vocab_size - 1}", param=name
                )
    banned = set(params.banned_token_ids)
    if len(banned) >= vocab_size:
        raise ConfigError(
            f"banned_token_ids bans all {vocab_size} tokens: no token can be generated", param="banned_token_ids"
        )
    allowed = set(params.allowed_token_ids) if params.allowed_token_ids is not None else None
    if params.min_new_tokens and allowed is not None and not allowed - banned - eos:
        raise ConfigError(
            f"every token in allowed_token_ids ends the output, and min_new_tokens={params.min_new_tokens} forbids that",
            param="allowed_token_ids",
        )


def processes(row: Row) -> bool:
    """True if any parameter changes this row's logits at its present length."""
    params = row.params
    return params.processes or row.num_new < params.min_new_tokens


def process_row(
    scores: torch.Tensor,
    row: Row,
    draft_ids: Sequence[int],
    num_before: int,
    *,
    for_target: bool,
    parents: Sequence[int] | None = None,
) -> dict[int, RequestError]:
    """Process a row's scores in place; return the errors by position.

    scores: [T, V] float32. Position 0 follows the committed tokens and `num_before` drafted ones, position 1 + j also token
    num_before + j of draft_ids and, if `parents` is given, its ancestors. Positions that no output can reach are left
    unprocessed, because a processor must not see text that is never generated: after a token that the processing forbids, after
    one that ends the output, after a position that failed. for_target: a position where a processor raises, or where no token
    is left, is an error and keeps its raw scores; a draft uses the raw scores silently, since any distribution is valid for a
    draft.
    """
    constants, penalties = _constants(row, scores), _Penalties.of(row, scores)
    contexts: dict[int, list[int]] = {}
    failures: dict[int, RequestError] = {}
    for t in range(scores.shape[0]):
        parent = t - 1 if parents is None or t == 0 else parents[t - 1] + 1
        prefix = list(draft_ids[:num_before])
        if t > 0:
            token = draft_ids[num_before + t - 1]
            if parent not in contexts or parent in failures or not _possible(scores[parent], token):
                continue
            prefix = [*contexts[parent], token]
            if row.ends_with(token, row.num_new + len(prefix)):
                continue
        contexts[t] = prefix
        raw = scores[t].clone()
        try:
            _process_position(scores[t], row, prefix, constants, penalties)
        except RequestError as error:
            scores[t] = raw
            if for_target:
                failures[t] = error
    return failures


def _process_position(
    scores: torch.Tensor,
    row: Row,
    prefix: Sequence[int],
    constants: torch.Tensor | None,
    penalties: _Penalties | None,
) -> None:
    """Apply penalties, biases, the minimum length and the request's processors. scores: [V], changed in place."""
    if penalties is not None:
        penalties.apply(scores, prefix)
    if constants is not None:
        scores += constants
    if row.num_new + len(prefix) < row.params.min_new_tokens and row.eos:
        scores[[token for token in row.eos if token < len(scores)]] = -torch.inf
    if row.params.processors:
        _call_processors(scores, row, prefix)
    if not bool((scores > -torch.inf).any()):
        raise RequestError(row.request_id, "its processors, allowed and banned tokens leave no token to generate")


def _possible(scores: torch.Tensor, token: int) -> bool:
    return token < scores.shape[0] and bool(scores[token] > -torch.inf)


def _constants(row: Row, scores: torch.Tensor) -> torch.Tensor | None:
    """Biases and masks, which depend on the parameters alone: one vector [V], built once per request."""
    params, vocab = row.params, scores.shape[1]
    if not params.logit_bias and params.allowed_token_ids is None and not params.banned_token_ids:
        return None
    vectors, key = _VECTORS.of(row), (scores.device, vocab)
    if key not in vectors:
        vectors[key] = _constant_vector(params, vocab).to(scores.device)
    return vectors[key]


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


class _Penalties:
    """Penalties of one row: repetition over prompt and output, presence and frequency over the output.

    The committed tokens are counted once; each position adds the draft tokens before it.
    """

    def __init__(self, row: Row, scores: torch.Tensor) -> None:
        self._params, self._device, self._vocab = row.params, scores.device, scores.shape[1]
        self._seen = set(row.tokens.tolist())
        self._counts = Counter(row.tokens[row.prompt_length :].tolist())

    @staticmethod
    def of(row: Row, scores: torch.Tensor) -> _Penalties | None:
        """Return a row's penalties for scores [T, V], or None if it has none."""
        params = row.params
        any_set = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        return _Penalties(row, scores) if any_set else None

    def apply(self, scores: torch.Tensor, prefix: Sequence[int]) -> None:
        """Penalise scores [V], raw logits after the committed tokens and `prefix`, in place."""
        params = self._params
        if params.repetition_penalty != 1.0:
            ids = self._ids(self._seen.union(prefix))
            seen = scores[ids]
            scores[ids] = torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._counts + Counter(prefix) if prefix else self._counts
            ids = self._ids(counts)
            occurrences = torch.tensor([counts[token] for token in counts if token < self._vocab], device=self._device)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * occurrences

    def _ids(self, tokens: Iterable[int]) -> torch.Tensor:
        inside = [token for token in tokens if token < self._vocab]
        return torch.tensor(inside, dtype=torch.int64, device=self._device)


def _call_processors(scores: torch.Tensor, row: Row, prefix: Sequence[int]) -> None:
    ids = torch.cat([torch.from_numpy(row.tokens.copy()), torch.tensor(list(prefix), dtype=torch.int64)])
    context = ids[None].to(scores.device)
    for processor in row.params.processors:
        try:
            result: Any = processor(context, scores[None].clone())
        except Exception as error:
            name = type(processor).__name__
            raise RequestError(
                row.request_id, f"its processor {name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(result, torch.Tensor) or result.shape != (1, scores.shape[0]):
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            name = type(processor).__name__
            raise RequestError(
                row.request_id, f"its processor {name} returned {shape}, not scores [1, {scores.shape[0]}]"
            )
        scores.copy_(result[0])
