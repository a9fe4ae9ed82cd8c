"""A server on a thread, for tests of the API."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from functools import cached_property
from typing import Any

import httpx
import openai

import foresay
from foresay.server.app import make_app
from foresay.server.running import _Server, configuration
from foresay.server.served import Served
from foresay.server.service import Service
from foresay.server.settings import ServerSettings

TEXT = "the number 7 and 8 and 7 and 8 and"
CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
"""A client whose every request has a connection of its own. Making a client takes ten times as long as a request."""
TALK: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


class Running:
    """A server on a thread of its own."""

    def __init__(
        self, generator: foresay.Generator | Service, *, send_buffer: int | None = None, **settings: Any
    ) -> None:
        """generator: a model, or a service with settings of its own. send_buffer: bytes that may be on their way to a reader."""
        if isinstance(generator, Service):
            self.service = generator
        else:
            self.service = Service.of(generator, ServerSettings(**settings), ["tiny", "other-name"])
        held = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = configuration(make_app(self.service), self.service.settings)
        self._server = _Server(config, self.service)
        self._thread = threading.Thread(target=self._run, args=([held],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def _run(self, sockets: list[socket.socket]) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets)

        asyncio.run(serve())

    @property
    def model(self) -> Served:
        """The model that was loaded first."""
        return self.service.loaded[0]

    def count(self, name: str) -> float:
        """Its metrics; 0 for those it does not name."""
        lines = self.get("/metrics").text.splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"foresay_{name} ")), 0.0)

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._server.server_state.connections)

    def drain(self) -> None:
        """Let what is under way end."""
        asyncio.run_coroutine_threadsafe(self.service.drain(), self._loop).result(30)

    def close(self) -> None:
        """End it; twice is as once."""
        self.end()
        self._thread.join(20)

    def end(self) -> None:
        """Let it begin to end."""
        self._server.should_exit = True

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return CLIENT.request(method, self.url + path, **more)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """The answer to GET. Keywords are headers."""
        return self.request("GET", path, headers=headers)

    def post(self, path: str, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """The answer to a JSON body."""
        return self.request("POST", path, json=body, headers=headers)

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of a successful answer."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def chat(self, **body: Any) -> httpx.Response:
        """The answer to a chat."""
        return self.post("/v1/chat/completions", **{"messages": TALK[1:], **body})

    def complete(self, prompt: Any = TEXT, **body: Any) -> httpx.Response:
        """The answer to a completion, which is greedy."""
        return self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **body})

    @cached_property
    def client(self) -> openai.OpenAI:
        """OpenAI's client of it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=CLIENT)


def sent(
    port: int,
    body: dict[str, Any],
    path: str = "/v1/completions",
    *,
    http: str = "1.1",
    buffer: int | None = None,
    **headers: Any,
) -> socket.socket:
    """A connection on which a request has been sent. buffer: bytes that it receives before they are read."""
    text, held = json.dumps(body).encode(), socket.socket()
    if buffer is not None:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    held.settimeout(60)
    held.connect(("127.0.0.1", port))
    named = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(text), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    held.sendall(f"POST {path} HTTP/{http}\r\n{head}\r\n".encode() + text)
    return held


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream without names, up to its end."""
    lines = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    assert lines.pop() == "[DONE]", answer.text
    return [json.loads(line) for line in lines]


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    """The first choice of an answer."""
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def assert_refused(answer: httpx.Response, param: str, *words: str, status: int = 400) -> None:
    """The answer is an error that names a parameter."""
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert all(one in error["message"] for one in words), answer.text


def named_events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream whose every event has a name, which its data repeats."""
    out: list[dict[str, Any]] = []
    name = None
    with CLIENT.stream("POST", url, json={"stream": True, **body}) as answer:
        for line in answer.iter_lines():
            kind, _, rest = line.partition(": ")
            if kind == "event":
                name = rest
            elif kind == "data":
                out.append(json.loads(rest))
                assert out[-1]["type"] == name
    return out
