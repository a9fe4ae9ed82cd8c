"""The look of the page at two widths, light and dark: nothing sticks out, all is legible, labelled and reached by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Page, expect

from helpers.browsing import answer, said, serve
from helpers.page_measures import CONTRAST, CUT, EDGES, NAMES, OUTSIDE, SMALL, illegible
from helpers.serving import Running

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
CODE = '```python\n# a comment\ndef add(first, second):\n    return "text" + str(first + 2)\n```\n'
"""Each class of colours."""


@pytest.fixture
def look(request: Any, page: Page) -> Page:
    width, scheme = request.param
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    return page


@pytest.mark.parametrize("look", LOOKS, indirect=True)
@pytest.mark.parametrize("origins", [False, True])
def test_nothing_sticks_out_and_all_is_legible(origins: bool, look: Page) -> None:
    serve(look, answer(ANSWER + "\n\n" + CODE))
    assert illegible(look.evaluate) == {}
    look.locator("#compare").check()
    look.locator("#origins").set_checked(origins)
    said(look, "a question that is long enough for a line of its own on a small screen, and more")
    look.get_by_role("button", name="Edit message 1").click()
    assert illegible(look.evaluate) == {}
    assert look.locator("#talk").evaluate("e => e.clientHeight") >= 150, "room to read"
    assert look.locator("form").evaluate("e => e.getBoundingClientRect().bottom <= innerHeight")
    dark = look.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (
        sum(map(int, look.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))) < 300
    ) is dark


@pytest.mark.parametrize("look", LOOKS, indirect=True)
def test_the_settings_and_the_list_are_legible(look: Page) -> None:
    serve(look, answer("a"))
    said(look, "a question")
    look.locator("#prompt").focus()
    narrow = look.evaluate("innerWidth") < 960
    if narrow:
        look.get_by_role("button", name="Chats").click()
    expect(look.locator("#list input")).to_be_visible()
    assert illegible(look.evaluate) == {}
    look.keyboard.press("Escape")
    expect(look.locator("#list")).to_be_visible(visible=not narrow)
    look.get_by_role("button", name="Settings").click()
    assert illegible(look.evaluate) == {}
    box = look.locator("#settings").bounding_box()
    assert (
        box is not None and box["y"] + box["height"] <= 844 and box["x"] + box["width"] <= look.evaluate("innerWidth")
    )


def test_controls_take_less_than_a_sixth_of_a_phones_height(page: Page) -> None:
    """They took a quarter."""
    page.set_viewport_size({"width": 390, "height": 844})
    height = sum(float(page.locator(one).evaluate("e => e.clientHeight")) for one in ("#column > header", "#form"))
    assert height < 844 / 6, height


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_wcag_is_broken(scheme: str, browser: Any, server: Running) -> None:
    """By axe-core, which is injected: the page's policy forbids scripts of others."""
    context = browser.new_context(viewport={"width": 1280, "height": 844}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#facts div").first).to_be_visible()
    axe = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    run = "() => axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']})"

    def broken() -> list[str]:
        found = page.evaluate(run)["violations"]
        return [f"{one['id']}: {node['html'][:100]}" for one in found for node in one["nodes"]]

    page.evaluate(axe)
    assert broken() == []
    serve(page, answer(ANSWER + "\n\n" + CODE))
    page.locator("#compare").check()
    said(page, "go")
    assert broken() == []
    page.get_by_role("button", name="Settings").click()
    assert broken() == []
    page.locator("#model").evaluate("e => e.removeAttribute('aria-label')")
    page.locator("h1").evaluate("e => e.setAttribute('class', 'broken')")
    page.add_style_tag(content=".broken { color: #999 !important; background: #aaa; }")
    assert len(broken()) >= 1, "a negative control"
    context.close()


def test_the_measures_find_what_is_wrong(page: Page) -> None:
    """Negative controls."""
    page.locator("h1").evaluate(
        "e => { e.style.color = '#ccc'; e.style.position = 'relative'; e.style.left = '-40rem'; }"
    )
    page.locator("#clear").evaluate(
        "e => { e.style.width = '1rem'; e.style.whiteSpace = 'normal'; e.style.height = '5rem'; }"
    )
    page.locator("#prompt").evaluate("e => { e.style.borderColor = '#ddd'; }")
    assert len(page.evaluate(CONTRAST)) == 1 and len(page.evaluate(OUTSIDE)) == 1 and page.evaluate(CUT) == ["New chat"]
    assert len(page.evaluate(SMALL)) == 1 and len(page.evaluate(EDGES)) == 1


def test_an_underscore_is_seen_above_the_line_of_an_origin(page: Page) -> None:
    page.locator("#origins").check()
    offset, underscore, size = page.locator(".legend .draft").evaluate(
        """e => { const style = getComputedStyle(e); const pen = document.createElement("canvas").getContext("2d");
            pen.font = style.font;
            const below = pen.measureText("_").actualBoundingBoxDescent;
            return [parseFloat(style.textUnderlineOffset), below, parseFloat(style.fontSize)]; }"""
    )
    assert 0.2 * size < underscore + 1 <= offset, "0.2 em, which it was, hides it"


def reached(page: Page, most: int) -> list[str]:
    """Names of the controls that the key Tab reaches, each with a visible focus."""
    page.locator("body").evaluate("() => document.activeElement.blur()")
    found: list[str] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        name = page.evaluate(f"({NAMES})([document.activeElement])[0]")
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 2 or not name, f"the focus of {name} is not seen"
        found.append(name)
    return found


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    serve(page, answer("```text\nx\n```"))
    said(page, "another")
    page.locator("#clear").click()
    said(page, "go")
    page.get_by_role("button", name="Edit message 1").click()
    controls = page.locator("button:visible:enabled, input:visible, textarea:visible, summary:visible, #talk, pre")
    names = controls.evaluate_all(NAMES)
    assert all(names) and len(set(names)) == len(names), names
    assert set(names) <= set(reached(page, len(names) + 3))
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    inside = page.locator("#settings").locator("button, input, select, textarea").evaluate_all(NAMES)
    assert all(inside) and len(set(inside)) == len(inside) == 11
    found = [page.keyboard.press("Tab") or page.evaluate(f"({NAMES})([document.activeElement])[0]") for _ in inside]
    assert found == inside, "the keyboard goes on into the settings"
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_a_chat_by_the_keyboard_alone(page: Page) -> None:
    bodies = serve(page, answer("a"))
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one\n")
    expect(page.locator(".answer .text")).to_have_text("a")
    page.get_by_role("button", name="Race: plain").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_count(2)
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#send")).to_be_enabled()
    assert len(bodies) == 2
