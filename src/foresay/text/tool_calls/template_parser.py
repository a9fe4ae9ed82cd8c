"""Messages by a tokenizer's response template: transformers' own description of where reasoning, content and calls are.

Owns the conversion of the events of transformers' parser. Regions of other names are left out: the API has no field for them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from foresay.errors import ConfigError
from foresay.text.tool_calls.calls import CallPiece, Pieces
from foresay.text.tool_calls.loose_json import repaired
from foresay.text.tool_calls.parsers import as_json

logger = logging.getLogger("foresay")
_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})


def has_response_template(tokenizer: Any) -> bool:
    """True if a tokenizer brings a response template, and transformers can read it."""
    return bool(getattr(tokenizer, "response_template", None)) and hasattr(tokenizer, "get_response_parser")


class TemplateParser:
    """Splits an output into reasoning, content and calls; see Parser."""

    def __init__(self, tokenizer: Any, prefix: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """prefix: the prompt's text. tools: in OpenAI's format. Raises ConfigError for a template that transformers refuses."""
        try:
            self._parser = tokenizer.get_response_parser(prefix=prefix, tools=list(tools) or None)
        except Exception as error:
            reason = f"{error}; choose a format by --tool-format"
            text = f"of this model's tokenizer cannot be used: {reason}"
            raise ConfigError(text, param="response template") from error
        self._num_calls, self._is_broken = 0, False

    def push(self, text: str) -> Pieces:
        """See Parser."""
        if self._is_broken:
            return Pieces(text)
        try:
            return self._pieces(self._parser.feed(text))
        except Exception as error:  # the template's patterns and conversions are a program of the model's author
            logger.warning("the response template of the tokenizer failed: %s", error)
            self._is_broken = True
            return Pieces(text)

    def finish(self) -> Pieces:
        """See Parser."""
        if self._is_broken:
            return Pieces()
        try:
            return self._pieces(self._parser.finalize()[1])
        except Exception as error:  # such as a field that is missing because the output was cut
            logger.info("the response template of the tokenizer did not match: %s", error)
            return Pieces()

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> Pieces:
        out = Pieces()
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_close" and field == "tool_calls":
                found = event["value"]
                for call in found if isinstance(found, list) else [found]:
                    self._add_call(call, out)
            elif kind == "region_chunk" and field in _REASONING:
                out.reasoning += event["text"]
            elif kind == "region_chunk" and field == "content":
                out.content += event["text"]
        return out

    def _add_call(self, call: Any, out: Pieces) -> None:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not name:
            return
        text = repaired(arguments or "{}") or arguments if isinstance(arguments, str) else as_json(arguments)
        out.calls.append(CallPiece(self._num_calls, name, text))
        self._num_calls += 1
