"""Flags of the browser in which the page is tested, actions of a user, and answers made up for the page."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, expect

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CHATS = "**/v1/chat/completions"
TEXT = "the number 7 and 8 and 7 and 8 and"


def said(page: Page, text: str, tokens: int = 24) -> None:
    """Send a request by the keyboard alone, and wait for the end of the answer."""
    page.locator("#tokens").fill(str(tokens))
    page.locator("#prompt").focus()
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)


def event(delta: dict[str, str], drafted: int = 0, **more: Any) -> str:
    """One pass of one token."""
    text = delta.get("reasoning_content", "") + delta.get("content", "")
    ours = {"origins": [[text, "draft" if drafted else "bonus"]], "tokens": 1, "drafted": drafted}
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None, 'foresay': ours, **more}]})}\n\n"


def end(**statistics: Any) -> str:
    """The last event of an answer and the end of its stream."""
    last = {"delta": {}, "finish_reason": "stop", "foresay": {"exact": True, **statistics}}
    return f"data: {json.dumps({'choices': [last]})}\n\ndata: [DONE]\n\n"


def answer(text: str, **statistics: Any) -> str:
    """A stream that writes a text in pieces of three characters, each a pass."""
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    return "".join(event({"content": piece}) for piece in pieces) + end(**statistics)


def serve(page: Page, *streams: str) -> list[Any]:
    """Have the page receive these streams, one a request and the last again; returns a list that gets each request's body."""
    bodies: list[Any] = []

    def fulfil(route: Any) -> None:
        stream = streams[min(len(bodies), len(streams) - 1)]
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=stream)

    page.route(CHATS, fulfil)
    return bodies


def refuse(page: Page, message: str, status: int = 400) -> None:
    """Have the page receive an error."""
    body = json.dumps({"error": {"message": message}})
    page.route(CHATS, lambda route: route.fulfill(status=status, content_type="application/json", body=body))
