"""Outputs that a tokenizer's own response schema describes (transformers 5), parsed when they are complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from foresay.text.tool_calls.calls import CallPiece, Pieces


class ResponseSchemaParser:
    """A parser by `tokenizer.parse_response`."""

    def __init__(self, tokenizer: Any) -> None:
        self.num_calls = 0
        self._tokenizer, self._text = tokenizer, ""

    def push(self, text: str) -> Pieces:
        """See Parser. Everything is withheld until the end."""
        self._text += text
        return Pieces()

    def finish(self) -> Pieces:
        """See Parser."""
        try:
            message: Any = self._tokenizer.parse_response(self._text)
            calls = [_call(i, one) for i, one in enumerate(message.get("tool_calls") or [])]
        except Exception:  # a schema's expressions may raise anything on a text that they do not describe
            return Pieces(self._text)
        self.num_calls = len(calls)
        reasoning = message.get("thinking") or message.get("reasoning_content") or ""
        return Pieces(str(message.get("content") or ""), str(reasoning), calls)


def _call(index: int, call: Mapping[str, Any]) -> CallPiece:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CallPiece(index, str(function["name"]), text)
