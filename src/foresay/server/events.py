"""Formats of whole APIs over the bodies of OpenAI's completions: the bodies unchanged, or converted by an adapter.

Owns the encoding of server-sent events. Knows no engine and no route.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

Bodies = AsyncGenerator[dict[str, Any], None]
"""Bodies of a stream's events. If the stream fails, the last one is the error's, with its `status`."""


def encode_event(body: dict[str, Any] | str, name: str | None = None) -> bytes:
    """Encode a server-sent event. name: its type."""
    text = (
        body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class Format(Protocol):
    """Format of an API's responses."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole response."""
        ...

    def events(self, bodies: Bodies) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream, and close `bodies`."""
        ...


class OpenAiFormat:
    """OpenAI's completions and chat completions."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """See Format."""
        return body

    async def events(self, bodies: Bodies) -> AsyncGenerator[bytes, None]:
        """See Format."""
        failed = False
        async with aclosing(bodies):
            async for body in bodies:
                failed = "error" in body
                yield encode_event({"error": body["error"]} if failed else body)
        if not failed:
            yield encode_event("[DONE]")
