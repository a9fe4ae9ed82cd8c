"""Request fields of Anthropic's Messages API, and their conversion to a chat request.

Owns the fields' names. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from foresay.server.adapters.history import History
from foresay.server.errors import FieldError
from foresay.server.fields import MAX_MESSAGES, Fields, Items, Neutral, Object, Parts, Tools, joined, limit_parts, typed
from foresay.server.hints import ignore
from foresay.server.option_fields import Labelled, is_marked
from foresay.server.requests import ChatRequest, Common, as_chat

CHAT_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
}
"""Names in this API of a chat request's fields."""
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Blocks of a turn by its role."""


class _Text(Labelled):
    neutral: ClassVar[Neutral] = {"citations": ([],)}

    type: Literal["text"]
    text: StrictStr


class _Thinking(Fields):
    type: Literal["thinking"]
    thinking: StrictStr
    signature: StrictStr | None = None
    """Not verified."""


class _RedactedThinking(Fields):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]
    data: StrictStr


class _ToolUse(Labelled):
    type: Literal["tool_use"]
    id: Annotated[StrictStr, Field(min_length=1)]
    name: Annotated[StrictStr, Field(min_length=1)]
    input: dict[str, Any]


class _ToolResult(Labelled):
    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: StrictStr | Parts[_Text] | None = None
    is_error: StrictBool | None = None
    """Accepted and ignored: chat templates do not mark results as errors."""


_Block = Annotated[_Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, Field(discriminator="type"), typed()]


class _Turn(Fields):
    role: Literal["user", "assistant", "system"]
    """Turns of the role "system" are moved to the beginning."""
    content: StrictStr | Parts[_Block]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> _Turn:
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in _BLOCKS[self.role]:
                raise PydanticCustomError("role", f"a turn of the role {self.role!r} has no block {block.type!r}")
        return self

    @property
    def text(self) -> str:
        """The texts of the turn."""
        return joined(self.content)

    def add_to(self, history: History) -> None:
        """Add the turn to a chat. Adjacent texts are one text."""
        if isinstance(self.content, str) or not self.content:
            history.add_text(self.role, self.text)
            return
        for is_text, blocks in groupby(self.content, lambda one: one.type == "text"):
            several = list(blocks)
            if is_text:
                history.add_text(self.role, joined(several))
            for block in several:
                if isinstance(block, _Thinking):
                    history.add_reasoning(block.thinking)
                elif isinstance(block, _ToolUse):
                    history.add_call(block.id, block.name, block.input)
                elif isinstance(block, _ToolResult):
                    history.add_result(block.tool_use_id, joined(block.content))


class _Tool(Labelled):
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


class _ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    """Name of the function, for the type "tool"."""
    disable_parallel_tool_use: StrictBool | None = None

    def chat(self) -> dict[str, Any]:
        """Return the fields of a chat request."""
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("tool_choice", ": a name and type=tool require each other")
        named = {"type": "function", "function": {"name": self.name or ""}}
        is_single = self.disable_parallel_tool_use
        return {
            "tool_choice": {"any": "required", "tool": named}.get(self.type, self.type),
            "parallel_tool_calls": None if is_single is None else not is_single,
        }


class _OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Fields):
    hints: ClassVar[Mapping[str, str]] = {"task_budget": "output_config.task_budget"}

    format: _OutputFormat | None = None
    effort: StrictStr | None = None
    """For chat templates that read reasoning_effort; else a hint that is ignored."""


class _ThinkingOptions(Fields):
    """Reasoning. "disabled" turns it off if the chat template can, "enabled" on; "adaptive" leaves it to the model."""

    hints: ClassVar[Mapping[str, str]] = {"display": "thinking.display"}

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    """Limit on the tokens of reasoning, for "enabled"; else a hint that is ignored."""

    @property
    def limit(self) -> int | None:
        """Limit on the tokens of reasoning, or None."""
        if self.budget_tokens is not None and self.type != "enabled":
            ignore("thinking.budget_tokens")
            return None
        return self.budget_tokens


class CountRequest(Labelled):
    """POST /v1/messages/count_tokens."""

    hints: ClassVar[Mapping[str, str]] = {name: name for name in ("context_management", "speed", "inference_geo")}

    model: StrictStr | None = None
    messages: Annotated[list[_Turn], Field(min_length=1, fail_fast=True), limit_parts(MAX_MESSAGES, "content")]
    system: StrictStr | Parts[_Text] | None = None
    tools: Tools[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingOptions | None = None
    output_config: _OutputConfig | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages of a chat."""
        history = History()
        system = [joined(self.system), *(turn.text for turn in self.messages if turn.role == "system")]
        if any(system):
            history.add_text("system", "\n\n".join(filter(None, system)))
        for turn in self.messages:
            if turn.role != "system":
                turn.add_to(history)
        messages = history.messages()
        if not messages:
            raise FieldError("messages", ": at least one needs a text, a call or a result")
        return messages

    def chat(self, **more: Any) -> ChatRequest:
        """Return the chat request, with more fields. A last message of the assistant is continued."""
        messages, system = self.conversation(), self.system if isinstance(self.system, list) else ()
        return as_chat(
            self,
            messages=messages,
            tools=[one.chat() for one in self.tools or ()],
            **({"tool_choice": None} if self.tool_choice is None else self.tool_choice.chat()),
            continue_final_message=messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"),
            enable_thinking={"disabled": False, "enabled": True}.get(self.thinking.type if self.thinking else ""),
            thinking_token_budget=self.thinking and self.thinking.limit,
            reasoning_effort=self.output_config and self.output_config.effort,
            prompt_cache_key="cache_control"
            if is_marked([self, *(self.tools or ()), *system, *self.messages])
            else None,
            **more,
        )


class MessagesRequest(CountRequest, Common):
    """POST /v1/messages."""

    max_tokens: StrictInt
    top_k: StrictInt | None = None
    stop_sequences: Items[StrictStr] | None = None

    def chat(self, **more: Any) -> ChatRequest:
        """See CountRequest."""
        output = self.output_config and self.output_config.format
        return super().chat(
            stop=self.stop_sequences,
            response_format=output and {"type": "json_schema", "json_schema": {"schema": output.schema_}},
            stream_options={"include_usage": True, "continuous_usage_stats": True} if self.stream else None,
            **more,
        )
