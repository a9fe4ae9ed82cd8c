"""foresay as a decoding method of transformers: `model.generate(..., custom_generate=foresay.generate)`.

Owns the translation of transformers' generation settings. A setting that is not supported is an error that names it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
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
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foresay.decoding.processors import check_processors
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.generation.load import load
from foresay.models.sources.wrapping import LoadedModel, wrap

_UNSUPPORTED: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": None,
    "watermarking_config": None,
    "token_healing": False,
    "prompt_lookup_num_tokens": None,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "prefill_chunk_size": None,
}
"""Unsupported settings of GenerationConfig, with the value (besides None) that has no effect."""

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
    **model_kwargs: Any,
) -> Any:
    """Decode with foresay inside transformers' `generate`; pass this function as `custom_generate`.

    draft, drafter, num_draft_tokens, length, rule and seed: as in `foresay.load` and SamplingParams; without a seed one is drawn
    from PyTorch's generator, so `torch.manual_seed` works. input_ids: [B, L], left-padded with an attention mask.
    Return [B, L + new] token ids, padded on the right, or a GenerateDecoderOnlyOutput if the configuration requests it.
    """
    config = generation_config or model.generation_config
    _refuse(config, model, model_kwargs)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    padded = any(len(prompt) < input_ids.shape[1] for prompt in prompts)
    eos = _eos(config, stopping_criteria)
    params = _params(config, logits_processor, stopping_criteria, eos, input_ids.shape[1], padded)
    stops = [c for c in stopping_criteria or () if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    with contextlib.ExitStack() as borrowed:
        target = dataclasses.replace(_borrow(model, borrowed), eos_token_ids=eos)
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
        while session.has_work:
            for chunk in session.step():
                if chunk.error is not None:
                    raise chunk.error.__cause__ or chunk.error  # an error of the caller's processor is raised unchanged
                outputs[chunk.index].extend(chunk.step.token_ids)
    sequences = _padded(input_ids, list(outputs.values()), config)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _borrow(model: PreTrainedModel, borrowed: contextlib.ExitStack) -> LoadedModel:
    """Wrap the caller's model. Its attention and mode are restored when `borrowed` closes."""
    loaded = wrap(type(model).__name__, model, None, optimise=False)
    borrowed.callback(loaded.model.release)  # type: ignore[attr-defined]
    return loaded


def _refuse(config: GenerationConfig, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; foresay.generate supports decoder-only models"
        )
    for name, neutral in _UNSUPPORTED.items():
        value = getattr(config, name, neutral)
        if value is not None and value != neutral:
            raise ConfigError(f"generation setting {name}={value!r} is not supported by foresay.generate; remove it")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not supported by foresay.generate; pass input_ids")
    _refuse_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("a filled past_key_values is not supported by foresay.generate; pass the whole input_ids")


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
