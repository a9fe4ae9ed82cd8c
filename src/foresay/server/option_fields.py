"""Groups of request fields: messages' parts, tools, stream options, drafting, the template's options.

Owns the fields' names and rules. Knows no engine, no endpoint and no format of a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, field_validator
from pydantic_core import PydanticCustomError

from foresay.server.errors import FieldError
from foresay.server.fields import MAX_TOOLS, Fields, Neutral, Object, Parts, Tools, joined
from foresay.server.hints import ignore
from foresay.text.prompts import ChatOptions, template_variables
from foresay.text.reasoning import reasoning_of
from foresay.text.tool_calls.calls import Tool

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""OpenAI's names of functions, and dots."""


class Labelled(Fields):
    """A part of a request that clients may mark for a cache."""

    cache_control: dict[str, Any] | None = None
    """Has the prompt kept, if the server keeps prompts; else ignored: the beginnings of prompts are always cached."""


def is_marked(parts: Iterable[Any]) -> bool:
    """Return True if a part of a request, or a part of the contents of one, is marked for a cache."""
    return any(
        getattr(one, "cache_control", None)
        or (isinstance(own := getattr(one, "content", None), list) and is_marked(own))
        for one in parts
    )


class TextPart(Labelled):
    """A part of a message."""

    type: Literal["text"]
    text: StrictStr


class StreamOptions(Fields):
    """Contents of a stream's events besides text."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (False,)}

    include_usage: StrictBool = False
    """True if a last event reports the usage."""
    continuous_usage_stats: StrictBool = False
    """True if every event reports the usage so far; requires include_usage."""


class Drafting(Fields):
    """foresay's extension field `foresay`: the drafting method of this request, and statistics to report."""

    drafter: Annotated[StrictStr, Field(max_length=200)] | None = None
    """A drafter expression, such as "none" or "suffix". None selects the server's drafter."""
    length: Annotated[StrictStr, Field(max_length=200)] | StrictInt | None = None
    rule: Annotated[StrictStr, Field(max_length=200)] | None = None
    stats: StrictBool = False
    """True if the response reports the drafted and accepted tokens of each step."""
    origins: StrictBool = False
    """True if a stream's events report the origin of each piece of text, and the tokens of their step."""


class Prediction(Fields):
    """A text that the output probably repeats."""

    type: Literal["content"]
    content: StrictStr | Parts[TextPart]

    @property
    def text(self) -> str:
        """The predicted text."""
        return joined(self.content)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "a function's name has 1 to 64 letters, digits, '_', '-' or '.'")
    return name


class Function(Fields):
    """A function that the model may call."""

    name: StrictStr
    description: StrictStr | None = None
    parameters: Object | None = None
    """JSON schema of the arguments, an object; None for a function without arguments."""
    strict: StrictBool | None = None
    """Accepted; arguments follow the schema if the call is required, see `tool_choice`."""

    _named = field_validator("name")(_name)


class OfferedTool(Labelled):
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

    tools: Tools[OfferedTool] | None = None
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
            raise FieldError("tools", "contain two with the same name")
        if choice == "required" and not tools:
            raise FieldError("tool_choice", "needs tools", value=choice)
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise FieldError("tool_choice", f"names {choice.function.name!r}, which is none of the tools")
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


class TemplateFields(ToolFields):
    """Fields that the chat template reads, besides the messages."""

    chat_template_kwargs: Object | None = None
    """Variables of the chat template."""
    reasoning_effort: StrictStr | None = None
    """Variable of the chat template of the same name: a hint, but for "none"."""
    enable_thinking: StrictBool | None = None
    """Variable `enable_thinking` or `thinking` of the chat template: true is a hint, false as reasoning_effort "none"."""
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    """True if the output continues the last message."""

    def chat_options(self, tokenizer: Any, last_role: str) -> ChatOptions:
        """Return the options of the chat template. last_role: of the last message.

        Raises ApiError for options that the template does not have.
        """
        if self.continue_final_message and last_role != "assistant":
            raise FieldError("continue_final_message", "needs a last message of the assistant")
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            text = "begins a new message, and {continue_final_message} continues the last one; send one of them"
            raise FieldError("add_generation_prompt", text, value=True, continue_final_message=True)
        begins = self.add_generation_prompt and not self.continue_final_message
        options = ChatOptions([one.plain() for one in self.used_tools], {}, begins, self.continue_final_message)
        given = {**(self.chat_template_kwargs or {})}
        effort = "none" if self.enable_thinking is False else self.reasoning_effort
        known = template_variables(tokenizer, options) if given or effort or self.enable_thinking else frozenset()
        switch = next((name for name in ("enable_thinking", "thinking") if name in known), None)
        if effort == "none" and switch is not None:
            given.setdefault(switch, False)
        elif effort == "none" and "reasoning_effort" not in known and reasoning_of(tokenizer) is None:
            pass  # there is nothing to turn off
        elif effort is not None and (effort == "none" or "reasoning_effort" in known):
            given.setdefault("reasoning_effort", effort)
        elif effort is not None:
            ignore("reasoning_effort")
        if self.enable_thinking and switch is not None:
            given.setdefault(switch, True)
        elif self.enable_thinking and reasoning_of(tokenizer) is None:
            ignore("enable_thinking")
        for name in given:
            if name not in known:
                text = f": the chat template of this model has no variable {name!r}; it has: {', '.join(sorted(known)) or 'none'}"
                hint = "reasoning_effort" if self.enable_thinking is None else "enable_thinking"
                raise FieldError(hint if name == "reasoning_effort" else "chat_template_kwargs", text)
        return replace(options, variables=given)
