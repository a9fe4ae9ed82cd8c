"""Changes of the logits before the temperature: penalties, biases, masks and transformers' LogitsProcessors.

Each is a pure function of (context, logits), applied equally to target and draft at every draft position. Owns no state;
processors that are known to keep state are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foresay.decoding.devices import is_remote, moved, to_device
from foresay.decoding.penalties import Paths, add_constants, forbid_ends, is_penalised, penalise
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams
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


def check_processors(processors: Sequence[LogitsProcessor]) -> None:
    """Raise ConfigError for a processor that is not callable or is known to keep state."""
    for processor in processors:
        if isinstance(processor, list):  # transformers' LogitsProcessorList
            check_processors(processor)
        if not callable(processor):
            raise ConfigError("is not callable as (input_ids, scores) -> scores", param="processors", value=processor)
        stateful = [c.__name__ for c in type(processor).__mro__ if c.__name__ in STATEFUL_PROCESSORS]
        if stateful:
            text = (
                f": {stateful[0]} is not a pure function of (input_ids, scores); speculation scores a position "
                "more than once, so it would see calls that plain decoding never makes. Remove it, or decode with transformers"
            )
            raise ConfigError(text, param="processors", value=stateful[0])


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
                text = f": token {token} is not in the vocabulary (0 to {vocab_size - 1})"
                raise ConfigError(text, param=name, value=token)
    banned = set(params.banned_token_ids)
    if len(banned) >= vocab_size:
        raise ConfigError(f"bans all {vocab_size} tokens: no token can be generated", param="banned_token_ids")
    allowed = set(params.allowed_token_ids) if params.allowed_token_ids is not None else None
    if params.min_new_tokens and allowed is not None and not allowed - banned - eos:
        text = "contains only tokens that end the output, which {min_new_tokens} forbids"
        raise ConfigError(text, param="allowed_token_ids", min_new_tokens=params.min_new_tokens)


def processes(row: Row) -> bool:
    """True if any parameter changes this row's logits at its present length."""
    params = row.params
    return params.processes or row.num_new < params.min_new_tokens


@dataclass(frozen=True, slots=True)
class Processed:
    """The processed scores of R rows."""

    rows: list[int]
    scores: torch.Tensor
    """[R, T, V] float32; meaningless at positions after a row's own."""
    failures: Mapping[tuple[int, int], RequestError]
    """(row, position) -> why no token can be generated there; its scores are raw."""


def process_rows(
    logits: torch.Tensor,
    rows: Rows,
    draft_ids: torch.Tensor | None,
    num_before: int,
    counts: Sequence[int] | None,
    parents: torch.Tensor | None,
) -> Processed | None:
    """Return the scores of the rows that have processing; None if no row has any. See `build_distributions`.

    On a device only a row with processors of its own, or with a list of allowed tokens, is read back: others always have a token
    left. For a draft (counts is None) a position where a processor raises, or where no token is left, keeps its raw scores
    silently, since any distribution is valid for a draft.
    """
    chosen = [i for i, row in enumerate(rows) if processes(row)]
    if not chosen:
        return None
    width, vocab, device = (
        logits.shape[1] if counts is None else max(counts[i] for i in chosen) + 1,
        logits.shape[2],
        logits.device,
    )
    index = to_device(chosen, device)
    raw = logits[:, :width] if len(chosen) == len(rows) else logits[:, :width].index_select(0, index)
    scores, own = raw.to(torch.float32, copy=True), [rows[i] for i in chosen]
    ids = torch.zeros(len(rows), 0, dtype=torch.int64) if draft_ids is None else draft_ids
    ids, parents = moved(ids, device), None if parents is None else moved(parents, device)
    tree = None if parents is None else parents.index_select(0, index)
    paths = Paths.of(ids.index_select(0, index), width, num_before, tree, vocab)
    _apply(scores, own, paths)
    if counts is None and is_remote(device):  # banned tokens may be all that a trimmed draft scores
        scores = torch.where((scores > -torch.inf).any(-1, keepdim=True), scores, raw)
    walked = [j for j, row in enumerate(own) if _may_fail(row, vocab, is_remote=is_remote(device))]
    failures: dict[tuple[int, int], RequestError] = {}
    if walked:
        drafted = ids.tolist()
        trees = None if parents is None else parents.tolist()
        for j in walked:
            i, count = chosen[j], width if counts is None else counts[chosen[j]] + 1
            walk = _Walk(
                scores[j, :count], raw[j, :count], own[j], drafted[i], num_before, None if trees is None else trees[i]
            )
            if counts is not None:
                failures |= {(i, position): error for position, error in walk.failures.items()}
    return Processed(chosen, scores, failures)


def _apply(scores: torch.Tensor, rows: Sequence[Row], paths: Paths) -> None:
    """Apply penalties, then biases, then the minimum length to rows' scores, [R, T, V], in place."""
    chosen = [j for j, row in enumerate(rows) if is_penalised(row.params)]
    if len(chosen) == len(rows):
        penalise(scores, rows, paths)
    elif chosen:
        index = to_device(chosen, scores.device)
        some = scores.index_select(0, index)
        own = Paths(paths.token_ids.index_select(0, index), paths.before.index_select(0, index))
        penalise(some, [rows[j] for j in chosen], own)
        scores.index_copy_(0, index, some)
    add_constants(scores, rows)
    forbid_ends(scores, rows, paths)


def _may_fail(row: Row, vocab: int, *, is_remote: bool) -> bool:
    """True if a position may have no token left, or if processors must see its text."""
    params = row.params
    if params.processors or params.allowed_token_ids is not None:
        return True
    if is_remote:
        return len({*params.banned_token_ids, *row.eos}) >= vocab
    return bool(params.banned_token_ids or params.logit_bias or params.min_new_tokens)


class _Walk:
    """Calls a row's processors, in place, at the positions that an output can reach, and finds those without a token.

    Positions that no output can reach keep their raw scores, because a processor must not see text that is never generated: after
    a token that the processing forbids, after one that ends the output, after a position that failed.
    """

    def __init__(
        self,
        scores: torch.Tensor,
        raw: torch.Tensor,
        row: Row,
        draft_ids: Sequence[int],
        num_before: int,
        parents: Sequence[int] | None,
    ) -> None:
        """scores: [T, V] float32, processed but for processors. raw: [T, V]. Others as in `process_rows`."""
        self.failures: dict[int, RequestError] = {}
        contexts: dict[int, list[int]] = {}
        for t in range(scores.shape[0]):
            parent = t - 1 if parents is None or t == 0 else parents[t - 1] + 1
            prefix = list(draft_ids[:num_before])
            if t > 0:
                token = draft_ids[num_before + t - 1]
                is_open = parent in contexts and parent not in self.failures
                if not is_open or not _possible(scores[parent], token):
                    scores[t] = raw[t]
                    continue
                prefix = [*contexts[parent], token]
                if row.ends_with(token, row.num_new + len(prefix)):
                    scores[t] = raw[t]
                    continue
            contexts[t] = prefix
            try:
                _process_position(scores[t], row, prefix)
            except RequestError as error:
                scores[t] = raw[t]
                self.failures[t] = error


def _process_position(scores: torch.Tensor, row: Row, prefix: Sequence[int]) -> None:
    """Apply the request's processors. scores: [V], changed in place."""
    if row.params.processors:
        _call_processors(scores, row, prefix)
    if not bool((scores > -torch.inf).any()):
        raise RequestError(row.request_id, "its processors, allowed and banned tokens leave no token to generate")


def _possible(scores: torch.Tensor, token: int) -> bool:
    return token < scores.shape[0] and bool(scores[token] > -torch.inf)


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
