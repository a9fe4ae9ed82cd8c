"""The server's page in a real browser without a window: `make test-browser`. How an answer grows and is described."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

import foresay
from helpers.browsing import TEXT, end, event, said, serve, settings
from helpers.serving import Running


def test_an_answer_is_coloured_by_who_wrote_it(page: Page) -> None:
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#legend")).to_be_hidden()
    said(page, TEXT)
    assert page.locator(".answer .text span").count() == 0, "origins are shown where a user wants them"
    text = page.locator(".answer .text").inner_text()
    page.locator("#origins").check()
    answer = page.locator("section.answer")
    expect(answer).to_have_count(1)
    expect(answer.locator("h2")).to_have_text("with speculation")
    spans = answer.locator(".text span").all()
    assert "".join("".join(map(Locator.text_content, spans)).split()) == "".join(text.split())
    kinds = {one.get_attribute("class") for one in spans}
    assert kinds <= {"draft", "residual", "bonus"} and len(kinds) >= 2, kinds
    figures = answer.locator(".figures").inner_text()
    assert "24 tokens" in figures and "tokens per pass" in figures and "first after –" not in figures, figures
    line = "e => { const s = getComputedStyle(e); return `${s.textDecorationLine} ${s.textDecorationStyle}`; }"
    for kind in kinds:
        shown, legend = page.locator(f".answer .text .{kind}").first, page.locator(f".legend .{kind}")
        assert shown.evaluate(line) == legend.evaluate(line)
    for style in (line, "e => getComputedStyle(e).color"):
        marks = {page.locator(f".legend .{kind}").evaluate(style) for kind in ("draft", "residual", "bonus")}
        assert len(marks) == 3, "an origin is marked by its colour, and by more than that"


def bottom(page: Page, selector: str) -> float:
    return float(page.locator(selector).last.evaluate("e => e.getBoundingClientRect().bottom"))


def top(page: Page, selector: str) -> float:
    return float(page.locator(selector).evaluate("e => e.getBoundingClientRect().top"))


@pytest.mark.parametrize(("width", "height"), [(400, 500), (1000, 700)])
def test_a_growing_answer_stays_in_view(width: int, height: int, page: Page) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.locator("#compare").check()
    page.locator("#origins").check()
    said(page, TEXT, tokens=3000)
    spans = page.locator("section.answer").first.locator(".text span")
    assert page.locator("#talk").evaluate("e => e.scrollHeight - e.clientHeight") > 0, (
        "the answer is longer than the view"
    )
    assert spans.first.evaluate("e => e.getBoundingClientRect().bottom") < 0
    for selector in (".text span", ".figures"):
        assert bottom(page, selector) <= top(page, "#form") + 1, f"the end of {selector} is under the form"
    assert bottom(page, "#form") <= height + 1 and page.evaluate("scrollY") == 0
    assert bottom(page, "#talk") - top(page, "#talk") >= 90, "room to read"


def grow(page: Page, count: int) -> None:
    """Have the panel that grows take so many words, after the frames in which the page receives scrolling."""
    frames = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.evaluate(frames)
    word = "{delta: {content: 'word '}, foresay: {origins: [['word ', 'bonus']], tokens: 1, drafted: 0}}"
    page.evaluate(f"n => {{ for (let i = 0; i < n; i++) current.take({word}); }}", count)
    page.evaluate(frames)


def test_whoever_scrolls_up_reads_on_there(page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 500})
    page.evaluate("() => { current = new Panel(at('talk'), newAnswer('plain')); }")
    grow(page, 400)
    assert (
        page.locator("#talk").evaluate("e => e.scrollTop") > 200 and bottom(page, ".figures") <= top(page, "#form") + 1
    )
    page.locator("#talk").evaluate("e => { e.scrollTop = 40; }")
    grow(page, 400)
    assert page.locator("#talk").evaluate("e => e.scrollTop") == 40
    page.locator("#talk").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    grow(page, 400)
    assert bottom(page, ".figures") <= top(page, "#form") + 1, "at the end again, it follows"


def test_an_answer_is_announced_once_it_is_complete(page: Page) -> None:
    page.evaluate(
        "() => { window.seen = []; new MutationObserver(() => seen.push(document.getElementById('status').textContent))"
        ".observe(document.getElementById('status'), {childList: true}); }"
    )
    settings(page, max_tokens="300")
    page.locator("#prompt").fill("go on")
    page.keyboard.press("Enter")
    expect(page.locator("section.answer[aria-busy=true]")).to_have_count(1, timeout=30_000)
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert page.locator("[aria-busy=true]").count() == 0
    text = page.locator(".answer .text").inner_text()
    seen = page.evaluate("seen")
    assert seen[0] == "Generating" and seen[-1].startswith("Answer with speculation: ") and len(seen) == 2
    assert len(seen[-1]) > 200 and len(text) > 200
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert all(one.locator("*").count() == 0 for one in live.all()), "no part that is read out contains the tokens"


@pytest.mark.parametrize(("drafted", "shown"), [(0, True), (2, False)])
def test_passes_without_a_draft_are_explained(drafted: int, shown: bool, page: Page) -> None:
    passes = [event({"content": "x"}, 3), *[event({"content": "x"})] * 10, event({"content": "x"}, drafted)]
    serve(page, "".join(passes) + end())
    said(page, "hello")
    figures = page.locator(".figures").inner_text()
    assert "1.00 tokens per pass" in figures and ("drafting is paused" in figures) is shown, figures
    settings(page, drafter="none")
    said(page, "hello")
    assert "drafting is paused" not in page.locator(".figures").last.inner_text(), "that is what was requested"


def test_a_key_is_asked_for_where_there_is_one(browser: Any, generator: foresay.Generator) -> None:
    running = Running(generator, keys=frozenset({"secret"}))
    opened = browser.new_page()
    try:
        opened.goto(running.url)
        expect(opened.locator("#keyed")).to_be_visible()
        opened.locator("#key").fill("secret")
        opened.locator("#key").press("Tab")
        expect(opened.locator("#model")).to_have_text("tiny")
        said(opened, "hello")
        expect(opened.locator("section.answer")).to_have_count(1)
    finally:
        opened.close()
        running.close()
