"""Several models by name: each answers as its own server would, and makes room for the others when it is idle."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from foresay.errors import ModelLoadError
from foresay.server import service as service_module
from foresay.server.service import Entry, Service
from foresay.server.settings import ServerSettings
from helpers import tiny
from helpers.serving import TALK, Running, choice_of, events_of, sent
from helpers.waiting import wait_until

LENGTHS = {"a": 4096, "b": 2048}
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny.save(tmp_path_factory.mktemp(name), tiny.llama(seed, context=LENGTHS[name]), chat=True)
        for seed, name in enumerate("ab", 1)
    }


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path]) -> dict[str, str]:
    """The answer of a server of each model alone."""
    found = {}
    for name, folder in folders.items():
        with Running(load(folder)) as running:
            found[name] = text_of(running.chat(**BODY))
    assert found["a"] != found["b"], "otherwise no answer shows which model gave it"
    return found


def load(folder: Path, **more: Any) -> foresay.Generator:
    return foresay.load(str(folder), drafter="suffix", num_draft_tokens=3, max_batch_size=4, **more)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(choice_of(answer)["message"]["content"])


class Several:
    """A server of two models, which notes what it loads."""

    def __init__(self, folders: dict[str, Path], *, memory: Path | None = None, **settings: Any) -> None:
        self.loads: list[str] = []
        self.models: list[weakref.ref[Any]] = []
        self.most = 0
        entries = [Entry([name], self._loader(name, folder, memory), 4) for name, folder in folders.items()]
        self.running = Running(Service(entries, ServerSettings(**settings)))
        self.service = self.running.service

    def _loader(self, name: str, folder: Path, memory: Path | None) -> Callable[[], foresay.Generator]:
        def loaded() -> foresay.Generator:
            found = load(folder, **({} if memory is None else {"memory": memory / name}))
            self.loads.append(name)
            self.models.append(weakref.ref(found.target.model))
            self.most = max(self.most, sum(one() is not None for one in self.models))
            return found

        return loaded

    def text(self, name: str, **body: Any) -> str:
        return text_of(self.running.chat(**BODY, model=name, **body))

    def streamed(self, name: str) -> str:
        events = events_of(self.running.chat(model=name, stream=True, **BODY))
        return "".join(one["choices"][0]["delta"].get("content", "") for one in events)

    def gives_up(self, name: str) -> None:
        """A request whose client leaves."""
        with pytest.raises(httpx.ReadTimeout):
            self.running.request("POST", "/v1/completions", json={"model": name, "prompt": "x"}, timeout=0.5)

    @property
    def waiting(self) -> int:
        return len(self.service._residency.waiting)


Start = Callable[..., Several]


@pytest.fixture
def several(folders: dict[str, Path]) -> Iterator[Start]:
    begun: list[Several] = []

    def start(**settings: Any) -> Several:
        begun.append(Several(folders, **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.running.close()


def test_each_model_answers_as_its_own_server_does(several: Start, texts: dict[str, str]) -> None:
    server = several()
    listed = server.running.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["a", "b"] and server.loads == [], "nothing is loaded before a request"
    assert all("max_model_len" not in one and "foresay" not in one for one in listed)
    assert [server.text(name) for name in "aba"] == [texts[name] for name in "aba"]
    assert text_of(server.running.chat(**BODY)) == texts["a"], "the first one is that of no name"
    assert server.loads == ["a", "b", "a"] and server.most == 1
    listed = server.running.get("/v1/models").json()["data"]
    assert {one["id"]: one["max_model_len"] for one in listed} == LENGTHS
    assert ["foresay" in one for one in listed] == [True, False], "facts are those of a loaded model"
    assert server.running.get("/v1/models/b").json()["max_model_len"] == LENGTHS["b"]
    answer = server.running.chat(model="c", **BODY)
    assert answer.status_code == 404 and "this server serves 'a', 'b'" in answer.text
    metrics = server.running.get("/metrics").text
    assert all(f'foresay_acceptance_rate{{drafter="{name}: suffix"}}' in metrics for name in "ab")


def test_every_route_uses_the_model_that_is_named(several: Start, texts: dict[str, str]) -> None:
    server = several()
    talk: dict[str, Any] = {"messages": TALK[1:]}
    options = {"temperature": 0, "num_predict": 24}
    for name in "ba":

        def answer(path: str, name: str = name, **body: Any) -> Any:
            return server.running.answer(path, model=name, **body)

        response = answer("/v1/responses", input=TALK[1:], temperature=0, max_output_tokens=24)
        message = answer("/v1/messages", **talk, **BODY)
        ollama = answer("/api/chat", **talk, options=options, stream=False)
        found = response["output"][0]["content"][0]["text"], message["content"][0]["text"], ollama["message"]["content"]
        assert found == (texts[name],) * 3 and response["model"] == message["model"] == ollama["model"] == name
        assert answer("/tokenize", **talk) and answer("/v1/messages/count_tokens", **talk)
        assert answer("/tokenize", prompt="hello")["max_model_len"] == LENGTHS[name]
        assert answer("/detokenize", tokens=[9]) and answer("/v1/embeddings", input="hello")["model"] == name
        assert answer("/v1/completions", prompt="hello", max_tokens=2)["model"] == name
        assert server.loads[-1] == name
    assert server.loads == ["b", "a"]


def test_unloading_frees_the_model(several: Start, texts: dict[str, str]) -> None:
    """Also after a stream, a schema and the failure of a client. With the control of a reference that is held."""
    server = several()
    assert server.streamed("a") == texts["a"]
    server.text("a", response_format={"type": "json_object"})
    server.running.chat(model="a", temperature=0, logit_bias={"x": 1})
    assert server.models[0]() is not None
    assert server.text("b") == texts["b"]
    assert server.models[0]() is None and server.models[1]() is not None
    held = server.running.model
    assert server.text("a") == texts["a"] and server.models[1]() is not None, "the control is alive"
    del held
    gc.collect()
    assert server.models[1]() is None


def test_two_models_at_a_time(several: Start, texts: dict[str, str]) -> None:
    server = several(max_loaded=2)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(server.text, "abab")) == [texts[name] for name in "abab"]
    assert sorted(server.loads) == ["a", "b"] and server.most == 2
    weights = server.running.count("weight_bytes")
    assert weights == sum(one.weight_bytes for one in server.service.loaded) > server.running.model.weight_bytes


def test_a_model_in_use_stays_and_others_wait(several: Start, texts: dict[str, str]) -> None:
    server = several(max_waiting=1)
    endless = {"model": "a", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with sent(server.running.port, endless, buffer=4096) as held:
            assert held.recv(10)
            server.gives_up("b")
            wait_until(lambda: server.waiting == 0, "its client has left the queue")
            answer = pool.submit(server.text, "b")
            wait_until(lambda: server.waiting == 1, "the request waits")
            assert server.running.count("num_requests_waiting") == 1
            full = server.running.chat(model="b", **BODY)
            assert full.status_code == 429 and "wait for a model" in full.text
            assert server.loads == ["a"] and not answer.done()
        assert answer.result(60) == texts["b"]
    assert server.loads == ["a", "b"] and server.most == 1


def test_a_client_that_leaves_while_room_is_made(several: Start, texts: dict[str, str]) -> None:
    """The model that is being unloaded is loaded again for a request that comes meanwhile."""
    server, go_on = several(), threading.Event()
    server.text("a")
    server.running.model.closing = lambda: lambda: go_on.wait(20)  # type: ignore[method-assign, assignment, return-value]
    server.gives_up("b")
    wait_until(lambda: server.waiting == 0 and server.service._change is not None, "it has left the queue")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.text, "a")
        wait_until(lambda: server.waiting == 1, "the request waits")
        go_on.set()
        assert answer.result(60) == texts["a"]
    assert server.loads == ["a", "a"] and server.text("b") == texts["b"]


def test_the_error_of_one_model_does_not_stop_the_other(
    several: Start, folders: dict[str, Path], texts: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, path = several(), str(folders["b"])
    good, broken = server.service.entries
    whole = broken.load

    def fails() -> foresay.Generator:
        raise ModelLoadError(f"{path!r} is damaged")

    broken.load = fails
    for _ in range(2):
        answer = server.running.chat(model="b", **BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (500, "model_not_loaded", "model")
        assert "'b' cannot be loaded" in error["message"] and path not in error["message"]
        assert path in caplog.text, "the log has the reason"
        assert server.text("a") == texts["a"]
    broken.load = whole
    assert server.text("b") == texts["b"], "a later request tries again"
    assert good.served is None


def test_the_memory_limit(several: Start, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is loaded next to another if it fits, else instead of it; one that is too large alone is refused by name."""
    left = [1 << 10]
    monkeypatch.setattr(service_module, "left_bytes", lambda: left[0])
    server = several(max_loaded=2)
    for one in server.service.entries:
        one.num_bytes = 1 << 20
    assert [server.text(name) for name in "aba"] == [texts[name] for name in "aba"]
    assert server.loads == ["a", "b", "a"] and server.most == 1
    left[0] = 1 << 30
    assert server.text("b") == texts["b"] and server.most == 2 == len(server.service.loaded)
    left[0] = -1
    server = several()
    for _ in range(2):
        answer = server.running.chat(model="a", **BODY)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"
        assert "'a' does not fit" in answer.json()["error"]["message"]
    assert server.loads == ["a"] and server.models[0]() is None, "it is not tried again"


def test_kept_texts_of_an_unloaded_model(several: Start, tmp_path: Path) -> None:
    """They are written, their thread ends, and the model that is loaded again drafts from them."""
    before = sum(one.name == "foresay-memory" for one in threading.enumerate())
    server = several(memory=tmp_path)
    assert all(server.text(name) for name in "aba")
    (memory,) = server.running.model.memories
    memory.prepare("")
    memory.flush()
    assert len(memory.texts("")) >= 2
    assert sum(one.name == "foresay-memory" for one in threading.enumerate()) == before + 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


def test_ollamas_names_and_a_request_that_only_loads(several: Start) -> None:
    server = several()
    tags = server.running.get("/api/tags").json()["models"]
    assert [one["name"] for one in tags] == ["a:latest", "b:latest"] and tags[0]["details"]["family"] == ""
    assert server.running.answer("/api/generate", model="b")["done_reason"] == "load"
    assert server.loads == ["b"]
    shown = [server.running.answer("/api/show", model=name) for name in "bab"]
    assert [one["model_info"]["llama.context_length"] for one in shown[:2]] == [LENGTHS["b"], LENGTHS["a"]]
    assert shown[2] == shown[0] and server.loads == ["b", "a"], "it is known"
    tags = server.running.get("/api/tags").json()["models"]
    assert {one["details"]["family"] for one in tags} == {"llama"} and len({one["digest"] for one in tags}) == 2


def test_warming_loads_the_first_model(several: Start, texts: dict[str, str]) -> None:
    """Meanwhile metrics and health are answered."""
    server, go_on = several(), threading.Event()
    entry = server.service.entries[0]
    whole = entry.load
    entry.load = lambda: [go_on.wait(60), whole()][1]
    warming = asyncio.run_coroutine_threadsafe(server.service.warm(), server.running._loop)
    wait_until(lambda: server.service._change is not None, "it is being loaded")
    assert server.running.count("num_requests_waiting") == 1
    assert server.running.get("/health").status_code == 200
    go_on.set()
    warming.result(60)
    assert server.loads == ["a"] and server.text("a") == texts["a"]
