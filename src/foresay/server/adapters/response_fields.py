"""Request fields of OpenAI's Responses API, and their conversion to a chat request.

Owns the fields' names. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, Tag

from foresay.decoding.sampling_params import SamplingParams
from foresay.server.adapters.history import History
from foresay.server.errors import ApiError
from foresay.server.fields import (
    MAX_ITEMS,
    MAX_MESSAGES,
    Fields,
    Neutral,
    Number,
    Object,
    Parts,
    Salt,
    Tools,
    at_most,
    by_type,
    joined,
    limit_parts,
    validated,
)
from foresay.server.option_fields import Drafting, no_origins
from foresay.server.requests import ChatRequest

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names in this API of a chat request's fields."""


class ContentPart(Fields):
    """A text of a message."""

    neutral: ClassVar[Neutral] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text"]
    text: StrictStr


class _Stored(Fields):
    """An item that may come from a response."""

    neutral: ClassVar[Neutral] = {
        "status": ("completed", "incomplete", "in_progress"),
        "phase": ("commentary", "final_answer"),
    }


class InputMessage(_Stored):
    """A message."""

    type: Literal["message"] = "message"
    id: StrictStr | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: StrictStr | Parts[ContentPart]

    def add_to(self, history: History) -> None:
        """Add the item to a chat."""
        history.add_text(self.role, joined(self.content))


class FunctionCall(_Stored):
    """A call of the assistant."""

    type: Literal["function_call"]
    id: StrictStr | None = None
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr

    def add_to(self, history: History) -> None:
        """Add the item to a chat."""
        history.add_call(self.call_id, self.name, self.arguments)


class FunctionOutput(_Stored):
    """The result of a call."""

    type: Literal["function_call_output"]
    id: StrictStr | None = None
    call_id: StrictStr
    output: StrictStr | Parts[ContentPart]

    def add_to(self, history: History) -> None:
        """Add the item to a chat."""
        history.add_result(self.call_id, joined(self.output))


class ReasoningPart(Fields):
    """A text of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: StrictStr


class Reasoning(_Stored):
    """Reasoning of the assistant before its next message."""

    type: Literal["reasoning"]
    id: StrictStr | None = None
    summary: Annotated[list[ReasoningPart], at_most(MAX_ITEMS)] | None = None
    content: Annotated[list[ReasoningPart], at_most(MAX_ITEMS)] | None = None

    def add_to(self, history: History) -> None:
        """Add the item to a chat."""
        history.add_reasoning("".join(one.text for one in self.content or self.summary or ()))


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]


class FunctionTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: StrictStr
    description: StrictStr | None = None
    parameters: Object | None = None
    strict: StrictBool | None = None

    def chat(self) -> dict[str, Any]:
        """Return the tool of a chat request."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class ChosenFunction(Fields):
    """A tool choice that names a function."""

    type: Literal["function"]
    name: StrictStr


class TextFormat(Fields):
    """Format of the output's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None

    def chat(self) -> dict[str, Any]:
        """Return the response format of a chat request. Raises ApiError for a schema without json_schema, and the reverse."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ApiError(400, "schema and type=json_schema require each other", param="text.format")
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextOptions(Fields):
    """Options of the output's text."""

    neutral: ClassVar[Neutral] = {"verbosity": ("medium",)}
    hints: ClassVar[Mapping[str, str]] = {"verbosity": "text.verbosity"}

    format: TextFormat | None = None


class ReasoningOptions(Fields):
    """Options of reasoning."""

    neutral: ClassVar[Neutral] = {"summary": ("auto",), "generate_summary": ("auto",)}
    hints: ClassVar[Mapping[str, str]] = {
        name: f"reasoning.{name}" for name in ("summary", "generate_summary", "context")
    }

    effort: StrictStr | None = None


class EventOptions(Fields):
    """Options of a stream."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}


class ResponsesRequest(Fields):
    """POST /v1/responses. Nothing is stored, so that a request contains the whole conversation."""

    neutral: ClassVar[Neutral] = {"background": (False,), "truncation": ("disabled",)}
    hints: ClassVar[Mapping[str, str]] = {
        name: name for name in ("client_metadata", "prompt_cache_options", "context_management")
    }

    input: Annotated[
        StrictStr | Annotated[list[Item], Field(min_length=1, fail_fast=True)],
        limit_parts(MAX_MESSAGES, "content", "output", "summary"),
    ]
    model: StrictStr | None = None
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    cache_salt: Salt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    tools: Tools[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], at_most(8)] | None
    ) = None
    top_logprobs: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: EventOptions | None = None
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    metadata: Object | None = None
    """These seven fields label a request. Any value is accepted and ignored."""
    max_tool_calls: StrictInt | None = None
    """Limits calls of the API's own tools, which do not exist here."""
    foresay: Drafting | None = None

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as a chat's messages."""
        history = History()
        if self.instructions:
            history.add_text("system", self.instructions)
        if isinstance(self.input, str):
            history.add_text("user", self.input)
        else:
            for item in self.input:
                item.add_to(history)
        return history.messages()

    def chat(self) -> ChatRequest:
        """Return the chat request. Raises ApiError for contradicting fields."""
        choice = self.tool_choice
        has_logprobs = LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            raise ApiError(400, f"top_logprobs requires include=[{LOGPROBS!r}]", param="top_logprobs")
        no_origins(self.foresay)
        given = {
            "messages": self.messages(),
            "tools": [one.chat() for one in self.tools or ()],
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, ChosenFunction)
            else choice,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.chat()
            if self.text is not None and self.text.format is not None
            else None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "logprobs": has_logprobs or None,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        same = (
            "model",
            "ignore_eos",
            "cache_salt",
            "temperature",
            "top_p",
            "parallel_tool_calls",
            "top_logprobs",
            "stream",
        )
        more = {name: getattr(self, name) for name in same}
        return validated(ChatRequest, {**given, **more, "foresay": self.foresay and self.foresay.model_dump()})

    def echoed(self, chat: ChatRequest, default: SamplingParams) -> Mapping[str, Any]:
        """Return the request's fields that a response repeats. chat: the chat request. default: for fields left out."""
        text = {"type": "text"} if self.text is None or self.text.format is None else _dumped(self.text.format)
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": default.temperature if self.temperature is None else self.temperature,
            "top_p": default.top_p if self.top_p is None else self.top_p,
            "tools": [{"strict": None, **_dumped(one)} for one in self.tools or ()],
            "tool_choice": _dumped(choice) if isinstance(choice, ChosenFunction) else choice or "auto",
            "parallel_tool_calls": chat.calls_in_parallel,
            "text": {"format": text},
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "metadata": self.metadata or {},
            "user": self.user,
            "store": False,
            "truncation": "disabled",
            "previous_response_id": None,
            "background": False,
        }


def _dumped(fields: Fields) -> dict[str, Any]:
    return fields.model_dump(by_alias=True, exclude_none=True)
