"""Ollama's API: requests in the shapes of ollama-python, Open WebUI and Continue, lines of streams, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from foresay.server import hints
from foresay.server.events import Output
from helpers import chains, tiny
from helpers.serving import Running, choice_of
from helpers.tool_chats import TALK, TEMPLATE, TIME, WEATHER

COUNTS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count", "eval_count")
GREEDY = {"temperature": 0}
DAY = {
    "properties": {"day": {"enum": ["monday"]}}, "type": "object", "required": ["day"], "additionalProperties": False,
}  # fmt: skip
CALLS = [("weather", {"city": "Rome"}), ("time", {})]
"""Calls in the output of the model `chain`."""


def lines(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which is the default."""
    answer = running.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def whole(running: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = running.post(path, stream=False, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(answer: httpx.Response, status: int = 400) -> str:
    """The text of an error in Ollama's shape."""
    body = answer.json()
    assert answer.status_code == status and body.keys() == {"error"} and isinstance(body["error"], str), answer.text
    return str(body["error"])


def text_of(running: Running, messages: list[Any], **body: Any) -> str:
    """The text of the same request in OpenAI's API."""
    return str(choice_of(running.chat(messages=messages, **body))["message"]["content"])


# Chats


def test_a_chat_of_ollama_python(server: Running) -> None:
    """The client sends every field that is not None, and reads each line as a response."""
    body: dict[str, Any] = {"model": "tiny", "messages": TALK, "tools": [], "options": {**GREEDY, "num_predict": 12}}
    found = lines(server, "/api/chat", **body, stream=True)
    text = text_of(server, TALK, temperature=0, max_tokens=12)
    assert "".join(one["message"]["content"] for one in found) == text != ""
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True] and len(found) > 2
    for one in found:
        assert one["model"] == "tiny" and one["message"]["role"] == "assistant"
        assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
    last = found[-1]
    assert last["done_reason"] == "length" and last["eval_count"] == 12
    assert last["prompt_eval_count"] == server.post("/tokenize", messages=TALK).json()["count"]
    assert all(isinstance(last[name], int) for name in COUNTS) and not any(name in found[0] for name in COUNTS)
    assert last["eval_duration"] > 0 < last["prompt_eval_duration"] and last["load_duration"] == 0
    assert abs(last["prompt_eval_duration"] + last["eval_duration"] - last["total_duration"]) <= 2, "in nanoseconds"
    assert last["total_duration"] < 60e9
    done = whole(server, "/api/chat", **body)
    assert done["message"] == {"role": "assistant", "content": text} and done["done"] is True
    assert {**done, "message": 0}.keys() == {**last, "message": 0}.keys()
    assert (done["done_reason"], done["eval_count"]) == ("length", 12)


def test_the_stream_is_the_default_and_has_no_other_type(server: Running) -> None:
    body = {"messages": TALK, "options": {"num_predict": 2}}
    assert len(lines(server, "/api/chat", **body)) >= 2
    assert server.post("/api/chat", **body, stream=False).headers["content-type"] == "application/json"


def test_a_chat_of_open_webui(server: Running) -> None:
    """Calls with an index and an id, texts that are empty, results with an id."""
    call = {"index": 0, "id": "call_1", "function": {"name": "time", "arguments": {"zone": "utc"}}}
    talk: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "9", "tool_call_id": "call_1"},
    ]
    sent = {"id": "call_1", "type": "function", "function": call["function"]}
    plain = [*talk[:2], {**talk[2], "tool_calls": [sent]}, talk[3]]
    body = {"model": "tiny:latest", "messages": talk, "options": {**GREEDY, "num_predict": 8}, "keep_alive": "5m"}
    answer = server.post("/api/chat", **body, format="", stream=False)
    assert answer.json()["message"]["content"] == text_of(server, plain, temperature=0, max_tokens=8)
    assert answer.json()["model"] == "tiny:latest" and answer.headers[hints.HEADER.decode()] == "keep_alive"


def test_a_chat_of_continue(server: Running) -> None:
    options = {"num_predict": 6, "stop": ["<|im_end|>"], "num_ctx": 4096, "temperature": 0, "top_k": 5, "num_thread": 2}
    body = {"model": "tiny", "messages": TALK, "options": options, "keep_alive": 1800, "stream": True}
    answer = server.post("/api/chat", **body, think=None)
    assert answer.status_code == 200
    assert answer.headers[hints.HEADER.decode()].split(", ") == ["options.num_ctx", "options.num_thread", "keep_alive"]
    named = {"model": "tiny", "prompt": "def f(", "raw": True, "stream": False, "options": {**options, "seed": -1}}
    done = server.post("/api/generate", **named, keep_alive=-1)
    completed = server.post("/v1/completions", prompt="def f(", max_tokens=6, temperature=0, top_k=5)
    assert done.json()["response"] == choice_of(completed)["text"]
    assert "keep_alive" not in done.headers[hints.HEADER.decode()], "the model stays"
    assert server.post("/api/show", name="tiny").json()["model_info"]["llama.context_length"] > 0


def test_every_option_is_the_field_of_openai(server: Running) -> None:
    """Each of them changes the output as its counterpart does, and the output of another value differs."""
    base = {"temperature": 1.5, "seed": 7, "num_predict": 24}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"top_k": 4}, {"top_k": 4}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"min_p": 0.2}, {"min_p": 0.2}),
        ({"seed": 8}, {"seed": 8}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"num_predict": 3}, {"max_tokens": 3}),
        ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}),
        ({"presence_penalty": 0.7}, {"presence_penalty": 0.7}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"repeat_penalty": 1.9, "presence_penalty": 2.0, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.9, "repeat_last_n": -1}, {"repetition_penalty": 1.9}),
        ({"typical_p": 1, "tfs_z": 1, "mirostat": 0, "penalize_newline": True}, {}),
    ]
    texts = []
    for options, fields in pairs:
        body = {"messages": TALK, "options": {**base, **options}}
        texts.append(whole(server, "/api/chat", **body)["message"]["content"])
        assert texts[-1] == text_of(server, TALK, **{"temperature": 1.5, "seed": 7, "max_tokens": 24, **fields}), (
            options
        )
    assert texts[9] == texts[11] and texts[6] == texts[10] and len(set(texts)) == 10, "the others have effects"
    stop = texts[11][3:5]
    body = {"messages": TALK, "options": {**base, "stop": [stop]}}
    done = whole(server, "/api/chat", **body)
    assert done["message"]["content"] == texts[11].partition(stop)[0] and done["done_reason"] == "stop"


def test_reasoning_text_and_calls(chain: Running) -> None:
    """A call is one line, whose arguments are an object; calls are numbered."""
    body: dict[str, Any] = {"messages": TALK, "tools": [WEATHER, {"function": TIME["function"]}], "options": GREEDY}
    done = whole(chain, "/api/chat", **body)
    message = done["message"]
    assert (message["thinking"], message["content"]) == ("What is asked?", "Let me look.")
    functions = [one["function"] for one in message["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == CALLS
    assert [one["index"] for one in functions] == [0, 1] and done["done_reason"] == "stop"
    assert message["tool_calls"][0]["id"] != message["tool_calls"][1]["id"]
    found = [one["message"] for one in lines(chain, "/api/chat", **body)]
    assert "".join(one.get("thinking", "") for one in found) == "What is asked?"
    assert "".join(one["content"] for one in found) == "Let me look."
    assert [[one["function"] for one in each["tool_calls"]] for each in found if "tool_calls" in each] == [
        [functions[0]], [functions[1]],
    ]  # fmt: skip
    talk = [*TALK, message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    assert whole(chain, "/api/chat", **{**body, "messages": talk})["message"]["content"] == "Let me look."
    generated = whole(chain, "/api/generate", prompt="hello there", options=GREEDY)
    assert generated["thinking"] == "What is asked?" and generated["response"].startswith("Let me look.")


def test_think(chain: Running, random_model: Path) -> None:
    """True is a hint for a template without the variable; false and a level are its variables, or are refused."""
    answer = chain.post("/api/chat", messages=TALK, think=True, stream=False)
    assert answer.status_code == 200 and answer.json()["message"]["thinking"] == "What is asked?"
    assert refusal(chain.post("/api/chat", messages=TALK, think=False)).startswith("think: the chat template")
    with Running(with_template(random_model, "{% if enable_thinking %}on{% endif %}{{ reasoning_effort }}")) as running:
        counts = {
            think: whole(running, "/api/chat", messages=TALK, think=think, options={"num_predict": 1})[
                "prompt_eval_count"
            ]
            for think in (None, False, True, "low")
        }
        assert counts[None] == counts[False] < counts[True] == counts[None] + 2 < counts["low"]
        assert "think" in refusal(running.post("/api/chat", messages=TALK, think="much"))


def with_template(folder: Path, text: str) -> foresay.Generator:
    generator = foresay.load(str(folder), num_draft_tokens=3)
    generator.tokenizer.chat_template = text + TEMPLATE
    return generator


@pytest.mark.parametrize(
    ("path", "prompt"), [("/api/chat", {"messages": TALK}), ("/api/generate", {"prompt": "hello"})]
)
def test_formats(server: Running, path: str, prompt: dict[str, Any]) -> None:
    def output(form: Any) -> Any:
        done = whole(server, path, **prompt, format=form, options={**GREEDY, "num_predict": 60})
        return done.get("response", done.get("message", {}).get("content"))

    assert json.loads(output(DAY)) == {"day": "monday"}
    assert output("json").startswith("{") and not output("").startswith("{")
    assert refusal(server.post(path, **prompt, format={"type": "nothing"})).startswith("format")
    assert refusal(server.post(path, **prompt, format="xml")).startswith("format")


def test_logprobs_belong_to_the_lines(server: Running) -> None:
    body: dict[str, Any] = {
        "messages": TALK,
        "logprobs": True,
        "top_logprobs": 2,
        "options": {**GREEDY, "num_predict": 9},
    }
    expected = choice_of(server.chat(messages=TALK, logprobs=True, top_logprobs=2, temperature=0, max_tokens=9))[
        "logprobs"
    ]["content"]
    found = lines(server, "/api/chat", **body)
    assert [entry for one in found for entry in one.get("logprobs", ())] == expected and len(expected) == 9
    assert whole(server, "/api/chat", **body)["logprobs"] == expected
    raw = {"prompt": "hello", "raw": True, "logprobs": True, "options": {"num_predict": 3}}
    assert len(whole(server, "/api/generate", **raw)["logprobs"]) == 3
    assert refusal(server.post("/api/chat", messages=TALK, top_logprobs=2)).startswith("top_logprobs")


# Completions


def test_generate_is_a_chat_of_one_turn(server: Running) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "hello there", "options": {**GREEDY, "num_predict": 8}}
    text = text_of(server, TALK, temperature=0, max_tokens=8)
    assert whole(server, "/api/generate", **body)["response"] == text
    found = lines(server, "/api/generate", **body, system="", template="", images=[], context=[], suffix="")
    assert "".join(one["response"] for one in found) == text and "message" not in found[0]
    briefly = [{"role": "system", "content": "be brief"}, *TALK]
    assert whole(server, "/api/generate", **body, system="be brief")["response"] == text_of(
        server, briefly, temperature=0, max_tokens=8
    )


def test_raw_prompts_end_with_the_context(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, tiny.llama(context=64), chat=True)
    with Running(foresay.load(str(folder))) as running:
        body = {"prompt": "and", "raw": True, "options": {"temperature": 1, "seed": 1, "num_predict": -1}}
        done = whole(running, "/api/generate", **body)
        assert done["done_reason"] == "stop" or done["prompt_eval_count"] + done["eval_count"] == 64
        assert done["eval_count"] > 16, "OpenAI's default does not apply"
        text = refusal(running.post("/api/generate", prompt="and", suffix="x", stream=False))
        assert text.startswith("suffix: this model's tokenizer has no tokens")


def test_loading(server: Running) -> None:
    """A request without a prompt loads the model, which is loaded; one that unloads it is refused."""
    loaded = server.post("/api/chat", model="tiny", messages=[])
    assert loaded.json()["message"] == {"role": "assistant", "content": ""}
    assert loaded.json()["done"] is True and loaded.json()["done_reason"] == "load"
    assert server.post("/api/generate", model="tiny").json()["response"] == ""
    for never in (0, "0", "0s", 0.0):
        message = refusal(server.post("/api/generate", model="tiny", prompt="", keep_alive=never))
        assert message.startswith(f"keep_alive={never!r}")
    assert server.post("/api/generate", model="tiny", keep_alive="-1m").headers.get(hints.HEADER.decode()) is None
    assert refusal(server.post("/api/generate", model="other"), 404).startswith("the model 'other'")
    assert refusal(server.post("/api/chat", messages=TALK, keep_alive="soon")).startswith("keep_alive")


# Models


def test_models_and_their_names(server: Running) -> None:
    listed = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert [one["name"] for one in listed] == ["tiny:latest", "other-name:latest"] == [one["model"] for one in listed]
    assert listed[0]["details"]["family"] == "llama" and len(listed[0]["digest"]) == 64
    assert listed[0]["size"] == server.count("weight_bytes") > 0
    assert datetime.fromisoformat(listed[0]["modified_at"]).tzinfo is not None
    for name in ("tiny", "tiny:latest", "other-name", "other-name:latest"):
        done = whole(server, "/api/chat", model=name, messages=TALK, options={"num_predict": 1})
        assert done["model"] == name
    for name in ("tiny:8b", "latest", "tin", ":latest"):
        assert "is not served here" in refusal(server.post("/api/chat", model=name, messages=TALK), 404)
    shown = server.post("/api/show", model="tiny", verbose=True).json()
    assert shown["template"] == TEMPLATE and shown["capabilities"] == ["completion", "tools", "embedding"]
    config = server.model.generator.target.model.model.config  # type: ignore[attr-defined]
    assert shown["model_info"]["llama.embedding_length"] == config.hidden_size
    assert shown["model_info"]["llama.context_length"] == config.max_position_embeddings
    assert "is not served here" in refusal(server.post("/api/show", model="x"), 404)
    assert httpx.get(f"{server.url}/api/version").json() == {"version": foresay.__version__}


def test_capabilities_of_a_model_that_reasons(chain: Running) -> None:
    assert chain.post("/api/show", model="tiny").json()["capabilities"] == [
        *("completion", "tools", "embedding", "thinking")
    ]


def test_tools_are_a_capability_if_requests_with_them_are_answered(tmp_path: Path) -> None:
    """A template that describes tools, and whose calls no format reads; one that the server's user chose reads them."""
    folder = chains.save(tmp_path, ["x"], TEMPLATE.replace("<tool_call>", "CALL"))
    generator = foresay.load(str(folder), num_draft_tokens=2)
    for tool_format, is_answered in (("auto", False), ("hermes", True)):
        with Running(generator, tool_format=tool_format) as running:
            names = running.post("/api/show", model="tiny").json()["capabilities"]
            assert ("tools" in names) == is_answered
            assert (running.chat(tools=[TIME], max_tokens=2).status_code == 200) == is_answered


def test_embeddings(server: Running) -> None:
    """The vectors of OpenAI's route; a text that does not fit is refused, not cut."""
    texts = ["hello", "and then"]
    expected = [one["embedding"] for one in server.post("/v1/embeddings", input=texts).json()["data"]]
    answer = server.post("/api/embed", model="tiny:latest", input=texts, truncate=True, keep_alive="5m", options={})
    body = answer.json()
    assert body["embeddings"] == expected and body["model"] == "tiny:latest" and body["total_duration"] > 0
    assert answer.headers[hints.HEADER.decode()] == "truncate, keep_alive, options"
    assert body["prompt_eval_count"] == sum(server.post("/tokenize", prompt=one).json()["count"] for one in texts)
    assert server.post("/api/embed", input="hello", dimensions=len(expected[0])).json()["embeddings"] == expected[:1]
    for wrong, name in (
        ({"dimensions": 3}, "dimensions"),
        ({"input": [1]}, "input"),
        ({"input": "x " * 9000}, "input"),
    ):
        assert refusal(server.post("/api/embed", **{"input": "x", **wrong})).startswith(name)
    assert "not served here" in refusal(server.post("/api/embed", model="x", input="x"), 404)


# Refusals


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/api/generate", {"prompt": "x", "raw": True, "format": "json"}, "format"),
        ("/api/generate", {"prompt": "x", "suffix": "y", "think": True}, "think"),
        ("/api/chat", {"messages": [{**TALK[0], "images": ["aGk="]}]}, "messages.0.images"),
        ("/api/chat", {"messages": [{"role": "developer", "content": "x"}]}, "messages.0.role"),
        ("/api/chat", {"messages": TALK, "tool_choice": "required"}, "tool_choice"),
        ("/api/chat", {"messages": TALK, "foresay": {"origins": True}}, "foresay.origins"),
        *(
            ("/api/chat", {"messages": TALK, "options": {name: value}}, f"options.{name}")
            for name, value in {
                "temperature": 3, "top_p": 2, "top_k": -5, "min_p": 2, "seed": -7, "stop": "", "num_predict": 0,
                "repeat_penalty": 0, "presence_penalty": 3, "frequency_penalty": "x", "mirostat": 1, "typical_p": 0.5,
                "repeat_last_n": -2, "vocab_only": True, "penalize_newline": False, "temprature": 1,
            }.items()
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Running, path: str, body: dict[str, Any], name: str) -> None:
    text = refusal(server.post(path, **body))
    assert text.startswith(name) or f"{name!r}" in text, text


def test_routes_that_clients_ask_at_their_start(server: Running) -> None:
    """Loaded models, the version in both APIs, a sign of life, and embeddings in the older form."""
    found = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert [one["name"] for one in found] == ["tiny:latest", "other-name:latest"]
    assert all(one["size"] > 0 == one["size_vram"] and one["expires_at"] > "9" for one in found)
    versions = [httpx.get(f"{server.url}{path}").json() for path in ("/version", "/api/version")]
    assert versions == [{"version": foresay.__version__}] * 2 and httpx.get(f"{server.url}/ping").status_code == 200
    older = server.post("/api/embeddings", model="tiny", prompt="hello there", keep_alive="5m")
    newer = server.post("/api/embed", model="tiny", input="hello there")
    assert older.json() == {"embedding": newer.json()["embeddings"][0]}
    assert older.headers[hints.HEADER.decode()] == "keep_alive"
    assert "prompt" in refusal(server.post("/api/embeddings", model="tiny", prompt=""))


def test_errors_have_ollamas_shape(serve: Any, server: Running) -> None:
    page = {"origin": "http://127.0.0.1"}
    assert "no content type" in refusal(httpx.post(f"{server.url}/api/chat", content=b"{}", headers=page), 415)
    assert "body is not JSON" in refusal(
        httpx.post(f"{server.url}/api/chat", content=b"{", headers={"content-type": "application/json"})
    )
    assert "Not Found" in refusal(httpx.get(f"{server.url}/api/blobs"), 404)
    assert "API key" in refusal(httpx.get(f"{serve(keys=frozenset({'k'})).url}/api/tags"), 401)
    long = [{"role": "user", "content": "x " * 5000}]
    assert "context" in refusal(server.post("/api/chat", messages=long))


def test_an_error_in_a_stream_is_its_last_line(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Output.take

    def broken(self: Output, chunk: Any) -> Any:
        if len(self.steps) == 1:
            raise foresay.ConfigError("broken")
        return take(self, chunk)

    monkeypatch.setattr(Output, "take", broken)
    found = lines(server, "/api/chat", messages=TALK, options={**GREEDY, "num_predict": 30})
    assert (
        found[-1] == {"error": "messages: broken"} and "done" in found[0] and not any(one.get("done") for one in found)
    )


def test_drafting_can_be_chosen_and_reported(server: Running) -> None:
    body = {"messages": TALK, "options": {**GREEDY, "num_predict": 12}}
    texts = set()
    for length in (1, 3):
        drafting = {"drafter": "suffix", "length": length, "stats": True}
        done = whole(server, "/api/chat", **body, foresay=drafting)
        texts.add(done["message"]["content"])
        assert done["foresay"]["passes"] >= 1
    assert texts == {whole(server, "/api/chat", **body, foresay={"drafter": "none"})["message"]["content"]}


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose tokenizer has tokens for filling in."""
    folder = tiny.save_filling(tmp_path_factory.mktemp("filler"))
    with Running(foresay.load(str(folder))) as running:
        yield running


def test_suffixes(filler: Running) -> None:
    done = whole(filler, "/api/generate", prompt="def f(", suffix="return", options={**GREEDY, "num_predict": 5})
    same = filler.post("/v1/completions", prompt="def f(", suffix="return", temperature=0, max_tokens=5)
    assert done["response"] == choice_of(same)["text"]
    assert filler.post("/api/show", model="tiny").json()["capabilities"] == ["completion", "insert", "embedding"]
