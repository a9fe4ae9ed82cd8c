"""Request bodies as a format of `scripts/fuzz`: each case is a file, and reading it is answering it by the application.

`fuzz_requests` has the cases, and finds what is wrong with an answer.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx

import foresay
from foresay.errors import PromptError
from foresay.server.app import make_app
from foresay.server.service import Service
from foresay.server.settings import ServerSettings
from helpers import fuzz_requests, tiny


def cases(seed: int, count: int, folder: Path) -> Iterator[Path]:
    """`count` requests, a JSON file each: path, content type, body in base64."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(fuzz_requests.cases(seed, count)):
        path = folder / f"{number}.json"
        body = base64.b64encode(case.body).decode()
        path.write_text(json.dumps({"path": case.path, "type": case.content_type, "body": body}), encoding="utf-8")
        yield path


@cache
def _client() -> tuple[asyncio.Runner, httpx.AsyncClient]:
    """The application over a tiny model, and a client of it, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        model = foresay.load(str(tiny.save(Path(folder), tiny.llama(context=96), chat=True)), num_draft_tokens=3)
    app: Any = make_app(Service.of(model, ServerSettings(max_body_bytes=1 << 20), ["tiny"]))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    return asyncio.Runner(), client


def check(path: Path) -> None:
    """Answer a request. Raises PromptError for one that is refused, as it should be, and AssertionError for a bad answer."""
    case = json.loads(path.read_text(encoding="utf-8"))
    runner, client = _client()
    headers = {"content-type": case["type"]}
    answer = runner.run(client.post(case["path"], content=base64.b64decode(case["body"]), headers=headers, timeout=60))
    wrong = fuzz_requests.violation(
        answer.status_code, answer.headers.get("content-type", ""), answer.content, case["path"]
    )
    assert wrong is None, wrong
    if answer.status_code >= 400:
        raise PromptError(f"answered {answer.status_code}")
