"""The documentation's search works in pages that are opened as files, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from helpers.site import built


def test_a_page_opened_as_a_file_searches(browser: Any, tmp_path: Path) -> None:
    built(tmp_path / "site")
    page = browser.new_context().new_page()
    elsewhere: list[str] = []
    page.on("request", lambda one: None if one.url.startswith(("file:", "data:")) else elsewhere.append(one.url))
    page.goto((tmp_path / "site" / "how-to" / "gpu.html").as_uri())
    page.locator(".md-search__input").first.click()
    page.keyboard.type("calibration")
    expect(page.locator(".md-search-result__item", has_text="Train a draft head").first).to_be_visible()
    page.context.close()
    assert elsewhere == []
