"""Schemas that would occupy the server: they are refused, no other request waits for them, and the process can end."""

from __future__ import annotations

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
from helpers.serving import TALK, Running, assert_refused, choice_of, sent
from helpers.waiting import wait_until

GOOD = {"enum": ["yes", "no"]}


@pytest.fixture
def running(chat_folder: Path) -> Iterator[Running]:
    with Running(foresay.load(str(chat_folder))) as one:
        yield one


def is_compiling() -> bool:
    """Whether a process that tries schemas has a fork at work."""
    with suppress(psutil.NoSuchProcess):
        tried = [one for one in psutil.Process().children() if "foresay.text.grammar_process" in one.cmdline()]
        return any(one.children() for one in tried)
    return False


def wanted(schema: Any) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": TALK, "max_tokens": 20, "response_format": named}


def ask(running: Running, schema: Any) -> httpx.Response:
    return running.chat(**wanted(schema))


def test_schemas_that_take_too_much_are_refused_and_others_answered(running: Running) -> None:
    us = psutil.Process()
    before = us.memory_info().rss
    assert_refused(ask(running, {"type": "integer", "multipleOf": 9999991}), "response_format", "multipleOf=9999991")
    with ThreadPoolExecutor(4) as threads:
        bad = [threads.submit(ask, running, PRODUCT) for _ in range(2)]
        good = [threads.submit(ask, running, GOOD) for _ in range(3)]
        assert {one.result().status_code for one in good} == {200}
        for one in bad:
            assert_refused(one.result(), "response_format", "to compile; give a simpler one")
    assert choice_of(ask(running, GOOD))["message"]["content"] in ('"yes"', '"no"')
    assert us.memory_info().rss - before < 500 << 20


def test_an_open_request_starts_no_process_once_the_server_ends(running: Running) -> None:
    before = psutil.Process().children()
    running.model.stop_compiling()
    assert ask(running, GOOD).status_code == 503 and psutil.Process().children() == before


def test_a_client_that_leaves_and_a_server_that_ends_take_their_schemas_along(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = TrialLimits(cpu_s=1e6, wall_s=1e6, memory_bytes=8 << 30)
    monkeypatch.setattr(schema_compiler, "TrialLimits", lambda: endless)
    with sent(running.port, wanted(PRODUCT), "/v1/chat/completions"):
        wait_until(is_compiling, "a schema is compiled")
    wait_until(lambda: not is_compiling(), "the compilation is ended")
    assert ask(running, GOOD).status_code == 200
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, running, PRODUCT)
        wait_until(is_compiling, "a schema is compiled")
        running.drain()
        assert answer.result().status_code == 503
    wait_until(lambda: not is_compiling(), "the compilation is ended")
