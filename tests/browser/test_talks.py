"""The list of conversations: opened, searched, renamed, exported and deleted; kept in the browser alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from helpers.browsing import answer, begin, event, said, serve, settings


@pytest.fixture
def wide(page: Page) -> Page:
    """Three conversations on a page that has room for the list."""
    page.set_viewport_size({"width": 1280, "height": 800})
    serve(page, answer("red wine"), answer("blue sea"), answer("green tea"))
    for text in ("first question", "second question", "third question"):
        page.locator("#clear").click()
        said(page, text)
    return page


def titles(page: Page) -> list[str]:
    """Titles of the list, that of the open conversation too."""
    return list(page.locator("#list li > :first-child").evaluate_all("all => all.map((e) => e.value || e.textContent)"))


def test_the_latest_comes_first_and_each_one_opens(wide: Page) -> None:
    assert titles(wide) == ["third question", "second question", "first question"]
    wide.get_by_role("button", name="first question").click()
    assert (
        wide.locator(".words").all_inner_texts() == ["first question"]
        and "red wine" in wide.locator(".text").inner_text()
    )
    assert (
        titles(wide)[2] == "first question" and wide.locator("[aria-current] input").input_value() == "first question"
    )
    said(wide, "and more")
    wide.get_by_role("button", name="second question").click()
    assert titles(wide) == ["first question", "third question", "second question"]
    wide.reload()
    expect(wide.locator(".words")).to_have_text("second question")
    wide.get_by_role("button", name="first question").click()
    expect(wide.locator(".words")).to_have_text(["first question", "and more"])


def test_a_search_finds_titles_messages_and_answers(wide: Page) -> None:
    for wanted, found in (("SECOND", ["second question"]), ("sea", ["second question"]), ("question", titles(wide))):
        wide.locator("#search").fill(wanted)
        assert titles(wide) == found
    wide.locator("#search").fill("nowhere")
    expect(wide.locator("#nothing")).to_have_text("No conversation contains this.")
    wide.locator("#search").fill("")
    assert len(titles(wide)) == 3 and wide.locator("#nothing").inner_text() == ""


def test_a_title_is_changed_and_kept(wide: Page) -> None:
    title = wide.get_by_label("Title of this conversation")
    title.fill("All about tea")
    title.press("Enter")
    expect(title).to_be_focused()
    wide.get_by_role("button", name="first question").click()
    assert titles(wide)[0] == "All about tea"
    wide.reload()
    assert titles(wide)[0] == "All about tea"
    wide.get_by_role("button", name="All about tea").click()
    title.fill("")
    title.press("Enter")
    wide.reload()
    assert titles(wide)[0] == "third question", "without a title, it is the first message"


def exported(page: Page, kind: str) -> tuple[str, str]:
    """Name and text of an exported file."""
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Export as {kind}").click()
    return download.value.suggested_filename, Path(download.value.path()).read_text(encoding="utf-8")


def test_it_is_exported_as_markdown_and_json(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    serve(page, answer("```text\nx\n```"), answer("```text\nx\n```"))
    settings(page, system="be brief")
    page.locator("#compare").check()
    said(page, "what/is: it?")
    name, text = exported(page, "Markdown")
    assert name == "what-is-it.md"
    parts = [one.split("\n\n")[0] for one in text.split("## ")]
    assert parts == ["# what/is: it?", "System prompt", "Message", "Answer with speculation", "Answer plain"]
    assert text.count("```text\nx\n```") == 2 and "1.00 tokens per pass" in text
    name, text = exported(page, "JSON")
    [turn] = json.loads(text)["turns"]
    assert name == "what-is-it.json" and turn["text"] == "what/is: it?" and len(turn["answers"]) == 2


def test_it_is_deleted_after_a_question(wide: Page) -> None:
    wide.once("dialog", lambda dialog: dialog.dismiss())
    wide.get_by_role("button", name="Delete").click()
    assert len(titles(wide)) == 3
    wide.once("dialog", lambda dialog: dialog.accept())
    wide.get_by_role("button", name="Delete").click()
    assert titles(wide) == ["second question", "first question"] and wide.locator(".turn").count() == 0
    expect(wide.locator("#start")).to_be_visible()
    wide.reload()
    assert titles(wide) == ["second question", "first question"]


def test_another_conversation_ends_a_running_answer_and_keeps_what_was_written(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    said(page, "one")
    page.locator("#clear").click()
    begin(page)
    expect(page.locator(".answer .text")).to_have_text(re.compile(".{100}"), timeout=30_000)
    page.locator("#list").get_by_role("button", name="one").click()
    expect(page.locator("#send")).to_be_enabled()
    assert page.locator(".words").all_inner_texts() == ["one"]
    page.get_by_role("button", name="go on").click()
    assert page.locator(".words").all_inner_texts() == ["go on"]
    assert len(page.locator(".answer .text").inner_text()) > 100
    page.wait_for_timeout(300)
    assert titles(page) == ["go on", "one"]


def test_a_running_answer_is_in_the_list_from_its_first_token_and_a_deleted_one_is_not(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    begin(page)
    expect(page.get_by_label("Title of this conversation")).to_have_value("go on")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#send")).to_be_enabled()
    page.wait_for_timeout(300)
    assert titles(page) == [] and page.evaluate("Object.keys(localStorage)") == ["foresay.settings"]


def test_on_a_phone_the_list_opens_over_the_conversation_and_closes_again(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    serve(page, answer("a"))
    said(page, "one")
    expect(page.locator("#chats")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator("#start")).to_be_visible()
    page.get_by_role("button", name="Chats").click()
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    page.locator("#list").get_by_role("button", name="one").click()
    expect(page.locator(".words")).to_have_text("one")
    expect(page.locator("#chats")).to_be_hidden()


def test_escape_closes_the_settings_before_it_stops_an_answer(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: None)
    page.locator("#prompt").fill("go")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_enabled()
    settings(page, seed="3")
    expect(page.locator("#stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()


def test_a_title_is_text(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    serve(page, event({"content": "x"}))
    said(page, "<img src=x onerror=alert(1)>")
    page.locator("#clear").click()
    assert titles(page) == ["<img src=x onerror=alert(1)>"] and page.locator("#list img").count() == 0
