"""Request fields of Anthropic's Messages API, and their conversion to a chat request.

Owns the fields' names. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, Tag, model_validator
from pydantic_core import PydanticCustomError

from foresay.server.adapters.history import History
from foresay.server.errors import ApiError
from foresay.server.fields import (
    MAX_MESSAGES,
    Fields,
    Items,
    Neutral,
    Number,
    Object,
    Parts,
    Tools,
    by_type,
    joined,
    limit_parts,
    validated,
)
from foresay.server.option_fields import Drafting, no_origins
from foresay.server.requests import ChatRequest

CHAT_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "continue_final_message": "messages",
}
"""Names in this API of a chat request's fields."""


class Label(Fields):
    """A label that changes nothing."""

    cache_control: dict[str, Any] | None = None
    """Accepted and ignored: the beginnings of prompts are always cached."""


class TextBlock(Label):
    """A text."""

    neutral: ClassVar[Neutral] = {"citations": ([],)}

    type: Literal["text"]
    text: StrictStr


Texts = Parts[TextBlock]


class ThinkingBlock(Fields):
    """Reasoning of the assistant. Its signature is not verified."""

    type: Literal["thinking"]
    thinking: StrictStr
    signature: StrictStr | None = None


class RedactedThinkingBlock(Fields):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]
    data: StrictStr


class ToolUseBlock(Label):
    """A call of the assistant."""

    type: Literal["tool_use"]
    id: Annotated[StrictStr, Field(min_length=1)]
    name: Annotated[StrictStr, Field(min_length=1)]
    input: dict[str, Any]


class ToolResultBlock(Label):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: StrictStr | Texts | None = None
    is_error: StrictBool | None = None
    """Accepted and ignored: chat templates do not mark results as errors."""


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


_BLOCKS: Mapping[str, tuple[type[Fields], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""Blocks of a turn by its role."""


class InputMessage(Fields):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    """Turns of the role "system" are moved to the beginning."""
    content: StrictStr | Parts[Block]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> InputMessage:
        """Results come from the user, reasoning and calls from the assistant."""
        if isinstance(self.content, list):
            for block in self.content:
                if not isinstance(block, _BLOCKS[self.role]):
                    raise PydanticCustomError("role", f"a turn of the role {self.role!r} has no block {block.type!r}")
        return self

    @property
    def text(self) -> str:
        """The texts of the turn."""
        if isinstance(self.content, str):
            return self.content
        return "".join(block.text for block in self.content if isinstance(block, TextBlock))

    def add_to(self, history: History) -> None:
        """Add the turn to a chat. Adjacent texts are one text."""
        if isinstance(self.content, str) or not self.content:
            history.add_text(self.role, self.text)
            return
        for kind, blocks in groupby(self.content, type):
            if kind is TextBlock:
                history.add_text(self.role, "".join(block.text for block in blocks if isinstance(block, TextBlock)))
                continue
            for block in blocks:
                if isinstance(block, ThinkingBlock):
                    history.add_reasoning(block.thinking)
                elif isinstance(block, ToolUseBlock):
                    history.add_call(block.id, block.name, block.input)
                elif isinstance(block, ToolResultBlock):
                    history.add_result(block.tool_use_id, joined(block.content))


class Tool(Label):
    """A function that the model may call."""

    neutral: ClassVar[Neutral] = {"eager_input_streaming": (True, False), "defer_loading": (False,)}

    type: Literal["custom"] = "custom"
    name: StrictStr
    description: StrictStr | None = None
    input_schema: Object
    strict: StrictBool | None = None

    def chat(self) -> dict[str, Any]:
        """Return the tool of a chat request."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Fields):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    """Name of the function, for the type "tool"."""
    disable_parallel_tool_use: StrictBool | None = None

    def chat(self) -> Any:
        """Return the tool choice of a chat request."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required"}.get(self.type, self.type)


class OutputFormat(Fields):
    """A schema of the output's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """Options of the output."""

    hints: ClassVar[Mapping[str, str]] = {"task_budget": "output_config.task_budget"}

    format: OutputFormat | None = None
    effort: StrictStr | None = None
    """For chat templates that read reasoning_effort; else a hint that is ignored."""


class Thinking(Fields):
    """Reasoning. "disabled" turns it off if the chat template can, "enabled" on; "adaptive" leaves it to the model."""

    hints: ClassVar[Mapping[str, str]] = {name: f"thinking.{name}" for name in ("budget_tokens", "display")}

    type: Literal["disabled", "adaptive", "enabled"]


class CountRequest(Label):
    """POST /v1/messages/count_tokens."""

    hints: ClassVar[Mapping[str, str]] = {name: name for name in ("context_management", "speed", "inference_geo")}

    model: StrictStr | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True), limit_parts(MAX_MESSAGES, "content")]
    system: StrictStr | Texts | None = None
    tools: Tools[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages of a chat."""
        history = History()
        own = [message for message in self.messages if message.role == "system"]
        system = [joined(self.system), *(message.text for message in own)]
        if any(system):
            history.add_text("system", "\n\n".join(filter(None, system)))
        for message in self.messages:
            if message.role != "system":
                message.add_to(history)
        messages = history.messages()
        if not messages:
            raise ApiError(400, "messages: at least one needs a text, a call or a result", param="messages")
        return messages

    def chat(self) -> ChatRequest:
        """Return the chat request. A last message of the assistant is continued."""
        thinking = {"disabled": False, "enabled": True}.get("" if self.thinking is None else self.thinking.type)
        effort = None if self.output_config is None else self.output_config.effort
        return validated(ChatRequest, {**self.chat_fields(), "enable_thinking": thinking, "reasoning_effort": effort})

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request that do not depend on the model."""
        choice, messages = self.tool_choice, self.conversation()
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise ApiError(400, "tool_choice: a name and type=tool require each other", param="tool_choice")
        is_single = None if choice is None else choice.disable_parallel_tool_use
        return {
            "model": self.model,
            "messages": messages,
            "tools": [one.chat() for one in self.tools or ()],
            "tool_choice": None if choice is None else choice.chat(),
            "parallel_tool_calls": None if is_single is None else not is_single,
            "continue_final_message": messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"),
        }


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: StrictInt
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    stop_sequences: Items[StrictStr] | None = None
    stream: StrictBool | None = None
    metadata: Object | None = None
    service_tier: StrictStr | None = None
    """These two fields label a request. Any value is accepted and ignored."""
    foresay: Drafting | None = None

    def chat_fields(self) -> dict[str, Any]:
        """See CountRequest."""
        options = {"include_usage": True, "continuous_usage_stats": True} if self.stream else None
        wanted = self.output_config.format if self.output_config is not None else None
        schema = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}} if wanted is not None else None
        no_origins(self.foresay)
        same = ("temperature", "top_p", "top_k", "stream")
        return {
            **super().chat_fields(),
            **{name: getattr(self, name) for name in same},
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "response_format": schema,
            "stream_options": options,
            "foresay": self.foresay and self.foresay.model_dump(),
        }
