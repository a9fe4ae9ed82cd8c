"""A server does not wait for ever, reveal internal errors, admit unknown hosts and pages, or end in mid-word."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from foresay.decoding.outcome import Origin, Step, TokenLogprob
from foresay.models.cache import memory
from foresay.server import queues, served, service
from foresay.server.logprobs import Logprobs, as_chat, as_completion
from foresay.server.settings import ServerSettings, read_keys
from foresay.text.grammar import JsonMask
from helpers import families, tiny
from helpers.refusals import refused
from helpers.serving import TALK, TEXT, Running, choice_of, events_of, sent
from helpers.waiting import wait_until

LONG = {"prompt": TEXT, "max_tokens": 1500, "temperature": 0, "stream": True}
KEYS = frozenset({"a", "b"})


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def after(event: threading.Event, honest: Any) -> Any:
    """A function that waits for the event first."""

    def call(*given: Any, **named: Any) -> Any:
        assert event.wait(60)
        return honest(*given, **named)

    return call


def of_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def narrow(chat_folder: Path) -> foresay.Generator:
    """Two rows."""
    return foresay.load(str(chat_folder), max_batch_size=2)


class TestBeforeTheQueue:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/embeddings", {"input": [[1, 2, 3]] * 3}),
            ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}),
            ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
        ],
        ids=["passes", "rows", "texts"],
    )
    def test_one_key_leaves_places_to_others(
        self, path: str, body: dict[str, Any], serve: Any, narrow: foresay.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With 2 rows and 4 that wait, a key may have 6 requests in a queue; a chat of another waits, and is answered."""
        running, go_on, said = serve(narrow, max_waiting=4, keys=KEYS), threading.Event(), list[httpx.Response]()
        if body.get("prompt") == TEXT:
            monkeypatch.setattr(served, "encode", after(go_on, served.encode))
        else:
            running.service.shared.thread.call(lambda: go_on.wait(60))
        with ThreadPoolExecutor(11) as threads:
            for _ in range(10):
                threads.submit(lambda: said.append(running.post(path, headers=of_key("a"), **body)))
            wait_until(lambda: len(said) == 4, "what is too much is refused at once")
            assert all(code_of(one) == (429, "queue_full") and one.headers["retry-after"] for one in said)
            assert running.get("/health").status_code == 200, "no other request waits for it"
            threads.submit(lambda: said.append(running.chat(max_tokens=2, headers=of_key("b"))))
            queues = running.service.shared.queues
            wait_until(lambda: queues.before_rows + queues.rows.open == 7, "each waits where it is counted")
            go_on.set()
        assert [one.status_code for one in said[4:]] == [200] * 7

    def test_short_texts_do_not_wait_for_long_ones(self, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor does one client's second long text keep that of another out."""
        running, go_on, honest = serve(keys=KEYS), threading.Event(), served.encode
        order, said = list[str](), list[httpx.Response]()

        def slowly(prompt: Any, *given: Any, **named: Any) -> Any:
            if len(content := prompt[0]["content"]) > 100:
                order.append(content[0])
                assert go_on.wait(60)
            return honest(prompt, *given, **named)

        monkeypatch.setattr(served, "encode", slowly)

        def ask(content: str, key: str) -> None:
            messages = [{"role": "user", "content": content}]
            said.append(running.chat(messages=messages, max_tokens=2, headers=of_key(key)))

        with ThreadPoolExecutor(4) as threads:
            for waiting, (name, key) in enumerate(("1a", "2a", "3a", "4b"), 1):
                threads.submit(ask, name * 70_000, key)
                wait_until(lambda n=waiting: running.service.shared.queues.before_rows == n, "it is being prepared")
            ask("hello", "a")
            assert said[0].status_code == 200 and order == ["1"]
            go_on.set()
        assert order[:2] == ["1", "4"] or order.index("4") == 2, "after at most one more of the other client"
        assert all(one.json()["error"]["message"].startswith("the prompt has at least") for one in said[1:])

    @pytest.mark.parametrize("how", ["its client leaves", "its time is over"])
    def test_work_ends_when_nobody_waits_for_it(self, how: str, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Work without an end, that no exception stops; the next text needs the same thread."""
        running, honest = serve(timeout_s=60 if how == "its client leaves" else 0.3), served.encode
        begun_work = list[int]()
        monkeypatch.setattr(queues, "GRACE_S", 0.05)

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
            assert code_of(running.complete("endless")) == (504, "timeout")
        assert running.complete(max_tokens=2).status_code == 200

    def test_work_that_is_stuck_is_reported(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """By one line of the log, and to a load balancer."""
        monkeypatch.setattr(queues, "STUCK_S", 0.05)
        monkeypatch.setattr(service, "TRIM_S", 0.01)
        running, go_on = serve(), threading.Event()
        monkeypatch.setattr(served, "encode", after(go_on, served.encode))
        assert running.get("/ready").status_code == 200
        with ThreadPoolExecutor(1) as threads:
            threads.submit(running.complete, max_tokens=2)
            wait_until(lambda: running.get("/ready").status_code == 503, "it is stuck")
            assert "thread foresay-texts has not ended" in running.get("/ready").json()["reason"]
            wait_until(lambda: "has not ended" in caplog.text, "it is logged")
            go_on.set()
        wait_until(lambda: running.get("/ready").status_code == 200, "it goes on")
        wait_until(lambda: "over: " in caplog.text, "so is its end")
        assert caplog.text.count("has not ended") == 2


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
            answer = running.complete("x" * 4_000_000)
            assert running.complete(max_tokens=2).status_code == 200
        finally:
            memory.limit_memory(None)
        assert code_of(answer) == (503, "out_of_memory") and answer.headers["retry-after"]

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"prediction": {"type": "content", "content": "<|" * 1_900_000}}, 200),
            ({"messages": [{"role": "user", "content": "<|" * 1_900_000}]}, 400),
        ],
        ids=["a prediction", "a message"],
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
    return sent(running.port, LONG, buffer=4096, Connection="close")


class TestWhoReadsSlowly:
    def test_its_row_is_free_when_it_is_written(self, serve: Any) -> None:
        """Output waits for its reader, and no other request does; all of it comes."""
        running = serve(send_buffer=4096)
        with streaming(running) as held:
            assert held.recv(10)
            assert running.complete(max_tokens=8).status_code == 200
            wait_until(lambda: not running.count("num_requests_running"), "it is written")
            assert running.count("generation_tokens_total") < 1500, "the writer waits"
            rest = bytearray()
            while part := held.recv(1 << 16):
                rest += part
        assert rest.count(b"data: ") > 100 and b"[DONE]" in rest

    def test_who_reads_nothing_is_given_up(self, serve: Any) -> None:
        patient, running = (serve(send_buffer=4096, unread_s=unread_s) for unread_s in (120.0, 0.5))
        with streaming(patient), streaming(running):
            wait_until(lambda: patient.connections and running.connections, "they are connected")
            wait_until(lambda: not running.connections, "it is given up")
            assert patient.connections, "control"


class TestWho:
    def test_names_of_this_machine_alone(self, serve: Any) -> None:
        """Otherwise a page whose name is pointed to this machine could read its answers."""
        running = serve(hosts=("Proxy.example",))
        for name, status in (
            ("127.0.0.1", 200), (f"localhost:{running.port}", 200), ("[::1]:80", 200), ("proxy.example", 200),
            ("evil.example", 421), ("evil.example:80", 421), ("", 421), ("localhost.evil.example", 421),
        ):  # fmt: skip
            assert running.get("/v1/models", Host=name).status_code == status, name
        for wrong in ("https://x", "x:80", ""):
            with refused("hosts", wrong):
                ServerSettings(hosts=(wrong,))
        for settings in ({"keys": KEYS}, {"host": "0.0.0.0", "open_to_all": True}):
            with refused("hosts", ("proxy.example",)):
                ServerSettings(hosts=("proxy.example",), **settings)  # type: ignore[arg-type]
        answer = serve(keys=KEYS).get("/v1/models", Host="any.example", **of_key("a"))
        assert answer.status_code == 200, "keys keep pages out"

    def test_settings_out_of_range(self) -> None:
        for name, value in (
            ("timeout_s", 0), ("pooling", "max"), ("share_prefixes", "some"), ("tool_format", "x"), ("max_n", 0),
        ):  # fmt: skip
            with refused(name, value):
                ServerSettings(**{name: value})  # type: ignore[arg-type]

    def test_pages_of_other_origins(self, serve: Any) -> None:
        running = serve(cors=("https://page.example",), keys=KEYS)
        asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        answer = running.request("OPTIONS", "/v1/completions", headers=asks)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == asks["Origin"]
        refused = running.complete(headers={"Origin": asks["Origin"]})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == asks["Origin"]
        other = running.request("OPTIONS", "/v1/completions", headers={**asks, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers

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
            answer = running.complete("something", stream=stream)
            assert code_of(answer) == (500, "generation_failed") and "another prompt" not in answer.text
        assert running.count('request_failure_total{status="500"}') == 2
        monkeypatch.undo()
        assert running.complete(max_tokens=2).status_code == 200, "its requests alone fail"
        assert running.count('request_success_total{finished_reason="error"}') == 0

    def test_log_probabilities_end_with_the_text(self, server: Running) -> None:
        whole = server.model.generator.generate(TEXT, max_new_tokens=24).text
        stop = whole[9:12]
        body = {"max_tokens": 24, "stop": stop, "logprobs": 2}
        choice = choice_of(server.complete(**body))
        tokens = choice["logprobs"]["tokens"]
        assert choice["text"] == whole[: whole.index(stop)] == "".join(tokens)
        offsets, length = list[int](), 0
        for one in events_of(server.complete(**body, stream=True)):
            piece = one["choices"][0]
            length += len(piece["text"])
            offsets += piece["logprobs"]["text_offset"]
            assert max(offsets, default=-1) < length, "none comes before its text"
        assert offsets == choice["logprobs"]["text_offset"] == [sum(map(len, tokens[:i])) for i in range(len(tokens))]

    def test_log_probabilities_of_bytes_and_of_what_cannot_be(self, server: Running) -> None:
        tokenizer: Any = server.model.tokenizer
        bias = {str(part): 90 - i for i, part in enumerate(tokenizer("東").input_ids)}
        found = choice_of(server.complete(max_tokens=3, logprobs=3, logit_bias=bias))["logprobs"]
        assert set(found["tokens"]) == {"bytes:\\xe6"}, "a third of a character"
        for own, one in zip(found["tokens"], found["top_logprobs"], strict=True):
            assert len({*one, own}) == len(one) and 3 <= len(one) <= 4, "distinct names, the sampled token's among them"
        never = (TokenLogprob(-math.inf, ((11, -math.inf),)),) * 2
        step = Step(0, (9, 10), (Origin.BONUS,) * 2, 0, 0, logprobs=never)
        entries = Logprobs(tokenizer).take(step, "xy", ended=True)
        assert "-9999.0" in json.dumps([as_chat(entries), as_completion(entries)], allow_nan=False)

    def test_a_schema_that_cannot_be_followed(
        self, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Further than to some token, which is the client's error; or at all, by a model that reads a source."""

        def gives_up(self: Any, *_: Any) -> Any:
            raise foresay.ConfigError("the schema cannot be followed further: a limit")

        monkeypatch.setattr(JsonMask, "__call__", gives_up)
        running, json_object = serve(), {"type": "json_object"}
        answer = running.chat(response_format=json_object)
        assert answer.status_code == 400 and "followed further: a limit" in answer.json()["error"]["message"]
        assert running.complete(max_tokens=2).status_code == 200
        source = tiny.save(tmp_path, families.make_seq2seq("t5", vocab_size=len(tiny.tokenizer())), chat=True)
        answer = serve(foresay.load(str(source))).chat(messages=TALK[1:], response_format=json_object)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format", answer.text
