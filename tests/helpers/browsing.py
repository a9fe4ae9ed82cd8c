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


def settings(page: Page, **values: str) -> None:
    """Change settings by their ids, and close them."""
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        field = page.locator(f"#{name}")
        if field.evaluate("e => e.localName") == "select":
            field.select_option(value)
        else:
            field.fill(value)
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()


def said(page: Page, text: str, tokens: int = 24) -> None:
    """Send a request by the keyboard alone, and wait for the end of the answer."""
    settings(page, max_tokens=str(tokens))
    page.locator("#prompt").focus()
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)


def begin(page: Page, text: str = "go on", tokens: int = 3000) -> None:
    """Send a request whose answer takes long, and wait for its first text."""
    settings(page, max_tokens=str(tokens))
    before = page.locator(".answer").count()
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".answer").nth(before).locator(".text > *").first).to_be_visible(timeout=30_000)


def event(delta: dict[str, str], drafted: int = 0, **more: Any) -> str:
    """One pass of one token."""
    text = delta.get("reasoning_content", "") + delta.get("content", "")
    ours = {"origins": [[text, "draft" if drafted else "bonus"]], "tokens": 1, "drafted": drafted}
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None, 'foresay': ours, **more}]})}\n\n"


def end(reason: str = "stop", **statistics: Any) -> str:
    """The last event of an answer and the end of its stream."""
    last = {"delta": {}, "finish_reason": reason, "foresay": {"exact": True, **statistics}}
    return f"data: {json.dumps({'choices': [last]})}\n\ndata: [DONE]\n\n"


def answer(text: str, reason: str = "stop", size: int = 3, **statistics: Any) -> str:
    """A stream that writes a text in pieces of `size` characters, each a pass."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return "".join(event({"content": piece}) for piece in pieces) + end(reason, **statistics)


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
