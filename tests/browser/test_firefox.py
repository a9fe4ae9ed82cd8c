"""The page in the distribution's Firefox: start, race, list, settings and keyboard, at two widths and in both themes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browsing import TEXT
from helpers.firefox import Firefox
from helpers.page_measures import illegible
from helpers.serving import Running

IDLE = "!document.getElementById('send').disabled"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    with Firefox(tmp_path_factory.mktemp("firefox")) as firefox:
        yield firefox


@pytest.fixture
def firefox(started: Firefox, server: Running) -> Firefox:
    """The page without conversations, with a short limit, and errors of scripts collected."""
    started.goto(server.url)
    started.evaluate("localStorage.clear()")
    started.goto(server.url)
    started.evaluate("window.errors = [], addEventListener('error', (event) => errors.push(event.message))")
    started.evaluate("document.getElementById('max_tokens').value = 24")
    started.expect("document.querySelectorAll('#facts div').length > 3")
    return started


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_start_race_and_settings(width: int, scheme: str, firefox: Firefox) -> None:
    firefox.look(width, 844, scheme)
    assert illegible(firefox.evaluate) == {}
    firefox.click("#compare")
    firefox.click("#prompt")
    firefox.press(TEXT, "Enter")
    firefox.expect(f"document.querySelectorAll('.answer').length === 2 && {IDLE}")
    texts = firefox.evaluate("[...document.querySelectorAll('.answer .text')].map((e) => e.textContent)")
    assert texts[0] == texts[1] != "" and "same" in firefox.evaluate("document.querySelector('.outcome').textContent")
    assert illegible(firefox.evaluate) == {}
    firefox.click("[popovertarget=settings]:not([popovertargetaction])")
    firefox.expect("document.getElementById('settings').matches(':popover-open')")
    assert illegible(firefox.evaluate) == {}
    assert firefox.evaluate("document.getElementById('settings').getBoundingClientRect().bottom <= innerHeight + 0.5")
    firefox.press("Escape")
    firefox.expect("!document.getElementById('settings').matches(':popover-open')")
    if width == 390:
        firefox.click("#open")
        firefox.expect("document.getElementById('chats').matches(':popover-open')")
        assert illegible(firefox.evaluate) == {}
    assert firefox.evaluate("errors") == []


def test_the_keyboard_alone_talks_continues_and_opens_the_settings(firefox: Firefox) -> None:
    firefox.look(1280, 844, "light")
    firefox.expect("document.activeElement.id === 'prompt'")
    firefox.press("one", "Enter")
    firefox.expect(f"document.querySelectorAll('.answer').length === 1 && {IDLE}")
    assert firefox.evaluate("document.activeElement.id") == "prompt"
    name = "document.activeElement.ariaLabel || document.activeElement.textContent.trim()"

    def tab_to(wanted: str) -> None:
        # backwards: after the last control the focus leaves the page for the browser's own
        for _ in range(40):
            if firefox.evaluate(name) == wanted:
                return
            firefox.press("Shift+Tab")
        raise AssertionError(f"{wanted} is not reached")

    tab_to("Continue answer 1")
    firefox.press("Enter")
    firefox.expect(f"document.querySelector('.figures').textContent.includes('48 tokens') && {IDLE}")
    tab_to("Settings")
    firefox.press("Enter")
    firefox.expect("document.getElementById('settings').matches(':popover-open')")
    firefox.press("Tab")
    assert firefox.evaluate("document.activeElement.closest('#settings') !== null"), "the keyboard goes on there"
    firefox.press("Escape")
    firefox.expect("!document.getElementById('settings').matches(':popover-open')")
    assert firefox.evaluate("errors") == []


def test_the_list_keeps_and_opens_conversations(firefox: Firefox, server: Running) -> None:
    firefox.look(1280, 844, "dark")
    for text in ("first", "second"):
        firefox.click("#clear")
        firefox.press(text, "Enter")
        firefox.expect(f"document.querySelectorAll('.answer').length === 1 && {IDLE}")
    firefox.goto(server.url)
    firefox.expect("document.querySelectorAll('#list li').length === 2")
    assert firefox.evaluate("document.querySelector('.words').textContent") == "second"
    firefox.click("#list button[dir]")
    firefox.expect("document.querySelector('.words').textContent === 'first'")


def test_the_field_grows_with_its_text(firefox: Firefox) -> None:
    firefox.look(390, 844, "light")
    firefox.click("#prompt")
    height = firefox.evaluate("document.getElementById('prompt').offsetHeight")
    firefox.press("a fairly long text that needs several lines on a small screen of a phone, and then some more words")
    firefox.expect(f"document.getElementById('prompt').offsetHeight > {height} + 30")


def test_its_screenshot_has_the_size_of_the_page(firefox: Firefox, tmp_path: Path) -> None:
    firefox.look(390, 844, "light")
    firefox.save(tmp_path / "page.png")
    head = (tmp_path / "page.png").read_bytes()
    assert int.from_bytes(head[16:20], "big") == 390
