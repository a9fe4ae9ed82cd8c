"""What clients may ask for, field by field; any other field is refused by name.

Owns the words of the API and how they become sampling parameters. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from foresay.decoding.sampling_params import SamplingParams
from foresay.server.errors import ApiError
from foresay.text.grammar import ANY_OBJECT

Number = Annotated[float, Field(strict=True)]
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Asked):
    """A piece of a message."""

    type: Literal["text"]
    text: StrictStr


class ChatMessage(_Asked):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None
    refusal: None = None
    """Beside what else an answer's message may have that is empty, so that it can be sent back as it came."""
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class StreamOptions(_Asked):
    """What a stream says beside its text."""

    include_usage: StrictBool = False


class Drafting(_Asked):
    """Our own field, `foresay`: how this request is drafted for, and what is told of it."""

    drafter: Annotated[StrictStr, Field(max_length=200)] | None = None
    """An expression, such as "none" or "suffix"; None: the server's."""
    length: Annotated[StrictStr, Field(max_length=200)] | StrictInt | None = None
    rule: Annotated[StrictStr, Field(max_length=200)] | None = None
    stats: StrictBool = False
    """Whether the answer tells what was drafted and accepted, step by step."""
    origins: StrictBool = False
    """Whether a stream's events tell who wrote each piece of text, and how many tokens their pass added."""


class _Sampled(_Asked):
    model: StrictStr | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    n: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    foresay: Drafting | None = None

    def sampling(self, most: int, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """most: tokens to write at most where nothing is said. Raises ConfigError for values out of range."""
        bias = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        given = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "logprobs": logprobs,
        }
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        values.setdefault("max_new_tokens", most)
        return SamplingParams(
            **values, logit_bias=bias, stop=self.stops, stop_token_ids=tuple(self.stop_token_ids or ())
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings asked for."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class NamedSchema(_Asked):
    """A JSON schema."""

    name: StrictStr
    description: StrictStr | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Asked):
    """What the output is made of."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def schema_wanted(self) -> Mapping[str, Any] | None:
        """The schema that the output keeps to; None: any text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(400, "json_schema is given where type is json_schema", param="response_format.json_schema")
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class ChatRequest(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    def params(self, most: int) -> SamplingParams:
        """Raises ApiError where two fields contradict."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens contradict; give one", param="max_tokens")
        named = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(most, (self.top_logprobs or 0) if self.logprobs else None, named)

    def schema_wanted(self) -> Mapping[str, Any] | None:
        """The schema that outputs keep to; None: any text. Raises ApiError where two fields contradict."""
        schema = None if self.response_format is None else self.response_format.schema_wanted()
        if schema is not None and self.min_tokens:
            text = "min_tokens and a schema contradict: its output ends where it is complete"
            raise ApiError(400, text, param="min_tokens")
        return schema

    def prompts(self) -> list[Any]:
        """One: the messages."""
        return [[message.plain() for message in self.messages]]


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    prompt: (
        StrictStr
        | TokenIds
        | Annotated[list[StrictStr], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None

    def params(self, most: int) -> SamplingParams:
        """The API's default is 16 tokens, whatever else there would be room for."""
        return self.sampling(min(16, most), self.logprobs, self.max_tokens)

    def schema_wanted(self) -> None:
        """The API has none here."""

    def prompts(self) -> list[Any]:
        """One or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class PredictRequest(_Asked):
    """POST /predict."""

    prompt: StrictStr
    max_tokens: StrictInt = 256


class TokenizeRequest(_Asked):
    """POST /tokenize."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeRequest(_Asked):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[Annotated[StrictInt, Field(ge=0)]]


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise ApiError(400, f"logit_bias: {key!r} is not a token id", param="logit_bias")
    return int(key)
