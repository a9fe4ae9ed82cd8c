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
from typing import Any

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
    ADDED = "drafting or results of `generate`, without effect on outputs: ignored in a file, refused in a call"
    UNSUPPORTED = "changes outputs and cannot be honoured: refused"
    IRRELEVANT = "without effect on outputs"


_FIELDS = {
    Kind.CONSTRAINT: "eos_token_id decoder_start_token_id sequence_bias repetition_penalty no_repeat_ngram_size bad_words_ids "
    "min_length min_new_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens stop_strings",
    Kind.SAMPLING: "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff max_new_tokens",
    Kind.METHOD: "num_beams num_beam_groups penalty_alpha dola_layers",
    Kind.ADDED: "use_mtp prompt_lookup_num_tokens assistant_early_exit is_assistant output_scores output_logits "
    "output_attentions output_hidden_states",
    Kind.UNSUPPORTED: "encoder_no_repeat_ngram_size encoder_repetition_penalty guidance_scale watermarking_config "
    "token_healing constraints force_words_ids max_time",
    # limits of the caller, padding, forms of results, and fields that only beams, assistants or transformers' passes read
    Kind.IRRELEVANT: "max_length pad_token_id bos_token_id renormalize_logits remove_invalid_values num_return_sequences "
    "return_dict_in_generate early_stopping length_penalty diversity_penalty use_cache cache_implementation cache_config "
    "max_cache_len low_memory prefill_chunk_size num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind assistant_ensemble_weight "
    "max_matching_ngram_size speculation_type compile_config disable_compile continuous_batching_config "
    "transformers_version",
}
TREATMENTS: dict[str, Kind] = {name: kind for kind, names in _FIELDS.items() for name in names.split()}
"""Treatment of each field of transformers' GenerationConfig."""
_OFF_AT_1 = ("repetition_penalty", "temperature", "top_p", "typical_p", "num_beams", "num_beam_groups",
             "encoder_repetition_penalty", "guidance_scale")  # fmt: skip
_OFF_AT_NOTHING = (
    TREATMENTS.keys() - {name for name in TREATMENTS if name.endswith("token_id")} - {*_OFF_AT_1, "max_time", "top_h"}
)
"""Fields without an effect at 0, False, and an empty list or text."""


def _has_effect(name: str, value: Any) -> bool:
    return value is not None and not (value == 1 if name in _OFF_AT_1 else name in _OFF_AT_NOTHING and not value)


def fields_set(config: Any, *kinds: Kind) -> dict[str, Any]:
    """Return the fields of these kinds that a GenerationConfig sets to a value with an effect."""
    values = {name: getattr(config, name, None) for name, kind in TREATMENTS.items() if kind in kinds}
    return {name: value for name, value in values.items() if _has_effect(name, value)}


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
            text = f"the model's generation config has {field}={value!r}, which is not supported"
            raise ConfigError(f"{text}; set it to {1.0 if field in _OFF_AT_1 else None}")

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
        further = {n: v for n, v in defaults.items() if n not in known and _has_effect(n, v)}
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
    used = [name for name in makers if name in values and _has_effect(name, values[name])]
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
