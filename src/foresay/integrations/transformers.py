"""foresay as a decoding method of transformers: `model.generate(..., custom_generate=foresay.generate)`.

Owns the translation of transformers' generation settings. A setting that is not supported is an error that names it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from foresay.decoding.processors import check_processors
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.generation.load import load
from foresay.generation.session import Session
from foresay.models.sources.generation_settings import UNCHANGED, Kind, fields_set
from foresay.models.sources.wrapping import LoadedModel, wrap

_UNSEEN = ("streamer", "assistant_model", "synced_gpus", "tokenizer", "assistant_tokenizer")
"""Arguments of transformers' `generate` that it does not pass to a callable."""
_WITHOUT_EFFECT = frozenset({"attention_mask", "use_cache", "logits_to_keep", "cache_position"})
"""Arguments of the model's forward that are honoured, or that change no output."""

_WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Warpers with a corresponding field in SamplingParams, in the order in which foresay applies the fields."""


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: Any = None,
    drafter: Any = "auto",
    num_draft_tokens: int | None = None,
    length: Any = None,
    rule: str = "speculative",
    seed: int | None = None,
    streamer: BaseStreamer | None = None,
    assistant_model: Any = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode with foresay inside transformers' `generate`; pass this function as `custom_generate`.

    transformers does not pass `streamer`, `assistant_model` and `tokenizer` to a callable, so they are read from its call;
    elsewhere `functools.partial` binds them.

    Args:
        model: The target, a decoder-only transformers model.
        input_ids: [B, L] token ids, left-padded with an attention mask.
        logits_processor: Processors that transformers made of its settings; applied in their order.
        stopping_criteria: Criteria that transformers made of its settings; evaluated after every committed token.
        generation_config: Generation settings; by default the model's.
        draft: As in `foresay.load`.
        drafter: As in `foresay.load`.
        num_draft_tokens: As in `foresay.load`.
        length: As in `foresay.load`.
        rule: As in `foresay.load`.
        seed: As in SamplingParams; without one, a seed is drawn from PyTorch's generator, so `torch.manual_seed` works.
        streamer: Receives the prompt, each token of one row once it is fixed, and the end, also after an error.
        assistant_model: Another name of `draft`.
        stop_strings: Strings that end a row.
        tokenizer: The model's tokenizer, needed by `stop_strings`.
        **model_kwargs: Arguments of the model's forward, of which `attention_mask` is honoured.

    Returns:
        [B, L + new] token ids, padded on the right, or a GenerateDecoderOnlyOutput if the configuration requests it.

    Raises:
        ConfigError: A setting or argument that is not supported, named.
        UnsupportedModelError: An encoder-decoder model.
    """
    unseen = _unseen()
    own_streamer, streamer = streamer, unseen.get("streamer") if streamer is None else streamer
    with contextlib.ExitStack() as borrowed:
        if streamer is not None:
            borrowed.callback(streamer.end)  # a consumer on another thread waits for it
        config = generation_config or model.generation_config
        _refuse(config, model, model_kwargs, unseen, rows=len(input_ids) if streamer is not None else 1)
        if own_streamer is not None and own_streamer is not unseen.get("streamer"):  # else transformers did
            own_streamer.put(input_ids.cpu())
        draft = _drafted(draft, unseen.get("assistant_model") if assistant_model is None else assistant_model)
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        padded = any(len(prompt) < input_ids.shape[1] for prompt in prompts)
        eos = _eos(config, stopping_criteria)
        params = _params(config, logits_processor, stopping_criteria, eos, input_ids.shape[1], padded)
        stops = [c for c in stopping_criteria or () if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        stops += _on_strings(stop_strings, unseen.get("tokenizer") if tokenizer is None else tokenizer)
        target = dataclasses.replace(_borrow(model, borrowed), eos_token_ids=eos, generation=UNCHANGED)
        assistant = _borrow(draft, borrowed) if isinstance(draft, PreTrainedModel) else draft
        options = {"drafter": drafter, "num_draft_tokens": num_draft_tokens, "length": length, "rule": rule}
        session = load(target, assistant, max_batch_size=len(prompts), **options).session()
        outputs: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            pads = input_ids[i, : input_ids.shape[1] - len(prompt)]
            row_processors = tuple(_for_row(processor, i, pads) for processor in params.processors)
            row_params = SamplingParams.of(params, seed=_seed(seed, i), processors=row_processors)
            stop = _Stop(input_ids[i].tolist(), stops) if stops else None
            outputs[session.submit(prompt, row_params, stop=stop)] = []
        _decode(session, outputs, streamer)
    sequences = _padded(input_ids, list(outputs.values()), config)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _decode(session: Session, outputs: dict[int, list[int]], streamer: BaseStreamer | None) -> None:
    """Run every request to its end. outputs: receives the tokens by request. streamer: receives those of the only one."""
    while session.has_work:
        for chunk in session.step():
            if chunk.error is not None:
                raise chunk.error.__cause__ or chunk.error  # an error of the caller's processor is raised unchanged
            outputs[chunk.index].extend(chunk.step.token_ids)
            for token in chunk.step.token_ids if streamer is not None else ():
                assert streamer is not None
                streamer.put(torch.tensor([token]))


def _borrow(model: PreTrainedModel, borrowed: contextlib.ExitStack) -> LoadedModel:
    """Wrap the caller's model. Its attention and mode are restored when `borrowed` closes."""
    loaded = wrap(type(model).__name__, model, None, optimise=False)
    borrowed.callback(loaded.model.release)  # type: ignore[attr-defined]
    return loaded


def _unseen() -> dict[str, Any]:
    """Return the arguments of the surrounding call of transformers' `generate` that it does not pass on, without None.

    They are in the call's frame, or among the keywords of the wrapper that turns gradients off.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return {}
    wrapper = {} if frame.f_back is None else frame.f_back.f_locals.get("kwargs", {})
    found = {name: frame.f_locals.get(name, wrapper.get(name)) for name in _UNSEEN}
    return {name: value for name, value in found.items() if value is not None}


def _drafted(draft: Any, assistant: Any) -> Any:
    """Return the draft model. Raises ConfigError if it is given under both names."""
    if draft is not None and assistant is not None and draft is not assistant:
        raise ConfigError("assistant_model and draft contradict; give one of them")
    return assistant if draft is None else draft


def _on_strings(strings: str | list[str] | None, tokenizer: Any) -> list[Any]:
    if not strings:
        return []
    if tokenizer is None:
        raise ConfigError("need the model's tokenizer; pass tokenizer=", param="stop_strings", value=strings)
    return [StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)]


def _refuse(
    config: GenerationConfig, model: PreTrainedModel, model_kwargs: dict[str, Any], unseen: dict[str, Any], rows: int
) -> None:
    """Raise an error for what cannot be honoured. rows: number of rows of a stream."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; foresay.generate supports decoder-only models"
        )
    refused = fields_set(config, Kind.METHOD, Kind.ADDED, Kind.UNSUPPORTED)
    for name, value in refused.items():
        if name != "max_time":  # a stopping criterion
            raise ConfigError(f"generation setting {name}={value!r} is not supported by foresay.generate; remove it")
    for name in ("assistant_tokenizer", "synced_gpus"):
        if unseen.get(name):
            raise ConfigError(f"{name} is not supported by foresay.generate; remove it")
    if rows > 1:
        raise ConfigError(f"streamer receives one row, and {rows} are decoded; give one prompt and one output")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not supported by foresay.generate; pass input_ids")
    _refuse_positions(model_kwargs.pop("position_ids", None), model_kwargs.get("attention_mask"))
    cache = model_kwargs.pop("past_key_values", None)
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("a filled past_key_values is not supported by foresay.generate; pass the whole input_ids")
    for name, value in model_kwargs.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            raise ConfigError(f"the model's argument {name} is not supported by foresay.generate; remove it")


def _refuse_positions(positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """Raise ConfigError for positions other than transformers' default ones."""
    if positions is None:
        return
    if mask is None:
        default = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        same = torch.equal(default, positions)
    else:
        default = (mask.cumsum(-1) - 1).clamp(min=0)
        same = torch.equal(default * mask, positions * mask)
    if not same:
        raise ConfigError("custom position_ids are not supported by foresay.generate; remove them")


def _params(
    config: GenerationConfig,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
    eos: frozenset[int],
    prompt_length: int,
    padded: bool,
) -> SamplingParams:
    """Translate the list of processors, which transformers applies from first to last, including warpers.

    SamplingParams applies a repetition penalty, a minimum length, then `processors`, then temperature, top-k, top-p and min-p.
    The start and the end of the list that follow this order become fields; the rest is called unchanged.
    """
    rest = list(processors or ())
    max_length = min((c.max_length for c in criteria or () if type(c) is MaxLengthCriteria), default=config.max_length)
    budget = max(1, max_length - prompt_length)
    fields: dict[str, Any] = {"max_new_tokens": budget, "temperature": 1.0 if config.do_sample else 0.0}
    if (
        rest
        and not padded
        and type(rest[0]) is RepetitionPenaltyLogitsProcessor
        and rest[0].prompt_ignore_length is None
    ):
        fields["repetition_penalty"] = float(rest.pop(0).penalty)
    while rest and (minimum := _min_new_tokens(rest[0], eos, prompt_length)) is not None:
        fields["min_new_tokens"] = min(budget, max(minimum, fields.get("min_new_tokens", 0)))
        del rest[0]
    if config.do_sample:
        fields |= _take_warpers(rest)
    check_processors(rest)
    return SamplingParams(processors=tuple(rest), **fields)


def _min_new_tokens(processor: Any, eos: frozenset[int], prompt_length: int) -> int | None:
    """Return the number of tokens for which a processor forbids the end tokens; None if it does something else."""
    if type(processor) is MinLengthLogitsProcessor:
        minimum = processor.min_length - prompt_length
    elif type(processor) is MinNewTokensLengthLogitsProcessor:
        minimum = processor.min_new_tokens + processor.prompt_length_to_skip - prompt_length
    else:
        return None
    return max(0, minimum) if set(processor.eos_token_id.reshape(-1).tolist()) == eos else None


def _take_warpers(rest: list[Any]) -> dict[str, Any]:
    """Remove from the end of the list the warpers that SamplingParams applies in the same order. Return them as its fields."""
    fields: dict[str, Any] = {}
    remaining = list(_WARPERS)
    while rest:
        kind = type(rest[-1])
        if kind in remaining and _is_a_field(rest[-1]):
            fields[_WARPERS[kind]] = getattr(rest[-1], _WARPERS[kind])
            del remaining[remaining.index(kind) :]
        elif kind is not LogitNormalization:  # it shifts all scores equally, so no distribution changes
            break
        rest.pop()
    return fields


def _is_a_field(warper: Any) -> bool:
    """True if a field has the same effect as the warper; otherwise it is called as a processor."""
    value = getattr(warper, _WARPERS[type(warper)])
    # TopKLogitsWarper.top_k includes its minimum
    minimum = 1 if type(warper) is TopKLogitsWarper else getattr(warper, "min_tokens_to_keep", 1)
    cuts = getattr(warper, "filter_value", -math.inf) == -math.inf
    return cuts and minimum == 1 and (0 < value < math.inf or type(warper) is MinPLogitsWarper)


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Return the rows without their left padding."""
    if mask is None:
        return [list(map(int, row)) for row in input_ids.tolist()]
    if bool((mask[:, :-1] > mask[:, 1:]).any()):
        raise ConfigError("attention_mask has padding on the right or inside; pad on the left")
    return [
        [int(t) for t, m in zip(row, keep, strict=True) if m]
        for row, keep in zip(input_ids.tolist(), mask.tolist(), strict=True)
    ]


def _seed(seed: int | None, row: int) -> int:
    base = seed if seed is not None else int(torch.randint(2**62, (1,)))
    return (base + row) % 2**63


def _eos(config: GenerationConfig, criteria: StoppingCriteriaList | None) -> frozenset[int]:
    """Return the tokens that end a row. transformers puts them into the criteria; the caller's criteria replace them."""
    if criteria is None:
        return frozenset(_ids(config.eos_token_id))
    return frozenset(t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.reshape(-1).tolist())


def _ids(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _for_row(processor: LogitsProcessor, row: int, pads: torch.Tensor) -> LogitsProcessor:
    """Return the processor as transformers applies it to one row of the batch."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):  # one per row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]  # type: ignore[attr-defined]
    return _Padded(processor, pads) if len(pads) else processor


class _Padded:
    """A processor that receives its row's padding, as in transformers: some processors count or penalize padding tokens."""

    def __init__(self, processor: LogitsProcessor, pads: torch.Tensor) -> None:
        self._processor, self._pads = processor, pads[None]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._processor(torch.cat([self._pads, input_ids], 1), scores)


class _Stop:
    """transformers' stopping criteria as a stop condition, evaluated after every committed token."""

    def __init__(self, prompt: list[int], criteria: list[Any]) -> None:
        self._ids, self._criteria = list(prompt), criteria

    def __call__(self, token_ids: Any) -> int | None:
        for i, token in enumerate(token_ids):
            self._ids.append(token)
            ids = torch.tensor([self._ids])
            if any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self._criteria):
                return i + 1
        return None


def _padded(input_ids: torch.Tensor, outputs: list[list[int]], config: GenerationConfig) -> torch.Tensor:
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(_ids(config.eos_token_id)), 0)
    width = max(map(len, outputs))
    tail = torch.full((len(outputs), width), pad, dtype=input_ids.dtype, device=input_ids.device)
    for i, ids in enumerate(outputs):
        tail[i, : len(ids)] = torch.tensor(ids, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, tail], 1)
