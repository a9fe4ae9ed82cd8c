"""Clients that send slowly, send too much, or open many connections; and where a server listens, from its start to its end."""

from __future__ import annotations

import json
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import transformers

import foresay
from foresay.server import app as app_module
from foresay.server import running
from foresay.server.running import SPARE_FILES, bind, configuration
from foresay.server.service import Service, served_name
from foresay.server.settings import ServerSettings
from helpers import tiny
from helpers.forks import fork
from helpers.refusals import refused
from helpers.schema_bombs import PRODUCT
from helpers.serving import CLIENT, TALK, TEXT, Running, sent
from helpers.waiting import wait_until

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=30)


def until_closed(held: socket.socket) -> bytes:
    return b"".join(iter(lambda: held.recv(1 << 16), b""))


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, "the server's state", 30)


BEGINNING = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = BEGINNING + b"X: " + b"y" * 70_000 + b"\r\nContent-Length: "
CHUNKED = BEGINNING + b"Transfer-Encoding: chunked\r\n\r\n"
HALF = BEGINNING + b"Content-Length: 99\r\n\r\n{"
CASES: dict[str, tuple[bytes, int, str]] = {
    "no end of a line": (b"GET", 408, "timeout"),
    "no end": (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", 408, "timeout"),
    "no end of a body": (HALF.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 408, "timeout"),
    "nothing": (b"", 0, ""),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "invalid_http"),
    "too large": (LONG + b"0\r\n\r\n", 431, "head_too_large"),
    "too large, with a body": (LONG + b"2\r\n\r\n{}", 431, "head_too_large"),
    "a load balancer": (b"GET /health HTTP/1.0\r\nConnection: close\r\n\r\n", 200, ""),
    "a load balancer at /ready": (b"GET /ready HTTP/1.0\r\nConnection: close\r\n\r\n", 200, ""),
    "a chunk without a size": (CHUNKED + b"zz\r\n", 400, "invalid_http"),
    "a chunk that is longer than its size": (CHUNKED + b"2\r\n{}}}\r\n", 400, "invalid_http"),
    "an upgrade": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n", 200, ""),
    "a web socket": (b"GET /health HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200, ""),
    "another host": (b"GET /health HTTP/1.0\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 421, "unknown_host"),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 421, "unknown_host"),
}  # fmt: skip
"""Case -> bytes sent, status (0: closed without a response), code of the error."""


class TestTheHeadOfARequest:
    def test_what_is_answered(
        self, serve: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """HTTP/1.0 has no Host; pages of browsers always send one. The log gets nothing that needs no key."""
        running, hasty = serve(), serve(head_s=0.3, body_s=0.3)
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        for name, (given, status, code) in CASES.items():
            with connected(hasty if status in (0, 408) else running) as held:
                held.sendall(given)
                answer = until_closed(held)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert answer.count(b"HTTP/1.1") == (status > 0) and (not status or int(head.split()[1]) == status), name
            error = json.loads(body)["error"] if code else {"code": ""}
            assert error["code"] == code and (code != "timeout" or "0.3 s" in error["message"]), name
        assert not caplog.records

    def test_bytes_that_trickle_in_do_not_extend_the_time(self, serve: Any) -> None:
        with connected(serve(head_s=0.3)) as held:
            held.sendall(REQUEST[:5])
            held.settimeout(0.05)
            closed, until = False, time.monotonic() + 30
            while not closed:
                assert time.monotonic() < until, "each byte gave it more time"
                try:
                    held.sendall(b"x")
                    closed = b" 408 " in held.recv(4096)
                except TimeoutError:
                    continue
                except OSError:  # closed while this side was sending
                    closed = True

    def test_each_request_of_a_connection_has_as_much_time_and_its_answer_more(self, serve: Any) -> None:
        running = serve(head_s=0.3)
        with connected(running) as held:
            held.sendall(REQUEST)
            assert b" 200 " in held.recv(4096)
            held.sendall(REQUEST[:10])
            assert b" 408 " in until_closed(held)
        running.service.shared.thread.call(lambda: time.sleep(0.5))
        done = running.complete(max_tokens=2)
        assert done.status_code == 200 and done.elapsed.total_seconds() > 0.3

    def test_one_that_grows_without_end_is_refused(self, server: Running) -> None:
        for line in (b"X: " + b"y" * 1000 + b"\r\n", b"y" * 1000):
            with connected(server) as held, suppress(OSError):  # closed while this side was sending
                held.sendall(b"GET /health HTTP/1.1\r\nX: ")
                for _ in range(400):
                    held.sendall(line)
                answer = until_closed(held)
                assert answer == b"" or b" 431 " in answer.split(b"\r\n")[0]


class TestManyConnections:
    @pytest.mark.parametrize("half", [REQUEST[:20], HALF], ids=["heads", "bodies"])
    def test_half_sent_requests_do_not_keep_others_out(self, half: bytes, serve: Any) -> None:
        running = serve(max_connections=10, head_s=600, body_s=600)
        with ExitStack() as stack:
            for i in range(30):
                held = stack.enter_context(connected(running))
                held.sendall(half if half is HALF else half[: 5 + i % 15])
            assert running.get("/health").status_code == 200 and running.connections <= 11

    def test_a_request_under_way_keeps_its_connection(self, serve: Any) -> None:
        running = serve(max_connections=2)
        with unread_stream(running.port) as one, unread_stream(running.port) as other:
            with connected(running) as late:
                answer = until_closed(late)
            assert b" 503 " in answer.split(b"\r\n")[0] and b"retry-after: 5" in answer
            assert one.recv(10) and other.recv(10), "they go on"

    def test_as_many_as_the_process_may_open_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
        for settings, most in (({}, 256 - SPARE_FILES), ({"max_connections": 7}, 7)):
            bounds: Any = configuration(lambda *_: None, ServerSettings(**settings)).http  # type: ignore[arg-type, return-value]
            assert bounds.max_connections == most


class TestTheEventLoop:
    @pytest.mark.parametrize(
        ("owner", "name", "path", "body", "status"),
        [
            (app_module, "read", "/v1/chat/completions", {"messages": [0] * 100_000}, 400),
            (transformers.PreTrainedTokenizerBase, "decode", "/detokenize", {"tokens": [72] * 10}, 200),
        ],
        ids=["a large body is read", "tokens become text"],
    )
    def test_others_are_answered_meanwhile(
        self, owner: Any, name: str, path: str, body: Any, status: int, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on, honest = threading.Event(), threading.Event(), getattr(owner, name)

        def slowly(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return honest(*args, **kwargs)

        monkeypatch.setattr(owner, name, slowly)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(server.post, path, **body)
            assert begun.wait(30)
            assert server.get("/health").status_code == 200
            go_on.set()
            assert answer.result().status_code == status

    def test_a_client_that_leaves_in_its_body_is_no_failure(
        self, server: Running, caplog: pytest.LogCaptureFixture
    ) -> None:
        with connected(server) as held:
            held.sendall(HALF)
            wait_for(lambda: server.connections == 1)
        wait_for(lambda: server.connections == 0)
        assert server.get("/health").status_code == 200
        assert not [one for one in caplog.records if one.exc_info]


class TestWhereItListens:
    def test_addresses_that_cannot_be_listened_at(self, model: foresay.Generator, shell: tiny.Shell) -> None:
        """A port in use, before and after the model is loaded, and names that are not known or not this machine's."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            said = shell.refused("serve", "--model", "no-such-model", "--port", str(port))
            assert f"--port {port}" in said and "in use" in said
        for host in ("no.such.host.invalid", "192.0.2.1"):
            with refused("host", host):
                bind(ServerSettings(host=host, open_to_all=True))
        (ours,) = bind(ServerSettings(port=0))
        settings = ServerSettings(port=ours.getsockname()[1])
        (other,) = bind(settings)
        with ours, other:
            with pytest.raises(ConnectionRefusedError):  # bound, and not listened at
                socket.create_connection(ours.getsockname(), timeout=5)
            other.listen()
            with refused("port", settings.port):
                running.serve(Service.of(model, settings, ["x"]), [ours])

    def test_a_model_is_named_without_its_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own-model").mkdir()
        (tmp_path / "own.gguf").touch()
        monkeypatch.chdir(tmp_path / "own-model")
        for name, shown in (
            (str(tmp_path / "own-model"), "own-model"), (f"{tmp_path}/own-model/", "own-model"), (".", "own-model"),
            ("../own.gguf", "own"), ("org/name", "org/name"), ("smollm2-135m", "smollm2-135m"), ("/", "model"),
        ):  # fmt: skip
            assert served_name(name) == shown

    def test_the_command_from_its_start_to_its_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Settings of a file and of the environment. No path of the model is shown.

        After a signal it is not ready, and listens until what is under way has ended; schemas that are compiled end at once.
        """
        folder = tiny.save(tmp_path / "own-model", chat=True)
        (tmp_path / "foresay.toml").write_text(f'target = "{folder}"\ndrafter = "max_gram"\nlength = 3\n')
        variables = {"FORESAY_SERVE_PORT": "0", "FORESAY_API_KEYS": "secret"}
        monkeypatch.chdir(tmp_path)
        process = fork(["foresay", "serve", "--warmup", "--log-requests"], tmp_path / "out", **variables)
        child, errors = psutil.Process(process.pid), tmp_path / "out.err"
        wait_for(lambda: errors.exists() and "\n" in errors.read_text().partition("listening at ")[2])
        said, _, rest = errors.read_text().partition("listening at ")
        url = rest.split()[0]
        assert "drafter=max_gram" in said and "gamma=3" in said and "page: http://127.0.0.1:" in said
        root = url.removesuffix("/v1")
        assert CLIENT.get(f"{url}/models").status_code == 401
        with httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=60) as client:
            told = client.get(f"{url}/models").text
            assert '"own-model"' in told and str(tmp_path) not in told
            named = client.post(f"{url}/completions", json={"model": str(folder), "prompt": "x"})
            assert named.status_code == 404 and named.text.count(str(tmp_path)) == 1, "only the client's own text"
            assert client.get(f"{root}/ready").status_code == 200
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PRODUCT}}
            body = {"prompt": TEXT, "max_tokens": 300, "temperature": 0, "stream": True}
            with (
                ThreadPoolExecutor(1) as threads,
                unread_stream(int(root.rpartition(":")[2]), "secret"),  # it cannot end before it is read
                client.stream("POST", f"{url}/completions", json=body) as other,
            ):
                chat = {"messages": TALK, "response_format": form}
                compiled = threads.submit(client.post, f"{url}/chat/completions", json=chat)
                wait_for(lambda: len(child.children(recursive=True)) == 2)
                below = child.children(recursive=True)
                child.send_signal(signal.SIGTERM)
                wait_for(lambda: client.get(f"{root}/ready").status_code == 503)
                late = client.post(f"{url}/completions", json={"prompt": "x"})
                assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
                assert late.headers["retry-after"] == "5"
                assert compiled.result().status_code == 503
                assert client.get(f"{root}/health").status_code == 200
                assert list(other.iter_lines())[-2] == "data: [DONE]"
        process.join(60)
        said = errors.read_text().partition(f"{url}\n")[2]
        assert process.exitcode == -signal.SIGTERM and "Traceback" not in said, said
        assert "stopping: 3 open requests have 30 s to end; a second Ctrl-C or signal ends them now\n" in said, said
        first = json.loads(said.splitlines()[0])
        assert first["path"] == "/v1/models" and first["status"] == 401
        assert not psutil.wait_procs(below, 60)[1]
        with pytest.raises(httpx.ConnectError):
            CLIENT.get(f"{root}/ready")

    def test_a_second_signal_ends_it_at_once(self, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As without a handler, so that no task that is torn down reports it; the first signal drains the server."""
        begun, calls = serve(), list[Any]()
        monkeypatch.setattr(signal, "signal", lambda *given: calls.append(given))
        monkeypatch.setattr(signal, "raise_signal", lambda given: calls.append(given))
        with unread_stream(begun.port):
            begun._server.handle_exit(signal.SIGINT, None)
            wait_for(lambda: begun.get("/ready").status_code == 503)
            assert not calls
            begun._server.handle_exit(signal.SIGINT, None)
        assert calls == [(signal.SIGINT, signal.SIG_DFL), signal.SIGINT]


def unread_stream(port: int, key: str = "") -> socket.socket:
    """A request of which more is written than buffers between server and client hold, and of which the beginning is read."""
    body = {"prompt": TEXT, "max_tokens": 3900, "n": 4, "logprobs": 20, "stream": True}
    held = sent(port, body, buffer=4096, X_Api_Key=key)
    assert b" 200 " in held.recv(100)
    return held
