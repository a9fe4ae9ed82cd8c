"""Request fields of OpenAI's Responses API, and their conversion to a chat request.

Owns the fields' names. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from foresay.decoding.sampling_params import SamplingParams
from foresay.server.adapters.history import History
from foresay.server.errors import FieldError
from foresay.server.fields import (
    MAX_ITEMS,
    MAX_MESSAGES,
    Fields,
    Neutral,
    Object,
    Parts,
    Tools,
    at_most,
    joined,
    limit_parts,
    typed,
)
from foresay.server.hints import ignore
from foresay.server.output_fields import StructuredOutputs
from foresay.server.requests import ChatRequest, OpenAIFields, as_chat

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names in this API of a chat request's fields."""


class _Part(Fields):
    neutral: ClassVar[Neutral] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text"]
    text: StrictStr


class _Stored(Fields):
    """An item that may come from a response."""

    neutral: ClassVar[Neutral] = {
        "status": ("completed", "incomplete", "in_progress"),
        "phase": ("commentary", "final_answer"),
    }

    id: StrictStr | None = None

    def add_to(self, history: History) -> None:
        """Add the item to a chat."""
        raise NotImplementedError


class _Message(_Stored):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: StrictStr | Parts[_Part]

    def add_to(self, history: History) -> None:
        history.add_text(self.role, joined(self.content))


class _Call(_Stored):
    type: Literal["function_call"]
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr

    def add_to(self, history: History) -> None:
        history.add_call(self.call_id, self.name, self.arguments)


class _Result(_Stored):
    type: Literal["function_call_output"]
    call_id: StrictStr
    output: StrictStr | Parts[_Part]

    def add_to(self, history: History) -> None:
        history.add_result(self.call_id, joined(self.output))


class _ReasoningPart(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: StrictStr


class _Reasoning(_Stored):
    hints: ClassVar[Mapping[str, str]] = {"encrypted_content": "input.reasoning.encrypted_content"}

    type: Literal["reasoning"]
    summary: Annotated[list[_ReasoningPart], at_most(MAX_ITEMS)] | None = None
    content: Annotated[list[_ReasoningPart], at_most(MAX_ITEMS)] | None = None

    def add_to(self, history: History) -> None:
        history.add_reasoning(joined(self.content or self.summary))


_Item = Annotated[_Message | _Call | _Result | _Reasoning, Field(discriminator="type"), typed("message")]


class _ChosenTool(Fields):
    type: Literal["function"]
    name: StrictStr


class _Tool(_ChosenTool):
    description: StrictStr | None = None
    parameters: Object | None = None
    strict: StrictBool | None = None


class _Search(Fields):
    """The API's own search, a hint: an answer without it is still one."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return data


class _Format(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None

    def chat(self) -> dict[str, Any]:
        """Return the response format of a chat request. Raises ApiError for a schema without json_schema, and the reverse."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise FieldError("text.format", ": schema and type=json_schema require each other")
        schema = {} if self.schema_ is None else {"json_schema": {"name": self.name, "schema": self.schema_}}
        return {"type": self.type, **schema}


class _TextOptions(Fields):
    neutral: ClassVar[Neutral] = {"verbosity": ("medium",)}
    hints: ClassVar[Mapping[str, str]] = {"verbosity": "text.verbosity"}

    format: _Format | None = None


class _ReasoningOptions(Fields):
    neutral: ClassVar[Neutral] = {"summary": ("auto",), "generate_summary": ("auto",)}
    hints: ClassVar[Mapping[str, str]] = {
        name: f"reasoning.{name}" for name in ("summary", "generate_summary", "context")
    }

    effort: StrictStr | None = None


class _StreamOptions(Fields):
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}


class ResponsesRequest(OpenAIFields):
    """POST /v1/responses. Nothing is stored, so that a request contains the whole conversation."""

    neutral: ClassVar[Neutral] = {"background": (False,), "truncation": ("disabled",)}
    hints: ClassVar[Mapping[str, str]] = {
        name: name for name in ("client_metadata", "prompt_cache_options", "context_management")
    }

    input: Annotated[
        StrictStr | Annotated[list[_Item], Field(min_length=1, fail_fast=True)],
        limit_parts(MAX_MESSAGES, "content", "output", "summary"),
    ]
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = None
    tools: Tools[Annotated[_Tool | _Search, Field(discriminator="type"), typed()]] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ChosenTool | None = None
    parallel_tool_calls: StrictBool | None = None
    text: _TextOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's constraints, as in chat completions."""
    reasoning: _ReasoningOptions | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], at_most(8)] | None
    ) = None
    top_logprobs: StrictInt | None = None
    stream_options: _StreamOptions | None = None
    prompt_cache_retention: StrictStr | None = None
    """Accepted and ignored."""
    max_tool_calls: StrictInt | None = None
    """Limits calls of the API's own tools, which do not exist here."""

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

    def _own_tools(self) -> list[_Tool]:
        """Return the tools that are functions; others are ignored hints."""
        for one in self.tools or ():
            if isinstance(one, _Search):
                ignore(f"tools.{one.type}")
        return [one for one in self.tools or () if isinstance(one, _Tool)]

    def chat(self) -> ChatRequest:
        """Return the chat request. Raises ApiError for contradicting fields."""
        choice, has_logprobs = self.tool_choice, LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            raise FieldError("top_logprobs", f"requires include=[{LOGPROBS!r}]")
        if self.structured_outputs and self.text and self.text.format and self.text.format.type != "text":
            raise FieldError("structured_outputs", "cannot be combined with text.format: an output follows one of them")
        return as_chat(
            self,
            messages=self.messages(),
            tools=[_function(one) for one in self._own_tools()],
            tool_choice=_function(choice) if isinstance(choice, _ChosenTool) else choice,
            max_tokens=self.max_output_tokens,
            response_format=self.text and self.text.format and self.text.format.chat(),
            reasoning_effort=self.reasoning and self.reasoning.effort,
            logprobs=has_logprobs or None,
            stream_options={"include_usage": True} if self.stream else None,
        )

    def echoed(self, chat: ChatRequest, default: SamplingParams) -> Mapping[str, Any]:
        """Return the request's fields that a response repeats. chat: the chat request. default: for fields left out."""
        choice, text = self.tool_choice, self.text and self.text.format
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": default.temperature if self.temperature is None else self.temperature,
            "top_p": default.top_p if self.top_p is None else self.top_p,
            "tools": [{"strict": None, **_dumped(one)} for one in self.tools or () if isinstance(one, _Tool)],
            "tool_choice": _dumped(choice) if isinstance(choice, _ChosenTool) else choice or "auto",
            "parallel_tool_calls": chat.calls_in_parallel,
            "text": {"format": {"type": "text"} if text is None else _dumped(text)},
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "metadata": self.metadata or {},
            "user": self.user,
            "store": False,
            "truncation": "disabled",
            "previous_response_id": None,
            "background": False,
        }


def _dumped(fields: Fields) -> dict[str, Any]:
    return fields.model_dump(by_alias=True, exclude_none=True)


def _function(fields: Fields) -> dict[str, Any]:
    """Return a tool, or the choice of one, as in a chat request."""
    return {"type": "function", "function": fields.model_dump(exclude={"type"}, exclude_none=True)}
