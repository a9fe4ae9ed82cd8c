"""The look of the page at two widths, light and dark: nothing sticks out, all is legible, labelled and reached by keyboard."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from helpers.browsing import answer, said, serve

LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
ANSWER = (
    "A `name_of_a_thing` and a [link](https://example.org).\n\n```text\n"
    + "a long line of code " * 20
    + "\n```\n\n| "
    + "wide | " * 30
    + "\n|"
    + "---|" * 30
    + "\n| "
    + "cell | " * 30
    + "\n\n> quoted\n\n"
    + "anunbrokenword" * 30
)
CONTRAST = """() => {
    const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const back = (e) => { for (; e; e = e.parentElement) {
        const c = numbers(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } };
    const out = {};
    for (const e of document.querySelectorAll("body *")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.checkVisibility() || e.disabled) continue;
        const [a, b] = [light(numbers(getComputedStyle(e).color).slice(0, 3)), light(back(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) out[`${e.localName}.${e.className}: ${e.textContent.slice(0, 20)}`] = ratio;
    }
    return out; }"""
OUTSIDE = """() => [...document.querySelectorAll("header *, form *, .message *, .answer, .actions *")]
    .filter((e) => e.checkVisibility() && !e.closest(".unseen")).map((e) => [e, e.getBoundingClientRect()])
    .filter(([, box]) => box.left < -0.5 || box.right > innerWidth + 0.5).map(([e]) => e.outerHTML.slice(0, 80))"""
CUT = """() => [...document.querySelectorAll("button, label, summary")].filter((e) => e.checkVisibility())
    .filter((e) => e.getBoundingClientRect().height > 48).map((e) => e.textContent)"""


@pytest.fixture
def look(request: Any, page: Page) -> Page:
    width, scheme = request.param
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    return page


@pytest.mark.parametrize("look", LOOKS, indirect=True)
@pytest.mark.parametrize("origins", [False, True])
def test_nothing_sticks_out_and_all_is_legible(origins: bool, look: Page) -> None:
    serve(look, answer(ANSWER))
    look.locator("#compare").check()
    look.locator("#origins").set_checked(origins)
    look.locator("summary").filter(has_text="System prompt").click()
    said(look, "a question that is long enough for a line of its own on a small screen, and more")
    look.get_by_role("button", name="Edit message 1").click()
    assert look.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert look.evaluate(OUTSIDE) == [] and look.evaluate(CUT) == [] and look.evaluate(CONTRAST) == {}
    assert look.locator("#talk").evaluate("e => e.clientHeight") >= 150, "room to read"
    assert look.locator("form").evaluate("e => e.getBoundingClientRect().bottom <= innerHeight")
    dark = look.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (
        sum(map(int, look.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))) < 300
    ) is dark


def test_the_measures_find_what_is_wrong(page: Page) -> None:
    """Negative controls."""
    page.locator("h1").evaluate(
        "e => { e.style.color = '#ccc'; e.style.position = 'relative'; e.style.left = '-40rem'; }"
    )
    page.locator("#clear").evaluate(
        "e => { e.style.width = '1rem'; e.style.whiteSpace = 'normal'; e.style.height = '5rem'; }"
    )
    assert len(page.evaluate(CONTRAST)) == 1 and len(page.evaluate(OUTSIDE)) == 1 and page.evaluate(CUT) == ["New chat"]


def test_an_underscore_is_seen_above_the_line_of_an_origin(page: Page) -> None:
    page.locator("#origins").check()
    offset, underscore, size = page.locator(".legend .draft").evaluate(
        """e => { const style = getComputedStyle(e); const pen = document.createElement("canvas").getContext("2d");
            pen.font = style.font;
            const below = pen.measureText("_").actualBoundingBoxDescent;
            return [parseFloat(style.textUnderlineOffset), below, parseFloat(style.fontSize)]; }"""
    )
    assert 0.2 * size < underscore + 1 <= offset, "0.2 em, which it was, hides it"


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page: Page) -> None:
    serve(page, answer("```text\nx\n```"))
    said(page, "go")
    page.locator("summary").filter(has_text="System prompt").click()
    page.get_by_role("button", name="Edit message 1").click()
    controls = page.locator("button:visible:enabled, input:visible, textarea:visible, summary:visible, main, pre")
    names = controls.evaluate_all(
        "all => all.map((e) => e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim())"
    )
    assert all(names) and len(set(names)) == len(names), names
    page.locator("body").evaluate("() => document.activeElement.blur()")
    reached = set()
    for _ in range(len(names) + 3):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(e => e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim())(document.activeElement)"
            )
        )
    assert set(names) <= reached, set(names) - reached


def test_a_chat_by_the_keyboard_alone(page: Page) -> None:
    bodies = serve(page, answer("a"))
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one\n")
    expect(page.locator(".answer .text")).to_have_text("a")
    page.get_by_role("button", name="Compare: plain").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_count(2)
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#send")).to_be_enabled()
    assert len(bodies) == 2
