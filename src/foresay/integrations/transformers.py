"""foresay as a decoding method of transformers: `model.generate(..., custom_generate=foresay.generate)`.

Owns the translation of transformers' generation settings; a setting that cannot be honoured is an error that names it.
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
from foresay.models.sources.catalog import LoadedModel, wrap

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
"""Settings of GenerationConfig that are not honoured, with the value (beside None) that asks for nothing."""

_WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""The warpers that SamplingParams has a field for, in the order in which foresay applies the fields."""


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
    """Decode with foresay inside transformers' `generate`; pass it as `custom_generate`.

    draft, drafter, num_draft_tokens, length, rule and seed as in `foresay.load` and SamplingParams; without a seed one is drawn
    from PyTorch's generator, so `torch.manual_seed` works. input_ids: [B, L], left-padded with an attention mask.
    Returns [B, L + new] token ids, padded on the right, or a GenerateDecoderOnlyOutput when that was asked for.
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
            seen = tuple(_for_row(processor, i, pads) for processor in params.processors)
            one = SamplingParams.of(params, seed=_seed(seed, i), processors=seen)
            stop = _Stop(input_ids[i].tolist(), stops) if stops else None
            outputs[session.submit(prompt, one, stop=stop)] = []
        while session.has_work:
            for chunk in session.step():
                if chunk.error is not None:
                    raise chunk.error.__cause__ or chunk.error  # what the caller's own processor raised
                outputs[chunk.index].extend(chunk.step.token_ids)
    sequences = _padded(input_ids, list(outputs.values()), config)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _borrow(model: PreTrainedModel, borrowed: contextlib.ExitStack) -> LoadedModel:
    """Wrap somebody else's model; it gets its own attention and mode back when `borrowed` ends."""
    loaded = wrap(type(model).__name__, model, None, optimise=False)
    borrowed.callback(loaded.model.release)  # type: ignore[attr-defined]
    return loaded


def _refuse(config: GenerationConfig, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; foresay.generate takes causal ones"
        )
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(config, name, harmless)
        if value is not None and value != harmless:
            raise ConfigError(f"generation setting {name}={value!r} is not supported by foresay.generate; leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not supported by foresay.generate; pass input_ids")
    _refuse_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("a filled past_key_values is not supported by foresay.generate; pass the whole input_ids")


def _refuse_positions(positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """Positions other than the ones transformers gives by itself are not honoured."""
    if positions is None:
        return
    if mask is None:
        usual = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        same = torch.equal(usual, positions)
    else:
        usual = (mask.cumsum(-1) - 1).clamp(min=0)
        same = torch.equal(usual * mask, positions * mask)
    if not same:
        raise ConfigError("position_ids of your own are not supported by foresay.generate; leave them out")


def _params(
    config: GenerationConfig,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
    eos: frozenset[int],
    prompt_length: int,
    padded: bool,
) -> SamplingParams:
    """Translate the list of processors, which transformers applies from the first to the last, warpers included.

    SamplingParams applies a repetition penalty, a least length, then `processors`, then temperature, top-k, top-p and min-p:
    what the list begins and ends with in that order becomes fields, and the rest is called as it is.
    """
    rest = list(processors or ())
    longest = min((c.max_length for c in criteria or () if type(c) is MaxLengthCriteria), default=config.max_length)
    budget = max(1, longest - prompt_length)
    fields: dict[str, Any] = {"max_new_tokens": budget, "temperature": 1.0 if config.do_sample else 0.0}
    if (
        rest
        and not padded
        and type(rest[0]) is RepetitionPenaltyLogitsProcessor
        and rest[0].prompt_ignore_length is None
    ):
        fields["repetition_penalty"] = float(rest.pop(0).penalty)
    while rest and (least := _least(rest[0], eos, prompt_length)) is not None:
        fields["min_new_tokens"] = min(budget, max(least, fields.get("min_new_tokens", 0)))
        del rest[0]
    if config.do_sample:
        fields |= _take_warpers(rest)
    check_processors(rest)
    return SamplingParams(processors=tuple(rest), **fields)


def _least(processor: Any, eos: frozenset[int], prompt_length: int) -> int | None:
    """How many tokens a processor forbids the end tokens for; None if it does something else."""
    if type(processor) is MinLengthLogitsProcessor:
        least = processor.min_length - prompt_length
    elif type(processor) is MinNewTokensLengthLogitsProcessor:
        least = processor.min_new_tokens + processor.prompt_length_to_skip - prompt_length
    else:
        return None
    return max(0, least) if set(processor.eos_token_id.reshape(-1).tolist()) == eos else None


def _take_warpers(rest: list[Any]) -> dict[str, Any]:
    """Take the warpers that SamplingParams would apply in the same order off the end of the list, as its fields."""
    fields: dict[str, Any] = {}
    left = list(_WARPERS)
    while rest:
        kind = type(rest[-1])
        if kind in left and _is_a_field(rest[-1]):
            fields[_WARPERS[kind]] = getattr(rest[-1], _WARPERS[kind])
            del left[left.index(kind) :]
        elif kind is not LogitNormalization:  # which adds the same to all scores: no law behind it changes
            break
        rest.pop()
    return fields


def _is_a_field(warper: Any) -> bool:
    """Whether a field says all that the warper does; one in `processors` is called as it is."""
    value = getattr(warper, _WARPERS[type(warper)])
    least = 1 if type(warper) is TopKLogitsWarper else getattr(warper, "min_tokens_to_keep", 1)  # its top_k has it
    cuts = getattr(warper, "filter_value", -math.inf) == -math.inf
    return cuts and least == 1 and (0 < value < math.inf or type(warper) is MinPLogitsWarper)


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The rows without their left padding."""
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
    """The tokens that end a row: transformers puts them into the criteria, where the caller's own take their place."""
    if criteria is None:
        return frozenset(_ids(config.eos_token_id))
    return frozenset(t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.reshape(-1).tolist())


def _ids(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _for_row(processor: LogitsProcessor, row: int, pads: torch.Tensor) -> LogitsProcessor:
    """The processor as one row of the batch meets it in transformers."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):  # one for each row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]  # type: ignore[attr-defined]
    return _Padded(processor, pads) if len(pads) else processor


class _Padded:
    """A processor that sees the padding of its row, as it does in transformers: some count tokens, or penalise them."""

    def __init__(self, processor: LogitsProcessor, pads: torch.Tensor) -> None:
        self._processor, self._pads = processor, pads[None]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._processor(torch.cat([self._pads, input_ids], 1), scores)


class _Stop:
    """transformers' stopping criteria as a stop condition: asked after every committed token."""

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
