"""Request fields of the API. Unknown fields are rejected by name.

Owns the API's field names and their conversion to sampling parameters. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from foresay.checks import check_float
from foresay.decoding.sampling_params import SamplingParams, not_given
from foresay.server.errors import FieldError
from foresay.server.fields import (
    ANYTHING,
    MAX_ITEMS,
    MAX_MESSAGES,
    Fields,
    Items,
    Neutral,
    Number,
    Object,
    Parts,
    Salt,
    at_most,
    check_count,
    joined,
    limit_parts,
    validated,
)
from foresay.server.option_fields import Drafting, Prediction, SentCall, StreamOptions, TemplateFields, TextPart
from foresay.server.output_fields import Constraint, OutputFields
from foresay.text.prompts import FillIn

MAX_TOKEN_IDS = 1 << 20

TokenIds = Annotated[list[StrictInt], Field(min_length=1, fail_fast=True), at_most(MAX_TOKEN_IDS)]
Budget = Annotated[StrictInt, Field(ge=-1)]
_RANGES = {"temperature": (0.0, 2.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}
"""OpenAI's ranges, which are narrower than the library's."""
_SAME = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "ignore_eos")
"""Sampling parameters of the same name."""
_MAX_BIAS = 100.0
DEFAULT_TEMPERATURE: float = not_given(1.0)
"""OpenAI's default, where the model's generation config has none."""

ENDS_ITSELF = "cannot be combined with a schema or grammar, whose output ends once it is complete"
OFF = {"typical_p": 1, "no_repeat_ngram_size": 0}
"""Unsupported fields -> the value without an effect, unless the model's generation config sets another one."""
_BOTH_NEUTRAL: Neutral = {
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    "length_penalty": (1,),
    **dict.fromkeys(("mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range"), (0,)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"), (ANYTHING,)),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), (ANYTHING,)),
    "top_n_sigma": (-1, 0),
    "tfs_z": (1,),
    **dict.fromkeys(("min_keep", "n_keep", "n_discard", "n_probs"), (0,)),
    "id_slot": (-1,),
    **dict.fromkeys(("lora", "bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("timings_per_token", "return_progress", "post_sampling_probs", "penalize_nl"), (False,)),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "cache_prompt": (True, False),
    "priority": (0,),
}
"""Unsupported fields of OpenAI's API and of other engines, with the values that have no effect here.

Settings of a sampler that llama.cpp has and that is off here have no effect."""
_BOTH_HINTS = {"guided_decoding_backend": "guided_decoding_backend"}
_CHAT_NEUTRAL: Neutral = {
    "best_of": (1,),
    "include_reasoning": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
}
"""The same for chat completions."""


class ChatMessage(Fields):
    """One turn. A message of a response may be sent back unchanged."""

    neutral: ClassVar[Neutral] = {"type": ("text", "message"), "tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Parts[TextPart] | None = None
    """Absent or null only in a message of the assistant that has tool calls."""
    name: StrictStr | None = None
    tool_calls: Items[SentCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    """Another name of reasoning_content."""

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "a message needs content, or tool_calls of the assistant")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only messages of the assistant have tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        text = None if self.content is None else joined(self.content)
        calls = [one.plain() for one in self.tool_calls or ()]
        more = {
            "name": self.name,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {"role": self.role, "content": text, **{name: value for name, value in more.items() if value}}


def limit_prompts(prompt: Any) -> Any:
    """Limit the number of prompts in a list, or of token ids in one prompt."""
    if isinstance(prompt, list) and prompt:
        ids = isinstance(prompt[0], int)
        check_count("token ids" if ids else "prompts", len(prompt), MAX_TOKEN_IDS if ids else MAX_ITEMS)
    return prompt


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), limit_parts(MAX_MESSAGES, "content")]


class Common(Fields):
    """Fields of every API that generates."""

    model: StrictStr | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: StrictBool | None = None
    metadata: Object | None = None
    service_tier: StrictStr | None = None
    """These two fields label a request. Any value is accepted and ignored."""
    foresay: Drafting | None = None


class OpenAIFields(Common):
    """Fields of every API of OpenAI that generates."""

    ignore_eos: StrictBool | None = None
    thinking_token_budget: Budget | None = None
    """Limit on the tokens of reasoning; -1 is none."""
    cache_salt: Salt | None = None
    """Requests with different salts share nothing."""
    prompt_cache_key: StrictStr | None = None
    """Any but an empty one has the prompt kept, if the server keeps prompts (`--keep-prompts`), though it is used once."""
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    store: StrictBool | None = None
    """These three fields label a request. Any value is accepted and ignored."""


class _Sampled(OutputFields, OpenAIFields):
    neutral: ClassVar[Neutral] = _BOTH_NEUTRAL
    hints: ClassVar[Mapping[str, str]] = _BOTH_HINTS
    top_k: StrictInt | None = None
    min_p: Number | None = None
    n: StrictInt | None = None
    stop: StrictStr | Items[StrictStr] | None = None
    seed: StrictInt | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], at_most(MAX_ITEMS)] | None = None
    stop_token_ids: Items[StrictInt] | None = None
    stream_options: StreamOptions | None = None
    repeat_penalty: Number | None = None
    thinking_budget_tokens: Budget | None = None
    """llama.cpp's names of repetition_penalty and thinking_token_budget."""
    typical_p: Number | None = None
    no_repeat_ngram_size: StrictInt | None = None

    def constraint(self) -> Constraint | None:
        """See OutputFields. Raises ApiError for a minimum length, too."""
        found = super().constraint()
        if found is not None and self.min_tokens:
            raise FieldError("min_tokens", ENDS_ITSELF)
        return found

    def sampling(self, default_max_tokens: int, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """Return the sampling parameters. Raises ConfigError for values out of range.

        default_max_tokens: limit on the generated tokens if the request sets none.
        """
        for name, (low, high) in _RANGES.items():
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), low, high)
        bias = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        for token, value in bias.items():
            check_float(f"logit_bias[{token}]", value, -_MAX_BIAS, _MAX_BIAS)
        given = {name: getattr(self, name) for name in _SAME} | {
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "logprobs": logprobs,
            "repetition_penalty": self._one_of("repeat_penalty", "repetition_penalty"),
        }
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        values.setdefault("max_new_tokens", not_given(default_max_tokens))
        return SamplingParams(
            **values, logit_bias=bias, stop=self.stops, stop_token_ids=tuple(self.stop_token_ids or ())
        )

    @property
    def thinking_budget(self) -> int | None:
        """Limit on the tokens of reasoning, or None. Raises ApiError for two limits."""
        found = self._one_of("thinking_budget_tokens", "thinking_token_budget")
        return None if found is None or found < 0 else int(found)

    def _one_of(self, name: str, other: str) -> float | None:
        """Return the value of a field with two names. Raises ApiError for two values."""
        given = {one for one in (getattr(self, name), getattr(self, other)) if one is not None}
        if len(given) > 1:
            raise FieldError(name, f"and {other} differ; send one of them")
        return next(iter(given), None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Requested stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def returned(self) -> int:
        """Outputs returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def candidates(self) -> int:
        """Outputs generated for each prompt."""
        best_of: int | None = getattr(self, "best_of", None)
        return self.returned if best_of is None else best_of

    @property
    def echoes(self) -> bool:
        """True if the response starts with the prompt."""
        return bool(getattr(self, "echo", False))

    @property
    def only_prompt(self) -> bool:
        """True if no token is generated: the prompt is scored and returned."""
        return self.echoes and self.max_tokens == 0

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def with_running_usage(self) -> bool:
        """True if each event of a stream contains the usage so far."""
        return self.with_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(TemplateFields, _Sampled):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Neutral] = {**_BOTH_NEUTRAL, **_CHAT_NEUTRAL}
    hints: ClassVar[Mapping[str, str]] = _BOTH_HINTS | {name: name for name in ("verbosity", "prompt_cache_retention")}

    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    prediction: Prediction | None = None

    @property
    def error_fields(self) -> tuple[str, ...]:
        """Names of the fields that contain the prompt and request the grammar of the output, for errors about these."""
        return "messages", "tool_choice" if self.must_call else self.constraint_field or "response_format"

    def params(self, default_max_tokens: int) -> SamplingParams:
        """Return the sampling parameters. Raises ApiError for contradicting fields."""
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "requires logprobs=true")
        named: Any = self._one_of("max_tokens", "max_completion_tokens")
        if self.max_tokens is None and named is not None and named < 1:
            raise FieldError("max_completion_tokens", "must be an integer at least 1", value=named)
        return self.sampling(default_max_tokens, (self.top_logprobs or 0) if self.logprobs else None, named)

    def constraint(self) -> Constraint | None:
        """See OutputFields. With calls that are required, `response_format` has no effect and others contradict them."""
        found = super().constraint()
        if self.must_call and found is not None and found.field != "response_format":
            raise FieldError(found.field, "cannot be combined with a tool_choice that requires calls")
        if self.must_call and self.min_tokens:
            raise FieldError("min_tokens", ENDS_ITSELF)
        return found

    def prompts(self) -> list[Any]:
        """Return one prompt: the messages."""
        return [[message.plain() for message in self.messages]]


def as_chat(request: Fields, **own: Any) -> ChatRequest:
    """Return the chat request of another API's: its fields that have the same name, and its own ones.

    Raises ApiError for origins, which formats of other APIs do not have.
    """
    same = (type(request).model_fields.keys() & ChatRequest.model_fields.keys()) - own.keys()
    drafting: Drafting | None = getattr(request, "foresay", None)
    if drafting is not None and drafting.origins:
        raise FieldError("foresay.origins", "is for chat completions and completions")
    return validated(ChatRequest, {**request.model_dump(include=same, exclude_none=True, by_alias=True), **own})


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    neutral: ClassVar[Neutral] = {**_BOTH_NEUTRAL, "add_special_tokens": (True,)}

    prompt: Annotated[
        StrictStr | TokenIds | Annotated[list[StrictStr | TokenIds], Field(min_length=1, fail_fast=True)],
        BeforeValidator(limit_prompts),
    ]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool = False
    """True if the response's text and log-probabilities start with the prompt's."""
    suffix: StrictStr | None = None
    """Text after the output: the model fills in the text between prompt and suffix."""
    best_of: StrictInt | None = None
    """Outputs generated for each prompt; the n with the highest mean log-probability of a token are returned."""

    def params(self, default_max_tokens: int) -> SamplingParams:
        """Return the sampling parameters. The API generates 16 tokens by default, regardless of the context's length."""
        limit = min(16, default_max_tokens) if self.max_tokens is None else self.max_tokens
        return self.sampling(default_max_tokens, self.logprobs, 1 if self.only_prompt else limit)

    used_tools: ClassVar[Sequence[Any]] = ()
    """The API has no tools here."""
    must_call: ClassVar[bool] = False

    @property
    def error_fields(self) -> tuple[str, ...]:
        """See ChatRequest."""
        return "prompt", self.constraint_field or "response_format"

    def prompts(self) -> list[Any]:
        """Return the prompts as a list. Raises ApiError for a suffix that cannot be used."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if single else list(self.prompt)
        if not self.suffix:
            return prompts
        if self.echo or not all(isinstance(one, str) for one in prompts):
            raise FieldError("suffix", "needs prompts that are texts, without echo")
        return [FillIn(one, self.suffix) for one in prompts]


class PredictRequest(Fields):
    """POST /predict."""

    prompt: StrictStr
    max_tokens: StrictInt = 256


class TokenizeRequest(TemplateFields):
    """POST /tokenize."""

    neutral: ClassVar[Neutral] = {"add_special_tokens": (True,), "return_token_strs": (False,)}

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True), at_most(MAX_TOKEN_IDS)]


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise FieldError("logit_bias", f"has the key {key!r}, which is not a token id")
    return int(key)
