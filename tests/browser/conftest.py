"""A server of a tiny model, and a page in a Chromium without a window; FORESAY_CHROMIUM names another one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

import foresay
from helpers import tiny
from helpers.browsing import FLAGS
from helpers.serving import Running


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> foresay.Generator:
    return foresay.load(tiny.save(tmp_path_factory.mktemp("tiny"), chat=True), drafter="suffix", length=4)


@pytest.fixture(scope="session")
def server(generator: foresay.Generator) -> Iterator[Running]:
    running = Running(generator)
    yield running
    running.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = os.environ.get("FORESAY_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "no Chromium was found: install one, or name it in FORESAY_CHROMIUM"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Page]:
    """A page of an empty profile; afterwards, no error of a script, and nothing requested of another server."""
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda one: errors.append(one.text) if "Content Security Policy" in one.text else None)
    opened.on("request", lambda one: errors.append(one.url) if not one.url.startswith(server.url) else None)
    opened.goto(server.url)
    yield opened
    context.close()
    assert not errors, errors
