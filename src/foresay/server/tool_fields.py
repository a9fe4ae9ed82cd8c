"""Request fields of tool calls: offered tools, the choice of one, and calls in sent messages.

Owns the fields' names and rules. Knows no engine and no format of a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictStr, field_validator
from pydantic_core import PydanticCustomError

from foresay.server.errors import ApiError
from foresay.server.fields import MAX_ITEMS, Fields, Neutral, at_most
from foresay.text.tool_calls.calls import Tool

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_TOOLS = 128
"""OpenAI's limit on the tools of a request."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""OpenAI's names of functions, and dots."""


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "a function's name has 1 to 64 letters, digits, '_', '-' or '.'")
    return name


class Function(Fields):
    """A function that the model may call."""

    name: StrictStr
    description: StrictStr | None = None
    parameters: Annotated[dict[str, Any], at_most(MAX_ITEMS)] | None = None
    """JSON schema of the arguments, an object; None for a function without arguments."""
    strict: StrictBool | None = None
    """Accepted; arguments follow the schema if the call is required, see `tool_choice`."""

    _named = field_validator("name")(_name)


class OfferedTool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates read."""
        one = self.function
        schema = one.parameters or {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": one.name, "description": one.description or "", "parameters": schema},
        }


class NamedFunction(Fields):
    """The name in a tool choice."""

    name: StrictStr


class NamedChoice(Fields):
    """A tool choice that names a function."""

    type: Literal["function"]
    function: NamedFunction


class SentFunction(Fields):
    """The function of a call in a message."""

    name: StrictStr
    arguments: StrictStr | dict[str, Any] = "{}"


class SentCall(Fields):
    """A call in a message of the assistant."""

    neutral: ClassVar[Neutral] = {"index": tuple(range(MAX_TOOLS))}

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: SentFunction

    def plain(self) -> dict[str, Any]:
        """Return the call in the form that prompts have."""
        return self.model_dump(include={"id", "type", "function"}, exclude_none=True)


class ToolFields(Fields):
    """Fields of a request that offers tools."""

    tools: Annotated[list[OfferedTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    """None is "auto". "required" and a name constrain the output to calls whose arguments follow their schemas."""
    parallel_tool_calls: StrictBool | None = None
    """False limits the output to one call. None is True, except where calls are required: small models would go on and on."""

    @property
    def used_tools(self) -> Sequence[OfferedTool]:
        """The tools that the model sees. Raises ApiError for a choice that contradicts them."""
        tools, choice = self.tools or [], self.tool_choice
        names = [one.function.name for one in tools]
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", param="tools")
        if choice == "required" and not tools:
            raise ApiError(400, "tool_choice='required' needs tools", param="tool_choice")
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise ApiError(400, f"tool_choice: no tool is named {choice.function.name!r}", param="tool_choice")
        return [] if choice == "none" else tools

    @property
    def must_call(self) -> bool:
        """True if the output must be calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def calls_in_parallel(self) -> bool:
        """True if the output may have several calls."""
        return not self.must_call if self.parallel_tool_calls is None else self.parallel_tool_calls

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the output may call."""
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, NamedChoice) else None
        return [
            Tool(one.function.name, one.function.parameters or _NO_ARGUMENTS)
            for one in self.used_tools
            if named is None or one.function.name == named
        ]
