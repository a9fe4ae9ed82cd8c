"""How a request's chat messages are written by the model: with which tools, in which format, with reasoning or without.

Owns the link between the request's tool fields and the formats of tool calls. Knows no route.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foresay.errors import ConfigError
from foresay.server.errors import ApiError
from foresay.server.requests import ChatRequest, TokenizeRequest
from foresay.server.service import Service
from foresay.text.grammar import checked
from foresay.text.prompts import ChatOptions
from foresay.text.tool_calls.calls import OutputParser, Tool
from foresay.text.tool_calls.formats import FORMATS, ToolFormat, describes_tools, format_of, grammar_of, visible_ids
from foresay.text.tool_calls.harmony import HarmonyParser, is_harmony
from foresay.text.tool_calls.message import MessageParser, has_reasoning, is_open
from foresay.text.tool_calls.template_parser import TemplateParser, has_response_template


@dataclass(frozen=True, slots=True)
class MessageKind:
    """The kind of a request's messages."""

    tokenizer: Any
    options: ChatOptions
    """Options of the chat template, with the tools that it describes."""
    callable: Sequence[Tool]
    """Tools that the output may call."""
    format: ToolFormat | None
    """None without tools."""
    must_call: bool
    parallel: bool | None
    """False for at most one call; None for the default, which is one where calls are required."""
    reasons: bool
    is_open: bool = False
    """True if the prompt ends inside reasoning."""
    template_ids: tuple[int, ...] | None = None
    """Special tokens that a response template reads; None if the tokenizer has no such template, or a format was chosen."""
    prefix: str = ""
    """Text of the prompt, for a response template."""

    @staticmethod
    def of(service: Service, request: ChatRequest | TokenizeRequest) -> MessageKind:
        """Return the kind of a request's messages. Raises ApiError for tools that the model or the server does not support."""
        tools, tokenizer = request.used_tools, service.generator.tokenizer
        assert request.messages is not None
        chosen = None
        templated = service.settings.tool_format == "auto" and has_response_template(tokenizer)
        if tools:
            try:
                chosen = format_of(service.tokenizer, service.settings.tool_format)
                for one in tools:
                    checked(one.function.parameters or {})
            except ConfigError as error:
                if not (templated and describes_tools(tokenizer)):
                    raise ApiError(400, str(error), param="tools") from None
        return MessageKind(
            tokenizer,
            request.chat_options(service.tokenizer, request.messages[-1].role),
            request.callable_tools(),
            chosen,
            request.must_call,
            request.parallel_tool_calls,
            has_reasoning(tokenizer),
            template_ids=_special_ids(tokenizer, service.generator.target.eos_token_ids) if templated else None,
        )

    def after(self, prompt: list[int]) -> MessageKind:
        """Return the kind of the output after a prompt."""
        prefix = "" if self.template_ids is None else str(self.tokenizer.decode(prompt))
        return replace(self, is_open=self.reasons and is_open(self.tokenizer, prompt), prefix=prefix)

    @property
    def visible_ids(self) -> tuple[int, ...]:
        """Special tokens that stay in the text of an output."""
        if self.template_ids is not None:
            return self.template_ids
        return () if self.tokenizer is None else visible_ids(self._whole_format, self.tokenizer, reasons=self.reasons)

    @property
    def _whole_format(self) -> ToolFormat | None:
        """The format of the message; harmony also without tools, because it has marks of its own."""
        return self.format or (FORMATS["harmony"] if is_harmony(self.tokenizer) else None)

    def grammar_source(self) -> str | None:
        """Return the grammar of an output that must call a tool, else None. Raises ApiError for tools that have none."""
        if not self.must_call:
            return None
        if self.format is None:
            text = "required calls need a format that is known; choose it by --tool-format, or send tool_choice='auto'"
            raise ApiError(400, text, param="tool_choice")
        try:
            return grammar_of(
                self.format, self.callable, self.tokenizer, parallel=bool(self.parallel), after_reasoning=self.is_open
            )
        except ConfigError as error:
            raise ApiError(400, str(error), param="tool_choice") from None

    def parser(self) -> OutputParser | None:
        """Return the parser of one output; None if all of its text is content."""
        most = 1 if self.parallel is False else None
        if self.template_ids is not None:
            return TemplateParser(self.tokenizer, self.prefix, self.options.tools, most=most, only_calls=self.must_call)
        if self._whole_format is not None and self._whole_format.name == "harmony":
            return HarmonyParser(most=most, only_calls=self.must_call)
        if self.format is None and not self.reasons:
            return None
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in self.options.tools}
        calls = None if self.format is None else self.format.parser(schemas)
        return MessageParser(
            calls,
            reasons=self.reasons,
            is_open=self.is_open,
            most=most,
            only_calls=self.must_call,
        )


def _special_ids(tokenizer: Any, eos: Collection[int]) -> tuple[int, ...]:
    """Return the special tokens of a tokenizer except those that end an output."""
    return tuple(
        sorted(index for index, one in tokenizer.added_tokens_decoder.items() if one.special and index not in eos)
    )
