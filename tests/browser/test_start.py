"""The start of the page: the model's facts and examples; models without a chat template; long, foreign and coloured text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import foresay
from foresay.server.service import Entry, Service
from foresay.server.settings import ServerSettings
from helpers import tiny
from helpers.browsing import answer, said, serve
from helpers.serving import Running

LANGUAGES = {
    "python": (
        "def add(a):  # a sum\n    return 'x' + repr(2)",
        ["def", "# a sum", "return", "'x'", "2"],
        ["add", "repr"],
    ),
    "js": ("const a = f(`x${1}`); // y", ["const", "`x${1}`", "// y"], ["f"]),
    "sql": ("SELECT a FROM b -- c\nWHERE d = 'e'", ["SELECT", "FROM", "-- c", "WHERE", "'e'"], []),
    "html": ('<p class="a">b</p><!-- c -->', ["<p", '"a"', ">", "</p", ">", "<!-- c -->"], []),
    "bash": ("echo $# ${#a} # c", ["# c"], []),
    "text": ("def f(): return 1", [], []),
}


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server of models without a chat template."""
    running: list[Running] = []
    folder = tiny.save(tmp_path / "tiny")

    def start(*names: str) -> Page:
        entries = [Entry([name], lambda: foresay.load(folder), 4) for name in names]
        running.append(Running(Service(entries, ServerSettings())))
        page: Page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(running[-1].url)
        return page

    yield start
    for one in running:
        one.close()


class TestStart:
    def test_it_names_the_model_and_how_it_drafts(self, page: Page) -> None:
        expect(page.locator("#start h2")).to_have_text("tiny")
        facts = page.locator("#facts div").evaluate_all(
            "all => Object.fromEntries(all.map((e) => [...e.children].map((one) => one.textContent)))"
        )
        assert (
            facts["Context"] == "4096 tokens" and facts["Drafter"] == "suffix" and facts["Draft length"] == "constant"
        )
        assert facts["Weights"].endswith("MB, bfloat16, on cpu") and facts["Acceptance rule"] == "speculative"

    def test_an_example_is_sent_by_a_click(self, page: Page) -> None:
        bodies = serve(page, answer("a"))
        examples = page.locator("#examples button")
        expect(examples).to_have_count(3)
        text = examples.nth(1).inner_text()
        examples.nth(1).click()
        expect(page.locator(".answer .text")).to_have_text("a")
        assert bodies[0]["messages"] == [{"role": "user", "content": text}]
        expect(page.locator("#start")).to_be_hidden()
        page.locator("#clear").click()
        expect(page.locator("#start")).to_be_visible()

    def test_drafters_to_choose_are_those_that_the_server_allows(self, page: Page) -> None:
        expect(page.locator("#facts div").first).to_be_visible()
        drafters = page.locator("#drafter option").evaluate_all("all => all.map((e) => e.value)")
        assert {"", "none", "suffix", "prompt_lookup"} <= set(drafters)
        for name in drafters[1:]:
            page.locator("#clear").click()
            page.evaluate("name => { choose('drafter', name); }", name)
            said(page, "hello", tokens=4)
            assert page.locator("#problem").inner_text() == "", name
        page.evaluate("() => { choose('drafter', 'suffix'); choose('length', '2'); }")
        said(page, "hello", tokens=4)
        assert page.locator("#problem").inner_text() == ""
        lengths = page.locator("#length option").evaluate_all("all => all.map((e) => e.value)")
        assert "throughput" in lengths and not {"acceptance", "constant"} & set(lengths)


class TestWithoutTemplate:
    def test_a_model_without_a_chat_template_continues_the_text(self, opened: Callable[..., Page]) -> None:
        page = opened("base")
        expect(page.locator("#facts")).to_contain_text("it continues your text")
        paths: list[tuple[str, Any]] = []
        page.on("request", lambda one: paths.append((one.url, one.post_data_json)) if one.method == "POST" else None)
        said(page, "the number 7 and 8 and 7", tokens=48)
        whole = page.locator(".answer .text").inner_text()
        page.locator("#clear").click()
        said(page, "the number 7 and 8 and 7", tokens=24)
        page.get_by_role("button", name="Continue answer 1").click()
        expect(page.locator(".figures")).to_contain_text("48 tokens")
        expect(page.locator("#send")).to_be_enabled()
        assert page.locator(".answer .text").inner_text() == whole != ""
        assert all(url.endswith("/v1/completions") for url, _ in paths) and page.locator("#problem").inner_text() == ""
        prompts = [body["prompt"] for _, body in paths]
        assert prompts[0] == prompts[1] == "the number 7 and 8 and 7" and prompts[2].startswith(prompts[1])
        said(page, "and more", tokens=4)
        assert paths[3][1]["prompt"].endswith("\nand more") and paths[3][1]["prompt"].startswith(prompts[2])

    def test_one_of_several_that_is_not_loaded_yet_too(self, opened: Callable[..., Page]) -> None:
        page = opened("a", "b")
        expect(page.locator("#facts")).to_contain_text("loaded with the first message")
        page.locator("#model").select_option("b")
        said(page, "hello")
        assert page.locator(".answer .text").inner_text() and page.locator("#problem").inner_text() == ""
        expect(page.locator(".answer h2")).to_have_text("with speculation · b")
        page.locator("#clear").click()
        expect(page.locator("#facts")).to_contain_text("it continues your text")


class TestText:
    def test_code_is_coloured_and_stays_the_same_text(self, page: Page) -> None:
        serve(page, answer("\n".join(f"```{language}\n{code}\n```" for language, (code, _, _) in LANGUAGES.items())))
        said(page, "go")
        for i, (code, coloured, called) in enumerate(LANGUAGES.values()):
            block = page.locator(".code code").nth(i)
            assert block.text_content() == code
            spans = block.locator("span").evaluate_all("all => all.map((e) => [e.className, e.textContent])")
            assert [text for kind, text in spans if kind != "called"] == coloured
            assert [text for kind, text in spans if kind == "called"] == called

    def test_no_code_takes_long_to_colour(self, page: Page) -> None:
        for piece in ("'", '"', "`", "/*", '"""', "a", "\\", "<a", "# '", "$("):
            took = page.evaluate(
                """piece => { const began = performance.now();
                for (const name of ["python", "js", "html", "sql"]) coloured(piece.repeat(29_000 / piece.length), name);
                return performance.now() - began; }""",
                piece,
            )
            assert took < 5_000, f"{piece}: time that grows with the square of the length takes minutes"

    def test_a_very_long_answer_arrives_whole(self, page: Page) -> None:
        text = "".join(f"Line {i} with `code` and **words**.\n\n" for i in range(4000))
        serve(page, answer(text, size=300))
        said(page, "go")
        expect(page.locator(".answer .text p")).to_have_count(4000)
        page.locator("#origins").check()
        assert page.locator(".answer .text").text_content() == text

    def test_text_from_right_to_left_has_its_direction(self, page: Page) -> None:
        serve(page, answer("שלום עולם\n\nhello\n\n- אחת\n\n```python\nx = 'שלום'\n```"))
        page.locator("#prompt").fill("مرحبا")
        assert page.locator("#prompt").evaluate("e => e.matches(':dir(rtl)')")
        page.locator("#prompt").fill("")
        said(page, "مرحبا بالعالم")
        for selector in (".words", ".text > p:first-child", ".text ul", ".text li"):
            assert page.locator(selector).evaluate("e => getComputedStyle(e).direction") == "rtl", selector
        for selector in (".text > p:nth-child(2)", ".code pre"):
            assert page.locator(selector).evaluate("e => getComputedStyle(e).direction") == "ltr", selector

    def test_the_field_grows_with_its_text(self, page: Page) -> None:
        serve(page, answer("a"))
        prompt = page.locator("#prompt")
        height = "e => e.getBoundingClientRect().height"
        one = prompt.evaluate(height)
        prompt.press_sequentially("a")
        for _ in range(4):
            prompt.press("Shift+Enter")
            prompt.press_sequentially("b")
        assert prompt.input_value() == "a\nb\nb\nb\nb" and prompt.evaluate(height) > one + 60
        assert prompt.evaluate("e => e.scrollHeight <= e.clientHeight"), "all of it is seen"
        prompt.fill("line\n" * 100)
        assert prompt.evaluate(height) <= 0.41 * 700
        prompt.press("Enter")
        expect(page.locator(".answer .text")).to_have_text("a")
        assert prompt.evaluate(height) == one
