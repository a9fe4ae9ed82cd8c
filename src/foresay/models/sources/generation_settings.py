"""A model's generation_config.json: how each field is treated, and how fields change a request's parameters.

Owns the table of fields and the merge. Constraints apply to every request that does not set the parameter itself, as in
transformers' `generate`; sampling fields are defaults where the model's own sampling is requested. Knows no engine and no text.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from foresay.decoding.protocols import LanguageModel, PreparedPrompt
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams, not_given
from foresay.errors import ConfigError, UnknownNameError

logger = logging.getLogger("foresay")

SAMPLING_SOURCES = ("foresay", "model")
"""Origins of sampling defaults: the library's own, or the model's generation config."""


class Kind(Enum):
    """Treatment of a field: of a model's file, and of a call of transformers' `generate` with foresay.generate."""

    CONSTRAINT = "applied to every request"
    SAMPLING = "a default with sampling='model'"
    METHOD = "another decoding method: logged for a file, refused in a call"
    DRAFTING = "transformers' own drafting, without effect on outputs: ignored in a file, refused in a call"
    RETURNED = "an additional result of `generate`: ignored in a file, refused in a call"
    UNSUPPORTED = "changes outputs and cannot be honoured: refused"
    IRRELEVANT = "without effect on outputs"


class Treatment(NamedTuple):
    """Treatment of one field, the reason where it is not honoured, and the values (besides None) that have no effect."""

    kind: Kind
    reason: str = ""
    neutral: tuple[Any, ...] = ()


_BEAMS = "only read with num_beams"
_CACHE = "how transformers stores keys and values"
_ASSISTED = "only read with an assistant model"
_RESULTS = "part of what `generate` returns"
TREATMENTS: dict[str, Treatment] = {
    "eos_token_id": Treatment(Kind.CONSTRAINT),
    "decoder_start_token_id": Treatment(Kind.CONSTRAINT),
    "sequence_bias": Treatment(Kind.CONSTRAINT, neutral=({}, [])),
    "repetition_penalty": Treatment(Kind.CONSTRAINT, neutral=(1.0,)),
    "no_repeat_ngram_size": Treatment(Kind.CONSTRAINT, neutral=(0,)),
    "bad_words_ids": Treatment(Kind.CONSTRAINT, neutral=([],)),
    "min_length": Treatment(Kind.CONSTRAINT, neutral=(0,)),
    "min_new_tokens": Treatment(Kind.CONSTRAINT, neutral=(0,)),
    "forced_bos_token_id": Treatment(Kind.CONSTRAINT),
    "forced_eos_token_id": Treatment(Kind.CONSTRAINT),
    "exponential_decay_length_penalty": Treatment(Kind.CONSTRAINT),
    "suppress_tokens": Treatment(Kind.CONSTRAINT, neutral=([],)),
    "begin_suppress_tokens": Treatment(Kind.CONSTRAINT, neutral=([],)),
    "stop_strings": Treatment(Kind.CONSTRAINT, neutral=([], "")),
    "do_sample": Treatment(Kind.SAMPLING, neutral=(False,)),
    "temperature": Treatment(Kind.SAMPLING, neutral=(1.0,)),
    "top_k": Treatment(Kind.SAMPLING, neutral=(0,)),
    "top_p": Treatment(Kind.SAMPLING, neutral=(1.0,)),
    "min_p": Treatment(Kind.SAMPLING, neutral=(0.0,)),
    "top_h": Treatment(Kind.SAMPLING),
    "typical_p": Treatment(Kind.SAMPLING, neutral=(1.0,)),
    "epsilon_cutoff": Treatment(Kind.SAMPLING, neutral=(0.0,)),
    "eta_cutoff": Treatment(Kind.SAMPLING, neutral=(0.0,)),
    "max_new_tokens": Treatment(Kind.SAMPLING),
    "num_beams": Treatment(Kind.METHOD, neutral=(1,)),
    "num_beam_groups": Treatment(Kind.METHOD, neutral=(1,)),
    "penalty_alpha": Treatment(Kind.METHOD, neutral=(0.0,)),
    "dola_layers": Treatment(Kind.METHOD),
    "use_mtp": Treatment(Kind.DRAFTING, neutral=(False,)),
    "prompt_lookup_num_tokens": Treatment(Kind.DRAFTING),
    "assistant_early_exit": Treatment(Kind.DRAFTING),
    "is_assistant": Treatment(Kind.DRAFTING, neutral=(False,)),
    "output_scores": Treatment(Kind.RETURNED, neutral=(False,)),
    "output_logits": Treatment(Kind.RETURNED, neutral=(False,)),
    "output_attentions": Treatment(Kind.RETURNED, neutral=(False,)),
    "output_hidden_states": Treatment(Kind.RETURNED, neutral=(False,)),
    "encoder_no_repeat_ngram_size": Treatment(Kind.UNSUPPORTED, neutral=(0,)),
    "encoder_repetition_penalty": Treatment(Kind.UNSUPPORTED, neutral=(1.0,)),
    "guidance_scale": Treatment(Kind.UNSUPPORTED, neutral=(1.0,)),
    "watermarking_config": Treatment(Kind.UNSUPPORTED),
    "token_healing": Treatment(Kind.UNSUPPORTED, neutral=(False,)),
    "constraints": Treatment(Kind.UNSUPPORTED),
    "force_words_ids": Treatment(Kind.UNSUPPORTED),
    "max_time": Treatment(Kind.UNSUPPORTED),
    "max_length": Treatment(Kind.IRRELEVANT, "the request's max_new_tokens is the limit"),
    "pad_token_id": Treatment(Kind.IRRELEVANT, "rows have no padding"),
    "bos_token_id": Treatment(Kind.IRRELEVANT, "only read for an empty prompt, which is refused"),
    "renormalize_logits": Treatment(Kind.IRRELEVANT, "it shifts all scores equally"),
    "remove_invalid_values": Treatment(Kind.IRRELEVANT, "models whose scores are not finite are refused"),
    "num_return_sequences": Treatment(Kind.IRRELEVANT, "the caller chooses the number of outputs"),
    "return_dict_in_generate": Treatment(Kind.IRRELEVANT, _RESULTS),
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty"), Treatment(Kind.IRRELEVANT, _BEAMS)),
    **dict.fromkeys(
        ("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        Treatment(Kind.IRRELEVANT, _CACHE),
    ),
    **dict.fromkeys(
        (
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
            "max_matching_ngram_size",
            "speculation_type",
        ),
        Treatment(Kind.IRRELEVANT, _ASSISTED),
    ),
    **dict.fromkeys(
        ("compile_config", "disable_compile", "continuous_batching_config"),
        Treatment(Kind.IRRELEVANT, "how transformers runs its own passes"),
    ),
    "transformers_version": Treatment(Kind.IRRELEVANT, "the writer of the file"),
}
"""Treatment of each field of transformers' GenerationConfig."""


def fields_set(config: Any, *kinds: Kind) -> dict[str, Any]:
    """Return the fields of these kinds that a GenerationConfig sets to a value with an effect."""
    found = {}
    for name, treatment in TREATMENTS.items():
        value = getattr(config, name, None)
        if treatment.kind in kinds and value is not None and value not in treatment.neutral:
            found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """A model's generation config as foresay applies it. Without a config nothing changes."""

    config: Any = None
    """transformers' GenerationConfig."""
    sampling: str = "foresay"
    """One of SAMPLING_SOURCES."""

    def with_sampling(self, source: str | None) -> GenerationSettings:
        """Return the settings with another origin of sampling defaults; None keeps it. Raises UnknownNameError."""
        if source is None:
            return self
        if source not in SAMPLING_SOURCES:
            raise UnknownNameError("sampling", source, SAMPLING_SOURCES)
        return dataclasses.replace(self, sampling=source)

    def check(self, name: str) -> None:
        """Raise ConfigError for a field that cannot be honoured; log other decoding methods and unknown fields by name."""
        self.refuse()
        if methods := fields_set(self.config, Kind.METHOD):
            logger.warning(
                "the generation config of %s has %s, which foresay does not have: it decodes greedily or samples",
                name,
                _shown(methods),
            )
        stored = {} if self.config is None else vars(self.config)
        if unknown := sorted(key for key in stored if key[:1] != "_" and key not in TREATMENTS):
            logger.warning("unknown fields in the generation config of %s are ignored: %s", name, ", ".join(unknown))

    def refuse(self) -> None:
        """Raise ConfigError for a field that changes outputs and cannot be honoured."""
        for field, value in fields_set(self.config, Kind.UNSUPPORTED).items():
            neutral = next(iter(TREATMENTS[field].neutral), None)
            text = f"in the model's generation config is not supported; set it to {neutral!r}"
            raise ConfigError(text, param=field, value=value)

    def described(self) -> dict[str, str]:
        """Return the fields that matter as text, by heading; the tokens that end the output are shown elsewhere."""
        constraints = fields_set(self.config, Kind.CONSTRAINT)
        shown = {
            "generation config": {k: v for k, v in constraints.items() if k != "eos_token_id"},
            "model's own sampling": self._defaults(),
            "not followed": fields_set(self.config, Kind.METHOD),
        }
        return {heading: _shown(fields) for heading, fields in shown.items() if fields}

    def _defaults(self) -> dict[str, Any]:
        """Fields of SamplingParams and further warpers that the config sets as the model's own sampling.

        As in vLLM, top_k is off unless the config has it (`generate` would use 50), and a config that samples has temperature 1
        unless it has another. Without do_sample, fields that only sampling reads are taken as a request to sample.
        """
        names = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
        found = {n: getattr(self.config, n) for n in names if getattr(self.config, n, None) is not None}
        samples = getattr(self.config, "do_sample", None)
        if samples is False or not (samples or found):
            found = {}
        elif "temperature" not in found:
            found["temperature"] = 1.0
        limit = getattr(self.config, "max_new_tokens", None)
        return {**found, "max_new_tokens": limit} if limit else found

    def applies(self, name: str) -> bool:
        """True if the config sets a field to a value with an effect on requests."""
        fields = fields_set(self.config, Kind.CONSTRAINT)
        return name in ({**fields, **self._defaults()} if self.sampling == "model" else fields)

    def sampled(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the model's own sampling in place of those that were not given, if that is requested."""
        defaults = self._defaults() if self.sampling == "model" else {}
        known = set(SamplingParams.__dataclass_fields__)
        changes = {n: v for n, v in defaults.items() if n in known and not params.given(n)}
        merged = SamplingParams.of(params, **changes)
        further = {n: v for n, v in defaults.items() if n not in known and v not in TREATMENTS[n].neutral}
        is_done = merged.greedy or any(isinstance(one, _Warpers) for one in params.processors)
        return _with_warpers(merged, further) if further and not is_done else merged

    def constrained(
        self, prepared: PreparedPrompt, model: LanguageModel, eos: frozenset[int] = frozenset()
    ) -> PreparedPrompt:
        """Return the request with the config's constraints, as in transformers' `generate`.

        eos: the model's end-of-sequence tokens. Raises ConfigError as `refuse` does.
        """
        config, params, length = self.config, prepared.params, len(prepared.prompt)
        if config is None:
            return prepared
        self.refuse()
        start = length if prepared.source is None else 1  # `generate` counts a forced first token as generated
        bias = config.sequence_bias
        changes: dict[str, Any] = {}
        if config.repetition_penalty and not bias and not params.given("repetition_penalty"):
            changes["repetition_penalty"] = float(config.repetition_penalty)
        least = start + config.min_new_tokens if config.min_new_tokens else config.min_length or 0
        if least > length and not params.given("min_new_tokens"):
            # not as if it were given: `generate` delays the end token by it, not stop strings
            changes["min_new_tokens"] = not_given(min(least - length, params.max_new_tokens))
        words = [list(word) for word in config.bad_words_ids or () if list(word) not in [[token] for token in eos]]
        banned = [*(word[0] for word in words if len(word) == 1), *(config.suppress_tokens or ())]
        if banned := [token for token in banned if 0 <= token < model.vocab_size]:
            changes["banned_token_ids"] = (*params.banned_token_ids, *banned)
        if config.stop_strings and not params.stop:
            changes["stop"] = config.stop_strings
        phrases = [word for word in words if len(word) > 1]
        if processors := tuple(self._processors(params, phrases, start, length, model, eos)):
            changes["processors"] = (*processors, *params.processors)
        return dataclasses.replace(prepared, params=SamplingParams.of(params, **changes))

    def _processors(
        self,
        params: SamplingParams,
        phrases: list[list[int]],
        start: int,
        length: int,
        model: LanguageModel,
        eos: frozenset[int],
    ) -> Iterator[LogitsProcessor]:
        """Yield the constraints that are no fields of SamplingParams, in the order of `generate`.

        start: number of tokens that `generate` counts as given; length: of the tokens that precede the output.
        """
        import transformers as hf

        config, device = self.config, str(model.device)
        if config.sequence_bias:
            yield hf.SequenceBiasLogitsProcessor(config.sequence_bias)
            if config.repetition_penalty not in (None, 1.0) and not params.given("repetition_penalty"):
                yield hf.RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty))
        if config.no_repeat_ngram_size:
            yield hf.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size)
        if phrases:
            yield hf.NoBadWordsLogitsProcessor(phrases)
        if config.forced_bos_token_id is not None:
            yield hf.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id)
        if config.forced_eos_token_id is not None:
            end = min(length + params.max_new_tokens, model.max_length)
            yield hf.ForcedEOSTokenLogitsProcessor(end, config.forced_eos_token_id, device=device)
        if config.exponential_decay_length_penalty is not None and eos:
            yield hf.ExponentialDecayLengthPenalty(config.exponential_decay_length_penalty, sorted(eos), start)
        if config.begin_suppress_tokens:
            begin = start if start > 1 or config.forced_bos_token_id is None else start + 1
            yield hf.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin, device=device)


UNCHANGED = GenerationSettings()
"""Settings of a model without a generation config."""


@dataclass(frozen=True, slots=True)
class _Warpers:
    """Warpers of transformers, applied one after another."""

    chain: tuple[LogitsProcessor, ...]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for warper in self.chain:
            scores = warper(input_ids, scores)
        return scores


def _with_warpers(params: SamplingParams, further: dict[str, Any]) -> SamplingParams:
    """Return sampling parameters whose fields and further warpers are processors, in the order of `generate`."""
    import transformers as hf

    values = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")} | further
    makers: dict[str, Any] = {
        "temperature": lambda x: hf.TemperatureLogitsWarper(float(x)),
        "top_h": hf.TopHLogitsWarper,
        "top_k": lambda x: hf.TopKLogitsWarper(int(x)),
        "top_p": lambda x: hf.TopPLogitsWarper(float(x)),
        "min_p": lambda x: hf.MinPLogitsWarper(float(x)),
        "typical_p": hf.TypicalLogitsWarper,
        "epsilon_cutoff": hf.EpsilonLogitsWarper,
        "eta_cutoff": hf.EtaLogitsWarper,
    }
    used = [name for name in makers if name in values and values[name] not in TREATMENTS[name].neutral]
    warpers = _Warpers(tuple(makers[name](values[name]) for name in used))
    neutral: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return SamplingParams.of(params, processors=(*params.processors, warpers), **neutral)


def _shown(fields: dict[str, Any]) -> str:
    """Return fields as text; of a long list only its length."""
    return ", ".join(
        f"{name}=({len(value)} entries)"
        if isinstance(value, list | tuple | dict) and len(value) > 8
        else f"{name}={value}"
        for name, value in fields.items()
    )
