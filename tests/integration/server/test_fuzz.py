"""Requests made up from the server's own OpenAPI schema, such as fit it and such as do not: none of them is a server's error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

import foresay
from helpers import tiny
from helpers.serving import TEXT, Running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A context of 96 tokens, so that what is asked for is answered soon."""
    folder = tiny.save(tmp_path_factory.mktemp("fuzzed"), tiny.llama(context=96), chat=True)
    one = Running(foresay.load(str(folder), num_draft_tokens=3), max_body_bytes=100_000)
    yield one
    one.close()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_the_servers_error(running: Running, mode: GenerationMode) -> None:
    seen: dict[str, set[int]] = {}
    for found in schemathesis.openapi.from_url(f"{running.url}/openapi.json").get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=40, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            answer = case.call(timeout=60)
            seen.setdefault(case.operation.path, set()).add(answer.status_code)
            assert answer.status_code < 500 or answer.json() == {"status": "not ready"}, (case.body, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"] and error["type"] and {"param", "code"} <= error.keys()

        try:
            check()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, "nothing of it can be wrong"
    assert 400 in seen["/v1/completions"] and 400 in seen["/v1/chat/completions"]
    assert 200 in seen["/tokenize"] or mode is GenerationMode.NEGATIVE


def test_after_all_of_them_it_answers(running: Running) -> None:
    done = httpx.post(f"{running.url}/v1/completions", json={"prompt": TEXT, "max_tokens": 3}, timeout=60)
    assert done.status_code == 200 and running.count("num_requests_running") == 0
