"""What changes logits before the temperature: penalties, biases, masks and transformers' LogitsProcessors.

Every change is a pure function of (context, logits), applied alike to target and draft at each draft position. Owns no
state; processors known to keep some are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.core import Row, SamplingParams
from foresay.errors import ConfigError
from foresay.params import LogitsProcessor

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
"""transformers processors that remember earlier calls, or that need the encoder's input or the beam: not (ids, scores)."""


def check_processors(processors: Sequence[LogitsProcessor]) -> None:
    """Raise ConfigError for a processor that is not callable, or is known to keep state."""
    for processor in processors:
        name = type(processor).__name__
        if isinstance(processor, list):  # transformers' LogitsProcessorList
            check_processors(processor)
        if not callable(processor):
            raise ConfigError(f"processors: {processor!r} is not callable as (input_ids, scores) -> scores")
        if name in STATEFUL_PROCESSORS:
            raise ConfigError(
                f"processors: {name} is not a pure function of (input_ids, scores); speculation scores a position more "
                "than once, so it would see calls that plain decoding never makes. Remove it, or decode with transformers"
            )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ConfigError for token ids in the parameters that the vocabulary does not have."""
    named = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                raise ConfigError(f"{name} names token {token}, but the vocabulary has ids 0 to {vocab_size - 1}")
    if len(set(params.banned_token_ids)) >= vocab_size:
        raise ConfigError(f"banned_token_ids bans all {vocab_size} tokens: nothing can be written")


def process_row(scores: torch.Tensor, row: Row, guessed: Sequence[int]) -> None:
    """Process the scores of one place of one row, in place.

    scores: [V] float32. guessed: draft tokens between the committed ones and this place. Raises ConfigError when no
    token is left.
    """
    params, vocab = row.params, scores.shape[0]
    if params.repetition_penalty != 1.0:
        _repetition(scores, _ids(row, 0, guessed, vocab, scores.device), params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids = _ids(row, row.prompt_length, guessed, vocab, scores.device)
        _subtract_counts(scores, ids, params.presence_penalty, params.frequency_penalty)
    for token, bias in params.logit_bias.items():
        if token < vocab:
            scores[token] += bias
    _mask(scores, row, len(guessed))
    if params.processors:
        context = torch.cat([torch.from_numpy(row.tokens.copy()), torch.tensor(list(guessed), dtype=torch.int64)])
        context = context[None].to(scores.device)
        for processor in params.processors:
            scores.copy_(processor(context, scores[None].clone())[0])
    if not bool((scores > -torch.inf).any()):
        raise ConfigError("the processors, allowed and banned tokens together leave no token that may be written")


def _ids(row: Row, start: int, guessed: Sequence[int], vocab: int, device: torch.device) -> torch.Tensor:
    ids = torch.cat([torch.from_numpy(row.tokens[start:].copy()), torch.tensor(list(guessed), dtype=torch.int64)])
    return ids[ids < vocab].to(device)


def _repetition(scores: torch.Tensor, ids: torch.Tensor, penalty: float) -> None:
    seen = scores[ids]
    scores[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _subtract_counts(scores: torch.Tensor, ids: torch.Tensor, presence: float, frequency: float) -> None:
    unique, counts = torch.unique(ids, return_counts=True)
    scores[unique] -= presence + frequency * counts


def _mask(scores: torch.Tensor, row: Row, num_guessed: int) -> None:
    """Allowed and banned tokens, and no stop before min_new_tokens."""
    params, vocab = row.params, scores.shape[0]
    if params.allowed_token_ids is not None:
        allowed = [token for token in params.allowed_token_ids if token < vocab]
        kept = scores[allowed].clone()
        scores.fill_(-torch.inf)
        scores[allowed] = kept
    banned = [token for token in params.banned_token_ids if token < vocab]
    if row.num_new + num_guessed < params.min_new_tokens:
        banned += [token for token in row.eos if token < vocab]
    if banned:
        scores[banned] = -torch.inf
