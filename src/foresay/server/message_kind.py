"""How a request's chat messages are written by the model: with which tools, in which format, with reasoning or without.

Owns the link between the request's tool fields and the formats of tool calls. Knows no route.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foresay.errors import ConfigError
from foresay.server.errors import FieldError
from foresay.server.requests import ChatRequest, TokenizeRequest
from foresay.server.served import Served
from foresay.text.grammar import Source, checked
from foresay.text.prompts import ChatOptions
from foresay.text.reasoning import Reasoning, reasoning_of
from foresay.text.tool_calls.call_grammars import grammar_of
from foresay.text.tool_calls.calls import Limited, Parser, Tool
from foresay.text.tool_calls.families import ToolFormat
from foresay.text.tool_calls.formats import describes_tools, format_of, has_format, message_format, visible_ids
from foresay.text.tool_calls.message import MessageParser
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
    """None without tools, unless the model's messages have a format of their own."""
    must_call: bool
    parallel: bool | None
    """False for at most one call; None for the default, which is one where calls are required."""
    reasoning: Reasoning | None
    """Marks of reasoning; None if the model does not reason."""
    answer: tuple[str, Source] | None = None
    """Field and constraint of an output without calls, if one is requested."""
    is_open: bool = False
    is_closed: bool = False
    """True if the prompt ends inside reasoning, or after it."""
    template_ids: tuple[int, ...] | None = None
    """Special tokens that a response template reads; None if the tokenizer has no such template, or a format was chosen."""
    prefix: str = ""
    """Text of the prompt, for a response template."""

    @staticmethod
    def of(
        model: Served, request: ChatRequest | TokenizeRequest, answer: tuple[str, Source] | None = None
    ) -> MessageKind:
        """Return the kind of a request's messages. answer: see MessageKind.

        Raises ApiError for tools that the model or the server does not support."""
        tools, tokenizer = request.used_tools, model.generator.tokenizer
        control_tokens = model.settings.control_tokens
        assert request.messages is not None
        chosen = message_format(tokenizer)
        templated = model.settings.tool_format == "auto" and has_response_template(tokenizer)
        if tools:
            try:
                for one in tools:
                    checked(one.function.parameters or {})
                if not (templated and describes_tools(tokenizer) and not has_format(tokenizer)):
                    chosen = format_of(model.tokenizer, model.settings.tool_format)
            except ConfigError as error:
                raise FieldError("tools", error) from None
        return MessageKind(
            tokenizer,
            replace(request.chat_options(model.tokenizer, request.messages[-1].role), control_tokens=control_tokens),
            request.callable_tools(),
            chosen,
            request.must_call,
            request.parallel_tool_calls,
            reasoning_of(tokenizer),
            answer,
            template_ids=_special_ids(tokenizer, model.generator.target.eos_token_ids) if templated else None,
        )

    def after(self, prompt: list[int]) -> MessageKind:
        """Return the kind of the output after a prompt."""
        prefix = "" if self.template_ids is None else str(self.tokenizer.decode(prompt))
        if self.reasoning is None:
            return replace(self, prefix=prefix)
        opened, closed = (ends(self.tokenizer, prompt) for ends in (self.reasoning.is_open, self.reasoning.is_closed))
        return replace(self, is_open=opened, is_closed=closed, prefix=prefix)

    @property
    def visible_ids(self) -> tuple[int, ...]:
        """Special tokens that stay in the text of an output."""
        if self.template_ids is not None:
            return self.template_ids
        return () if self.tokenizer is None else visible_ids(self.format, self.tokenizer, reasoning=self.reasoning)

    def grammar_source(self) -> Source | None:
        """Return the schema or grammar of the output: a call if one is required, else a call or an answer.

        None if the output is free. Raises ApiError for tools that have no grammar.
        """
        if not self.must_call and self.answer is None:
            return None
        param, answer = ("tool_choice", None) if self.must_call or self.answer is None else self.answer
        if not self.callable and self.reasoning is None:
            return answer
        if self.callable and self.format is None:
            text = "with tools needs a format of calls that is known; choose it by --tool-format"
            problem = f"{text}, or send {{tool_choice}}"
            raise FieldError(param, problem, tool_choice="auto" if self.must_call else "none")
        try:
            if answer is not None:
                checked(answer)
            return grammar_of(
                self.format,
                self.callable,
                self.tokenizer,
                parallel=not self.must_call if self.parallel is None else self.parallel,
                reasoning=None if self.is_closed else self.reasoning,
                after_reasoning=self.is_open,
                answer=answer,
            )
        except ConfigError as error:
            raise FieldError(param, error) from None

    def parser(self) -> Parser | None:
        """Return the parser of one output; None if all of its text is content."""
        found: Parser
        if self.template_ids is not None:
            found = TemplateParser(self.tokenizer, self.prefix, self.options.tools)
        elif self.format is not None and self.format.message is not None:
            found = self.format.message()
        elif self.format is None and self.reasoning is None:
            return None
        else:
            schemas = {one["function"]["name"]: one["function"]["parameters"] for one in self.options.tools}
            make = None if self.format is None else self.format.parser
            calls = None if make is None else make(schemas, self.answer is not None)
            found = MessageParser(calls, reasoning=self.reasoning, is_open=self.is_open, is_closed=self.is_closed)
        return Limited(found, 1 if self.parallel is False else None, only_calls=self.must_call)


def takes_tools(model: Served) -> bool:
    """True if requests with tools are answered: the model's template describes them, and its calls can be read."""
    tokenizer, chosen = model.generator.tokenizer, model.settings.tool_format
    if tokenizer is None or not describes_tools(tokenizer):
        return False
    return chosen != "auto" or has_format(tokenizer) or has_response_template(tokenizer)


def _special_ids(tokenizer: Any, eos: Collection[int]) -> tuple[int, ...]:
    """Return the special tokens of a tokenizer except those that end an output."""
    return tuple(
        sorted(index for index, one in tokenizer.added_tokens_decoder.items() if one.special and index not in eos)
    )
