"""Markdown on the page: what it becomes, that it is copied as it was written, and that no answer becomes more than text."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from helpers.browsing import answer, event, said, serve

SAMPLE = """# A *title*

Text with `first_value`, **strong**, ~~gone~~ and a [link](https://example.org/a_b).
A new line

- one
  1. inner
- [x] done

7. seven

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
def add(first_value, second_value):
    return first_value < second_value  # & <b>
```
"""
ATTACKS = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "a <b onclick=alert(1)>b</b> <svg/onload=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1)) [b](data:text/html,x) [c](//example.org/x) [d](vbscript:x)",
    "![a](http://example.org/x.png)",
    '```"onmouseover="alert(1)\nx\n```',
    "<style>body{display:none}</style><iframe src=//example.org></iframe>",
    "[a]\n\n[a]: javascript:alert(1)",
    "[a](&#106;avascript:alert(1)) &lt;img src=x onerror=alert(1)&gt;",
    '| <img src=x> |\n|---|\n| <a href="javascript:x">y</a> |',
]
ALLOWED = "p h3 h4 h5 h6 ul ol li blockquote code pre strong em del br hr a table thead tbody tr th td div span button"


def text_of(page: Page) -> str:
    return page.locator(".answer .text").inner_text()


def test_markdown_becomes_elements(page: Page) -> None:
    serve(page, answer(SAMPLE))
    said(page, "go")
    box = page.locator(".answer .text")
    for selector, text in (
        ("h3 em", "title"),
        ("p code", "first_value"),
        ("strong", "strong"),
        ("del", "gone"),
        ("ul > li > ol > li", "inner"),
        ("ol[start='7'] > li", "seven"),
        ("blockquote p", "quoted"),
        ("td.right", "2"),
        (".bar span", "python"),
    ):
        expect(box.locator(selector)).to_have_text(text)
    assert "☑ done" in text_of(page) and box.locator("p br").count() == 1
    link = box.locator("a")
    assert [link.get_attribute(name) for name in ("href", "rel", "target")] == [
        "https://example.org/a_b",
        "noopener noreferrer",
        "_blank",
    ]
    code = SAMPLE.split("```python\n")[1].split("\n```")[0]
    assert box.locator("pre").text_content() == code


@pytest.mark.parametrize(
    ("text", "is_deep"),
    [("> " * 20_000, True), ("a\n" + "> - " * 200 + "b", True), ("1. " * 40 + "c", True), ("- " * 12 + "d", False),
     ("-" * 80 + "\n" + "> e\n" * 300, False)],
)  # fmt: skip
def test_what_is_nested_too_deeply_is_shown_as_it_is(text: str, is_deep: bool, page: Page) -> None:
    """Before it is parsed: the parser takes a time that grows with the square of the depth."""
    parsed, raw, shown = page.evaluate(
        """text => {
            const [box, honest] = [document.createElement("div"), marked];
            let parsed = 0;
            window.marked = { lexer: (...given) => { parsed++; return honest.lexer(...given); } };
            try { showMarkdown(box, text) } finally { window.marked = honest }
            return [parsed, box.querySelectorAll(":scope > .raw").length, box.textContent];
        }""",
        text,
    )
    assert (parsed, raw) == ((0, 1) if is_deep else (1, 0)) and (shown == text or not is_deep)


def test_entities_become_characters_outside_of_code(page: Page) -> None:
    serve(
        page, answer("a &lt;b&gt; &amp;lt; &#39;&#x1F600; &unknown; `&lt;` [l&amp;k](https://example.org/?a=1&amp;b=2)")
    )
    said(page, "go")
    assert text_of(page) == "a <b> &lt; '😀 &unknown; &lt; l&k"
    assert page.locator(".answer .text a").get_attribute("href") == "https://example.org/?a=1&b=2"


def test_a_growing_answer_ends_as_if_it_were_read_at_once(page: Page) -> None:
    grown, whole = page.evaluate(
        """text => {
            const [grown, whole] = [document.createElement("div"), document.createElement("div")];
            for (let size = 1; size <= text.length; size++) showMarkdown(grown, text.slice(0, size));
            showMarkdown(whole, text);
            return [grown.outerHTML, whole.outerHTML];
        }""",
        SAMPLE + "\n[later]\n\n[later]: https://example.org/later\n",
    )
    assert grown == whole and "later</a>" in whole


def test_unchanged_blocks_keep_their_nodes(page: Page) -> None:
    assert page.evaluate(
        """() => {
            const box = document.createElement("div");
            showMarkdown(box, "one\\n\\ntwo");
            const [one, two] = box.children;
            showMarkdown(box, "one\\n\\ntwo and more\\n\\nthree");
            return box.children[0] === one && box.children[1] !== two && box.children.length === 3;
        }"""
    )


def test_code_and_answers_are_copied_as_they_were_written(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    serve(page, answer(SAMPLE))
    said(page, "go")
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator("#status")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == SAMPLE.split("```python\n")[1].split("\n```")[0]
    page.get_by_role("button", name="Copy answer 1").click()
    expect(page.get_by_role("button", name="Copy answer 1")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == SAMPLE
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copy code")).to_have_text("Copied")


def test_no_answer_becomes_more_than_text(page: Page) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    serve(page, *map(answer, ATTACKS))
    for text in ATTACKS:
        page.locator("#clear").click()
        said(page, text)
        expect(page.locator(".message .words")).to_have_text(text)
        found = page.locator(".answer .text *").evaluate_all(
            "all => all.map(one => [one.localName, one.getAttributeNames(), one.getAttribute('href')])"
        )
        assert {name for name, _, _ in found} <= set(ALLOWED.split()), text
        assert not [one for _, names, _ in found for one in names if one.startswith(("on", "style", "src"))], text
        assert all(re.match("https?:|mailto:", link) for _, _, link in found if link is not None), text
        has_definition = text.startswith(("[a]\n", "```"))  # markdown shows neither
        assert "alert(1)" not in text or has_definition or "alert(1)" in text_of(page), "it is shown as it was written"


def test_the_browser_refuses_text_as_html(page: Page) -> None:
    """A negative control of the policy: what the page never does would fail."""
    for script in ("box.innerHTML = '<b>x</b>'", "box.insertAdjacentHTML('beforeend', '<b>x</b>')"):
        failed = (
            f"() => {{ const box = document.createElement('div'); try {{ {script}; }} catch (e) {{ return e.name; }} }}"
        )
        assert page.evaluate(failed) == "TypeError"


def test_reasoning_is_folded_away_and_not_sent_back(page: Page) -> None:
    bodies = serve(page, event({"reasoning_content": "because"}) + answer("so"))
    said(page, "go")
    expect(page.locator(".answer .text")).to_have_text("so")
    expect(page.locator(".reasoning")).to_be_visible()
    assert page.locator(".reasoning").get_attribute("open") is None
    expect(page.locator(".reasoning .raw")).to_have_text("because")
    said(page, "and")
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "so"}
