"""Requests made up from the server's own OpenAPI schema, and mutated ones: none of them is a server's error."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

import foresay
from helpers import fuzz_requests, tiny
from helpers.serving import Running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A context of 96 tokens, so that requests end soon."""
    folder = tiny.save(tmp_path_factory.mktemp("fuzzed"), tiny.llama(context=96), chat=True)
    with Running(foresay.load(str(folder), num_draft_tokens=3), max_body_bytes=100_000) as one:
        yield one


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_the_servers_error(running: Running, mode: GenerationMode) -> None:
    seen: dict[str, set[int]] = {}
    for found in schemathesis.openapi.from_url(f"{running.url}/openapi.json").get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=3, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            answer = case.call(timeout=60)
            seen.setdefault(case.operation.path, set()).add(answer.status_code)
            assert answer.status_code < 500 or answer.json() == {"status": "not ready"}, (case.body, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                if case.operation.path.startswith("/api/"):
                    assert isinstance(error, str) and error
                else:
                    assert error["message"] and error["type"] and {"param", "code"} <= error.keys()

        try:
            check()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, "nothing of it can be wrong"
    assert 400 in seen["/v1/completions"] and 400 in seen["/v1/chat/completions"]
    texts = ("/tokenize", "/detokenize", "/predict", "/v1/completions")
    assert any(200 in seen[path] for path in texts) or mode is GenerationMode.NEGATIVE
    assert running.complete(max_tokens=3).status_code == 200 and running.count("num_requests_running") == 0


def test_mutated_bodies(caplog: pytest.LogCaptureFixture) -> None:
    """By the application in this process, one after the other; `scripts/fuzz` runs more of them."""
    statuses = Counter[int]()
    with caplog.at_level(logging.WARNING):
        for number, case in enumerate(fuzz_requests.cases(seed=27, count=200)):
            status, wrong = fuzz_requests.answered(case)
            statuses[status] += 1
            assert wrong is None, (number, case.path, wrong, case.body[:500])
    assert not [one for one in caplog.records if one.exc_info], "a traceback is logged"
    assert statuses[200] > 30 and statuses[400] > 75 and statuses[415] > 0, statuses


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, "application/json", b"{}"), (400, "text/plain", b"no"), (400, "application/json", b'{"detail": "x"}'),
        (400, "application/json", b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'),
        (400, "application/json", b'{"error": ""}'),
        (200, "text/event-stream", b'data: {"error":{"message":"m","type":"t","param":null,"code":"internal"}}'),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_seen(status: int, kind: str, body: bytes) -> None:
    assert fuzz_requests.violation(status, kind, body) and fuzz_requests.violation(status, kind, body, "/api/chat")
    assert list(fuzz_requests.cases(3, 20)) == list(fuzz_requests.cases(3, 20)) != list(fuzz_requests.cases(4, 20))
