"""A server does not wait for ever, reveal internal errors, admit unknown hosts and pages, or end in mid-word."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from foresay.decoding.outcome import Origin, Step, TokenLogprob
from foresay.drafters import SuffixDrafter
from foresay.models.cache import memory
from foresay.server import queues, served, service
from foresay.server.logprobs import Logprobs, as_chat, as_completion
from foresay.server.settings import ServerSettings, read_keys
from foresay.text.grammar import JsonMask
from helpers import families, tiny
from helpers.refusals import refused
from helpers.serving import TALK, TEXT, Running, events_of, sent
from helpers.waiting import wait_until

LONG = {"prompt": TEXT, "max_tokens": 3900, "temperature": 0}


def post(running: Running, body: dict[str, Any], path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return running.post(path, **body, **more)


def last_event(answer: httpx.Response) -> Any:
    """The pieces of a stream."""
    return json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))


class TestTime:
    def test_a_request_that_takes_too_long(
        self, serve: Any, model: foresay.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind, forward = type(model.target.model), type(model.target.model).forward

        def slowly(self: Any, *args: Any) -> Any:
            time.sleep(0.02)
            return forward(self, *args)

        monkeypatch.setattr(kind, "forward", slowly)
        running = serve(timeout_s=0.8)
        answer = post(running, LONG)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        streamed = post(running, {**LONG, "stream": True})
        assert streamed.status_code == 200 and streamed.text.count("data: ") > 2
        assert last_event(streamed)["error"]["code"] == "timeout"
        wait_until(lambda: not running.count("num_requests_running"), "its row is free")
        with refused("timeout_s", 0):
            ServerSettings(timeout_s=0)

    def test_a_server_that_ends_says_so_in_a_stream_and_in_an_answer(self, serve: Any) -> None:
        running = serve(drain_s=0.3)
        said: dict[bool, httpx.Response] = {}

        def ask(stream: bool) -> None:
            said[stream] = post(running, {**LONG, "stream": stream})

        threads = begun(ask, [(True,), (False,)])
        wait_until(lambda: running.count("num_requests_running") == 2, "both are decoded")
        running.drain()
        joined(threads)
        assert said[False].status_code == 503 and said[False].json()["error"]["code"] == "shutting_down"
        assert said[True].text.count("data: ") > 2 and last_event(said[True])["error"]["code"] == "shutting_down"
        late = post(running, LONG)
        assert late.status_code == 503 and late.headers["retry-after"] == "5"

    def test_a_body_that_does_not_come(self, serve: Any) -> None:
        running = serve(body_s=0.3)
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as held:
            held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in held.recv(4096).split(b"\r\n")[0]


def begun(target: Any, arguments: Iterable[Any]) -> list[threading.Thread]:
    """Threads that have begun, one for each group of arguments."""
    threads = [threading.Thread(target=target, args=one) for one in arguments]
    for one in threads:
        one.start()
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for one in threads:
        one.join(60)


def after(event: threading.Event, honest: Any) -> Any:
    """A function that waits for the event first."""

    def call(*given: Any, **named: Any) -> Any:
        assert event.wait(60)
        return honest(*given, **named)

    return call


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> foresay.Generator:
    """Two rows."""
    return foresay.load(str(tiny.save(tmp_path_factory.mktemp("narrow"), chat=True)), max_batch_size=2)


class TestBeforeTheQueue:
    def test_as_many_as_there_are_rows_and_waiting_ones_are_answered(
        self, serve: Any, narrow: foresay.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """2 rows and 4 that wait: of 10 requests that come at once, 6 are answered."""
        running = serve(narrow, max_waiting=4)
        go_on = threading.Event()
        monkeypatch.setattr(served, "encode", after(go_on, served.encode))
        said: list[httpx.Response] = []
        body = {"prompt": TEXT, "max_tokens": 2}
        threads = begun(lambda: said.append(post(running, body)), [()] * 10)
        wait_until(lambda: len(said) == 4, "those that do not fit the queue are refused at once")
        assert httpx.get(f"{running.url}/health", timeout=10).status_code == 200, "no other request waits for it"
        go_on.set()
        joined(threads)
        assert sorted(one.status_code for one in said) == [200] * 6 + [429] * 4
        refused = said[0]
        assert refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"]
        assert "requests are queued" in refused.json()["error"]["message"]

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
    def test_short_texts_do_not_wait_for_long_ones(
        self, path: str, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor does one client's second long text keep that of another out."""
        running, go_on, honest = serve(keys=frozenset({"a", "b"})), threading.Event(), served.encode
        order: list[str] = []

        def slowly(prompt: Any, *given: Any, **named: Any) -> Any:
            content = prompt if isinstance(prompt, str) else prompt[0]["content"]
            if len(content) > 100:
                order.append(content[0])
                assert go_on.wait(60)
            return honest(prompt, *given, **named)

        monkeypatch.setattr(served, "encode", slowly)
        said: list[httpx.Response] = []

        def ask(content: str, key: str) -> None:
            messages = {"messages": [{"role": "user", "content": content}], "model": "tiny"}
            more = {} if path != "/v1/chat/completions" else {"max_tokens": 2}
            said.append(post(running, {**messages, **more}, path, headers={"Authorization": f"Bearer {key}"}))

        longs = [threading.Thread(target=ask, args=(name * 70_000, key)) for name, key in ("1a", "2a", "3a", "4b")]
        for one, waiting in zip(longs, (1, 2, 3, 4), strict=True):
            one.start()
            wait_until(
                lambda waiting=waiting: running.service.shared.queues.before_rows == waiting, "it is being prepared"
            )
        ask("hello", "a")
        assert said[0].status_code == 200 and order == ["1"]
        go_on.set()
        joined(longs)
        assert order[:2] == ["1", "4"] or order.index("4") == 2, "after at most one more of the other client"
        assert [one.json()["error"]["message"].startswith("the prompt has at least") for one in said[1:]] == [True] * 4

    def test_long_texts_of_one_client_leave_room_for_others(
        self, serve: Any, narrow: foresay.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running, go_on = serve(narrow, max_waiting=2, keys=frozenset({"a", "b"})), threading.Event()
        monkeypatch.setattr(served, "encode", after(go_on, served.encode))
        said: dict[str, list[int]] = {"a": [], "b": []}

        def ask(key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            said[key].append(post(running, {"prompt": "x" * 70_000}, headers=headers).status_code)

        threads = begun(ask, "aaab")
        wait_until(lambda: said["a"] == [429], "half of four are its own")
        go_on.set()
        joined(threads)
        assert sorted(said["a"]) == [400, 400, 429] and said["b"] == [400]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/embeddings", {"input": [[1, 2, 3]] * 3}),
            ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}),
            ("/v1/completions", {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "max_tokens": 0}),
        ],
    )
    def test_one_key_leaves_places_to_others(
        self, path: str, body: dict[str, Any], serve: Any, narrow: foresay.Generator
    ) -> None:
        """A key may have 6 requests in a queue; while it does, a chat of another waits, and is answered."""
        running, go_on = serve(narrow, max_waiting=4, keys=frozenset({"a", "b"})), threading.Event()
        held = running.service.shared.thread.call(lambda: go_on.wait(60))
        said: list[int] = []

        def ask(key: str) -> None:
            headers, talk = {"Authorization": f"Bearer {key}"}, {"messages": TALK, "max_tokens": 2}
            where, sent_body = ("/v1/chat/completions", talk) if key == "b" else (path, body)
            answer = post(running, sent_body, where, headers=headers)
            said.append(answer.status_code)

        threads = begun(ask, "a" * 10)
        wait_until(lambda: said == [429] * 4, "what is too much is refused at once")
        threads += begun(ask, "b")
        queues = running.service.shared.queues
        wait_until(lambda: queues.before_rows + queues.rows.open == 7, "each waits where it is counted")
        go_on.set()
        joined(threads)
        assert held.result(60) and sorted(said) == [200] * 7 + [429] * 4

    @pytest.mark.parametrize("how", ["its client leaves", "its time is over"])
    def test_work_ends_when_nobody_waits_for_it(self, how: str, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Work without an end, that no exception stops; the next text needs the same thread."""
        running, honest, begun_work = (
            serve(timeout_s=60 if how == "its client leaves" else 1),
            served.encode,
            list[int](),
        )

        def endless(prompt: Any, *given: Any) -> Any:
            while prompt == "endless":
                begun_work.append(0)
                with suppress(Exception):
                    begun_work.clear()
            return honest(prompt, *given)

        monkeypatch.setattr(served, "encode", endless)
        if how == "its client leaves":
            with sent(running.port, {"prompt": "endless"}):
                wait_until(lambda: running.service.shared.queues.before_rows == 1, "it is being read")
        else:
            assert post(running, {"prompt": "endless"}).status_code == 504
        assert post(running, {"prompt": TEXT, "max_tokens": 2}).status_code == 200

    def test_work_that_is_stuck_is_reported(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """By one line of the log, and to a load balancer."""
        running, go_on = serve(), threading.Event()
        monkeypatch.setattr(queues, "STUCK_S", 0.05)
        monkeypatch.setattr(service, "TRIM_S", 0.01)
        monkeypatch.setattr(served, "encode", after(go_on, served.encode))
        url = f"{running.url}/ready"
        assert httpx.get(url).status_code == 200
        threads = begun(lambda: post(running, {"prompt": TEXT, "max_tokens": 2}), [()])
        wait_until(lambda: httpx.get(url).status_code == 503, "it is stuck")
        assert "thread foresay-texts has not ended" in httpx.get(url).json()["reason"]
        wait_until(lambda: "has not ended" in caplog.text, "it is logged")
        go_on.set()
        joined(threads)
        wait_until(lambda: httpx.get(url).status_code == 200, "it goes on")
        wait_until(lambda: "over: " in caplog.text, "so is its end")
        assert caplog.text.count("has not ended") == 2

    def test_a_text_that_takes_too_long_to_read(self, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        running, go_on = serve(timeout_s=0.2), threading.Event()
        monkeypatch.setattr(served, "encode", lambda *_, **__: go_on.wait(30))
        answer = post(running, {"prompt": TEXT})
        go_on.set()
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


class TestMemory:
    def test_an_idle_server_returns_freed_memory(self, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[bool] = []
        monkeypatch.setattr(service, "TRIM_S", 0.01)
        monkeypatch.setattr(service.Trimmer, "check", lambda self, *, idle: seen.append(idle))
        running = serve()
        wait_until(lambda: True in seen, "nothing is under way")
        with streaming(running) as held:
            assert held.recv(10)
            seen.clear()
            wait_until(lambda: False in seen, "a request is under way")

    def test_a_long_text_beyond_the_limit(self, serve: Any) -> None:
        running = serve()
        memory.limit_memory(memory.resident_bytes() + (64 << 20))
        try:
            answer = post(running, {"prompt": "x" * (4_000_000)})
            assert post(running, {"prompt": TEXT, "max_tokens": 2}).status_code == 200
        finally:
            memory.limit_memory(None)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"
        assert answer.headers["retry-after"]

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"prediction": {"type": "content", "content": "<|" * 1_900_000}}, 200),
            ({"messages": [{"role": "user", "content": "<|" * 1_900_000}]}, 400),
        ],
    )
    def test_a_long_text_stays_below_the_limit(self, body: dict[str, Any], status: int, serve: Any) -> None:
        """A text of 3.8 MB, whose tokens would take 800 MB, wherever it is."""
        running, limit, seen = serve(), memory.resident_bytes() + (256 << 20), list[int]()
        memory.limit_memory(limit)
        try:
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(running.chat, max_tokens=5, **body)
                while not answer.done():
                    seen.append(memory.resident_bytes())
                    time.sleep(0.005)
        finally:
            memory.limit_memory(None)
        assert answer.result().status_code == status, answer.result().text
        assert max(seen) < limit


def streaming(running: Running) -> socket.socket:
    """A connection that reads slowly, with a long stream."""
    return sent(running.port, {**LONG, "max_tokens": 1500, "stream": True}, buffer=4096, Connection="close")


class TestWhoReadsSlowly:
    def test_its_row_is_free_when_it_is_written(self, serve: Any) -> None:
        """Output waits for its reader, and no other request does; all of it comes."""
        running = serve(send_buffer=4096)
        with streaming(running) as held:
            assert held.recv(10)
            quick = post(running, {"prompt": TEXT, "max_tokens": 8})
            assert quick.status_code == 200
            wait_until(lambda: not running.count("num_requests_running"), "it is written")
            assert running.count("generation_tokens_total") < 1500, "the writer waits"
            rest = bytearray()
            while part := held.recv(1 << 16):
                rest += part
        assert rest.count(b"data: ") > 100 and b"[DONE]" in rest

    @pytest.mark.parametrize("unread_s", [0.5, 120.0])
    def test_who_reads_nothing_is_given_up(self, serve: Any, unread_s: float) -> None:
        running = serve(send_buffer=4096, unread_s=unread_s)
        with streaming(running):
            wait_until(lambda: running.connections, "it is connected")
            if unread_s < 1:
                wait_until(lambda: not running.connections, "it is given up")
            else:  # control
                time.sleep(1.5)
                assert running.connections


class TestDrafters:
    def test_one_that_fails_at_random_changes_no_answer(
        self, serve: Any, model: foresay.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chance, propose = random.Random(0), SuffixDrafter.propose

        def fails(self: Any, *args: Any) -> Any:
            if chance.random() < 0.3:
                raise RuntimeError("a drafter's own fault")
            return propose(self, *args)

        wanted = [model.generate(f"{TEXT} {i}", max_new_tokens=24).text for i in range(6)]
        monkeypatch.setattr(SuffixDrafter, "propose", fails)
        running = serve(foresay.change(model, drafter="suffix"))
        found = [post(running, {"prompt": f"{TEXT} {i}", "max_tokens": 24, "temperature": 0}) for i in range(6)]
        assert [one.json()["choices"][0]["text"] for one in found] == wanted


class TestWho:
    def test_names_of_this_machine_alone(self, serve: Any) -> None:
        """Otherwise a page whose name is pointed to this machine could read its answers."""
        running = serve(hosts=("Proxy.example",))
        for name, status in (
            ("127.0.0.1", 200), (f"localhost:{running.port}", 200), ("[::1]:80", 200), ("proxy.example", 200),
            ("evil.example", 421), ("evil.example:80", 421), ("", 421), ("localhost.evil.example", 421),
        ):  # fmt: skip
            assert httpx.get(f"{running.url}/v1/models", headers={"Host": name}).status_code == status, name
        for wrong in ("https://x", "x:80", ""):
            with refused("hosts"):
                ServerSettings(hosts=(wrong,))
        for settings in ({"keys": frozenset({"k"})}, {"host": "0.0.0.0", "open_to_all": True}):
            with refused("hosts", ("proxy.example",)):
                ServerSettings(hosts=("proxy.example",), **settings)
        with_keys = serve(keys=frozenset({"k"}))
        headers = {"Host": "any.example", "Authorization": "Bearer k"}
        assert httpx.get(f"{with_keys.url}/v1/models", headers=headers).status_code == 200

    def test_pages_of_other_origins(self, serve: Any) -> None:
        running = serve(cors=("https://page.example",), keys=frozenset({"k"}))
        asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{running.url}/v1/completions", headers=asks)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == asks["Origin"]
        refused = httpx.post(f"{running.url}/v1/completions", headers={"Origin": asks["Origin"]}, json={})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == asks["Origin"]
        other = httpx.options(f"{running.url}/v1/completions", headers={**asks, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        plain = httpx.post(
            f"{serve().url}/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415, "what a page may send without a preflight request"

    def test_files_of_keys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORESAY_API_KEYS", "one, two,")
        path = tmp_path / "keys"
        path.write_text("# mine\nthree\n\n")
        assert read_keys(path) == {"one", "two", "three"} and read_keys(None) == {"one", "two"}
        path.write_text("# none\n\n")
        with refused("keys_file"):
            read_keys(path)


class TestWhatIsTold:
    def test_what_fails_inside_is_told_in_general_words(
        self, serve: Any, model: foresay.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = serve()

        def fails(*_: Any) -> None:
            raise RuntimeError("the text of another prompt")

        monkeypatch.setattr(type(model.target.model), "forward", fails)
        for stream in (False, True):
            answer = post(running, {"prompt": "something", "stream": stream})
            assert answer.status_code == 500 and "somebody" not in answer.text
            assert answer.json()["error"]["code"] == "generation_failed"
        assert running.count('request_failure_total{status="500"}') == 2
        monkeypatch.undo()
        assert post(running, {"prompt": TEXT, "max_tokens": 2}).status_code == 200, "its requests alone fail"
        assert running.count('request_success_total{finished_reason="error"}') == 0

    def test_log_probabilities_end_with_the_text(self, serve: Any, model: foresay.Generator) -> None:
        running = serve()
        whole = model.generate(TEXT, max_new_tokens=24)
        stop = whole.text[9:12]
        body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "stop": stop, "logprobs": 2}
        choice = post(running, body).json()["choices"][0]
        assert choice["text"] == whole.text[: whole.text.index(stop)] == "".join(choice["logprobs"]["tokens"])
        pieces = [one["choices"][0] for one in events_of(post(running, {**body, "stream": True}))]
        offsets = [place for one in pieces for place in one["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"] == [
            sum(map(len, choice["logprobs"]["tokens"][:i])) for i in range(len(offsets))
        ]  # fmt: skip
        sent = 0
        for one in pieces:
            sent += len(one["text"])
            assert all(place < sent for place in one["logprobs"]["text_offset"]), "none comes before its text"

    def test_log_probabilities_of_bytes_and_of_what_cannot_be(self, serve: Any, model: foresay.Generator) -> None:
        running = serve()
        tokenizer: Any = model.tokenizer
        parts = tokenizer("東").input_ids
        body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0, "logprobs": 3}
        body["logit_bias"] = {str(part): 90 - i for i, part in enumerate(parts)}
        found = post(running, body).json()["choices"][0]["logprobs"]
        assert set(found["tokens"]) == {"bytes:\\xe6"}, "a third of a character"
        for own, one in zip(found["tokens"], found["top_logprobs"], strict=True):
            assert len({*one, own}) == len(one) and 3 <= len(one) <= 4, "distinct names, the sampled token's among them"
        step = Step(
            0, (9, 10), (Origin.BONUS, Origin.BONUS), 0, 0, logprobs=(TokenLogprob(-math.inf, ((11, -math.inf),)),) * 2
        )
        entries = Logprobs(tokenizer).take(step, "xy", ended=True)
        assert "-9999.0" in json.dumps([as_chat(entries), as_completion(entries)], allow_nan=False)

    def test_prompts_that_were_there_already(self, serve: Any) -> None:
        running = serve()
        talk = {"prompt": TEXT * 4, "max_tokens": 4, "temperature": 0}
        first = post(running, {**talk, "n": 2}).json()["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0, "the first of two outputs found nothing"
        again = post(running, {**talk, "n": 2}).json()["usage"]
        assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"] == first["prompt_tokens"]

    def test_a_schema_that_cannot_be_followed_further_is_the_clients(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gives_up(self: Any, *_: Any) -> Any:
            raise foresay.ConfigError("the schema cannot be followed further: a limit")

        monkeypatch.setattr(JsonMask, "__call__", gives_up)
        body = {"messages": TALK, "response_format": {"type": "json_object"}}
        running = serve()
        answer = post(running, body, "/v1/chat/completions")
        assert answer.status_code == 400 and "followed further: a limit" in answer.json()["error"]["message"]
        assert post(running, {"prompt": TEXT, "max_tokens": 2}).status_code == 200

    def test_a_model_that_reads_a_source_follows_no_schema(self, serve: Any, tmp_path: Path) -> None:
        made = tiny.save(tmp_path, families.make_seq2seq("t5", vocab_size=len(tiny.tokenizer())))
        running = serve(foresay.load(str(made)))
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
        answer = post(running, body, "/v1/chat/completions")
        assert answer.status_code == 400, answer.text
