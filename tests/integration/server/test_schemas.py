"""Schemas that would occupy the server: they are refused, no other request waits for them, and the process can end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import foresay
from foresay.text import schema_compiler
from foresay.text.schema_compiler import TrialLimits
from helpers.schema_bombs import PRODUCT
from helpers.serving import TALK, Running, sent
from helpers.waiting import wait_until

SMALL = '{"type":"integer","multipleOf":9999991}'
GOOD = {"enum": ["yes", "no"]}


@pytest.fixture
def running(chat_folder: Path) -> Iterator[Running]:
    with Running(foresay.load(str(chat_folder))) as one:
        yield one


def compiling(process: psutil.Process) -> bool:
    """Whether a process that tries schemas has a fork at work."""
    with suppress(psutil.NoSuchProcess):
        return any("foresay.text.grammar_process" in one.cmdline() and one.children() for one in process.children())
    return False


def wanted(schema: Any) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": TALK, "max_tokens": 20, "response_format": named}


def ask(url: str, schema: Any) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=wanted(schema), timeout=100)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format" and error["type"] == "invalid_request_error"
    return str(error["message"])


def test_schemas_that_take_too_much_are_refused_and_others_answered(running: Running) -> None:
    url, us = f"{running.url}/v1", psutil.Process()
    before = us.memory_info().rss
    assert "multipleOf=9999991" in refusal(ask(url, json.loads(SMALL)))
    with ThreadPoolExecutor(4) as threads:
        bad = [threads.submit(ask, url, PRODUCT) for _ in range(3)]
        good = [threads.submit(ask, url, GOOD) for _ in range(3)]
        assert {one.result().status_code for one in good} == {200}
        assert all("to compile; give a simpler one" in refusal(one.result()) for one in bad)
    assert ask(url, GOOD).json()["choices"][0]["message"]["content"] in ('"yes"', '"no"')
    assert us.memory_info().rss - before < 500 << 20


def test_an_open_request_starts_no_process_once_the_server_ends(chat_folder: Path) -> None:
    before = psutil.Process().children()
    with Running(foresay.load(str(chat_folder))) as one:
        one.model.stop_compiling()
        assert ask(f"{one.url}/v1", GOOD).status_code == 503
        assert psutil.Process().children() == before


def test_a_client_that_leaves_and_a_server_that_ends_take_their_schemas_along(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        schema_compiler, "TrialLimits", lambda: TrialLimits(cpu_s=1e6, wall_s=1e6, memory_bytes=8 << 30)
    )
    us, url = psutil.Process(), f"{running.url}/v1"
    with sent(running.port, wanted(PRODUCT), "/v1/chat/completions"):
        wait_until(lambda: compiling(us), "a schema is compiled")
    wait_until(lambda: not compiling(us), "the compilation is ended")
    assert ask(url, GOOD).status_code == 200
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, url, PRODUCT)
        wait_until(lambda: compiling(us), "a schema is compiled")
        running.drain()
        assert answer.result().status_code == 503
    wait_until(lambda: not compiling(us), "the compilation is ended")
