"""Ollama's API: requests in the shapes of ollama-python, Open WebUI and Continue, lines of streams, and refusals."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from foresay.server.adapters.ollama_fields import OllamaChatRequest
from foresay.server.fields import read
from helpers import chains, tiny
from helpers.serving import Running, choice_of
from helpers.tool_chats import TALK, TEMPLATE, TIME, WEATHER

COUNTS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count", "eval_count")
GREEDY = {"temperature": 0}
DAY = {
    "properties": {"day": {"enum": ["monday"]}}, "type": "object", "required": ["day"], "additionalProperties": False,
}  # fmt: skip


def lines(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which is the default."""
    answer = running.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def whole(running: Running, path: str, **body: Any) -> dict[str, Any]:
    return running.answer(path, stream=False, **body)


def refusal(answer: httpx.Response, status: int = 400) -> str:
    """The text of an error in Ollama's shape."""
    body = answer.json()
    assert answer.status_code == status and body.keys() == {"error"} and isinstance(body["error"], str), answer.text
    return str(body["error"])


def ignored_by(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-foresay-ignored", "")


def text_of(running: Running, **body: Any) -> str:
    """The text of the same request in OpenAI's API."""
    return str(choice_of(running.chat(**body))["message"]["content"])


def count(running: Running, **body: Any) -> int:
    return int(running.answer("/tokenize", **body)["count"])


def test_a_chat_of_ollama_python(server: Running) -> None:
    """The client sends every field that is not None, and reads each line as a response."""
    body: dict[str, Any] = {"model": "tiny", "messages": TALK, "tools": [], "options": {**GREEDY, "num_predict": 12}}
    found, text = lines(server, "/api/chat", **body), text_of(server, temperature=0, max_tokens=12)
    assert "".join(one["message"]["content"] for one in found) == text != ""
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True] and len(found) > 2
    for one in found:
        assert one["model"] == "tiny" and one["message"]["role"] == "assistant"
        assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
    last = found[-1]
    assert last["prompt_eval_count"] == count(server, messages=TALK)
    assert all(isinstance(last[name], int) for name in COUNTS) and not any(name in found[0] for name in COUNTS)
    assert last["eval_duration"] > 0 < last["prompt_eval_duration"] and last["load_duration"] == 0
    assert abs(last["prompt_eval_duration"] + last["eval_duration"] - last["total_duration"]) <= 2, "in nanoseconds"
    assert last["total_duration"] < 60e9
    answer = server.post("/api/chat", **body, stream=False)
    assert answer.headers["content-type"] == "application/json"
    done = answer.json()
    assert done["message"] == {"role": "assistant", "content": text} and done.keys() == last.keys()
    for one in (last, done):
        assert (one["done"], one["done_reason"], one["eval_count"]) == (True, "length", 12)


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
    assert ignored_by(answer) == "keep_alive" and answer.json()["model"] == "tiny:latest"
    assert answer.json()["message"]["content"] == text_of(server, messages=plain, temperature=0, max_tokens=8)


def test_a_chat_of_continue(server: Running) -> None:
    options = {"num_predict": 6, "stop": ["<|im_end|>"], "num_ctx": 4096, "temperature": 0, "top_k": 5, "num_thread": 2}
    answer = server.post("/api/chat", model="tiny", messages=TALK, options=options, keep_alive=1800, think=None)
    assert ignored_by(answer) == "options.num_ctx, options.num_thread, keep_alive"
    named = {"model": "tiny", "prompt": "def f(", "raw": True, "stream": False, "options": {**options, "seed": -1}}
    done = server.post("/api/generate", **named, keep_alive=-1)
    assert done.json()["response"] == choice_of(server.complete("def f(", max_tokens=6, top_k=5))["text"]
    assert "keep_alive" not in ignored_by(done), "the model stays"
    assert server.answer("/api/show", name="tiny")["model_info"]["llama.context_length"] > 0


def chat_of(**options: Any) -> dict[str, Any]:
    """The fields of the chat request of one in this API."""
    body = json.dumps({"messages": TALK, "options": options}).encode()
    return read(OllamaChatRequest, body).chat().model_dump(exclude_none=True)


def test_every_option_is_the_field_of_openai() -> None:
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({name: value}, {name: value}) for name, value in (
            ("top_k", 4), ("top_p", 0.5), ("min_p", 0.2), ("seed", 8), ("temperature", 0.7), ("typical_p", 1.0),
            ("presence_penalty", 0.7), ("frequency_penalty", 2.0), ("stop", ["a", "b"]))),
        ({"num_predict": 3}, {"max_tokens": 3}), ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}),
        ({"repeat_penalty": 1.9, "presence_penalty": 2.0, "repeat_last_n": 0}, off),
        ({"repeat_penalty": 1.9, "repeat_last_n": -1}, {"repetition_penalty": 1.9}),
        ({"tfs_z": 1, "mirostat": 0, "penalize_newline": True, "seed": -1, "num_predict": -1}, {}),
    ]  # fmt: skip
    for options, fields in pairs:
        assert chat_of(**options) == chat_of() | fields, options


def test_reasoning_text_and_calls(chain: Running) -> None:
    """A call is one line, whose arguments are an object; calls are numbered."""
    body: dict[str, Any] = {"messages": TALK, "tools": [WEATHER, {"function": TIME["function"]}], "options": GREEDY}
    done = whole(chain, "/api/chat", **body)
    message, reasoning = done["message"], "What is asked?"
    assert (message["thinking"], message["content"], done["done_reason"]) == (reasoning, "Let me look.", "stop")
    functions = [one["function"] for one in message["tool_calls"]]
    assert functions == [
        {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}, {"index": 1, "name": "time", "arguments": {}},
    ]  # fmt: skip
    assert message["tool_calls"][0]["id"] != message["tool_calls"][1]["id"]
    found = [one["message"] for one in lines(chain, "/api/chat", **body)]
    assert "".join(one.get("thinking", "") for one in found) == reasoning
    assert "".join(one["content"] for one in found) == "Let me look."
    sent = [[one["function"] for one in each["tool_calls"]] for each in found if "tool_calls" in each]
    assert sent == [[one] for one in functions]
    talk = [*TALK, message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    assert whole(chain, "/api/chat", **{**body, "messages": talk})["message"]["content"] == "Let me look."
    generated = whole(chain, "/api/generate", prompt="hello there", options=GREEDY)
    assert generated["thinking"] == reasoning and generated["response"].startswith("Let me look.")
    shown = chain.answer("/api/show", model="tiny")
    assert shown["capabilities"] == ["completion", "tools", "embedding", "thinking"]


def test_think(chain: Running, serve: Any, random_model: Path) -> None:
    """True is a hint for a template without the variable; false and a level are its variables, or are refused."""
    assert whole(chain, "/api/chat", messages=TALK, think=True)["message"]["thinking"] == "What is asked?"
    assert refusal(chain.post("/api/chat", messages=TALK, think=False)).startswith("think: the chat template")
    generator: Any = foresay.load(str(random_model))
    generator.tokenizer.chat_template = "{% if enable_thinking %}on{% endif %}{{ reasoning_effort }}" + TEMPLATE
    running, options = serve(generator), {"num_predict": 1}
    counts = [
        whole(running, "/api/chat", messages=TALK, think=think, options=options)["prompt_eval_count"]
        for think in (None, False, True, "low")
    ]
    assert counts[0] == counts[1] < counts[2] == counts[0] + 2 < counts[3]
    assert "think" in refusal(running.post("/api/chat", messages=TALK, think="much"))


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
    scored = {"logprobs": True, "top_logprobs": 2}
    body: dict[str, Any] = {"messages": TALK, **scored, "options": {**GREEDY, "num_predict": 9}}
    expected = choice_of(server.chat(**scored, temperature=0, max_tokens=9))["logprobs"]["content"]
    found = [entry for one in lines(server, "/api/chat", **body) for entry in one.get("logprobs", ())]
    assert found == expected == whole(server, "/api/chat", **body)["logprobs"] and len(expected) == 9
    raw = {"prompt": "hello", "raw": True, "logprobs": True, "options": {"num_predict": 3}}
    assert len(whole(server, "/api/generate", **raw)["logprobs"]) == 3


def test_generate_is_a_chat_of_one_turn(server: Running) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "hello there", "options": {**GREEDY, "num_predict": 8}}
    text = text_of(server, temperature=0, max_tokens=8)
    assert whole(server, "/api/generate", **body)["response"] == text
    found = lines(server, "/api/generate", **body, system="", template="", images=[], context=[], suffix="")
    assert "".join(one["response"] for one in found) == text and "message" not in found[0]
    talk = [{"role": "system", "content": "be brief"}, *TALK]
    briefly = text_of(server, messages=talk, temperature=0, max_tokens=8)
    assert whole(server, "/api/generate", **body, system="be brief")["response"] == briefly


def test_raw_prompts_end_with_the_context(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, tiny.llama(context=64), chat=True)
    with Running(foresay.load(str(folder))) as running:
        options = {"temperature": 1, "seed": 1, "num_predict": -1}
        done = whole(running, "/api/generate", prompt="and", raw=True, options=options)
        assert done["done_reason"] == "stop" or done["prompt_eval_count"] + done["eval_count"] == 64
        assert done["eval_count"] > 16, "OpenAI's default does not apply"
        text = refusal(running.post("/api/generate", prompt="and", suffix="x", stream=False))
        assert text.startswith("suffix: this model's tokenizer has no tokens")


def test_loading(server: Running) -> None:
    """A request without a prompt loads the model, which is loaded; one that unloads it is refused."""
    loaded = server.answer("/api/chat", model="tiny", messages=[])
    assert loaded["message"] == {"role": "assistant", "content": ""}
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert server.answer("/api/generate", model="tiny")["response"] == ""
    for never in (0, "0", "0s", 0.0):
        message = refusal(server.post("/api/generate", model="tiny", prompt="", keep_alive=never))
        assert message.startswith(f"keep_alive={never!r}")
    assert not ignored_by(server.post("/api/generate", model="tiny", keep_alive="-1m"))


def test_models_and_their_names(server: Running) -> None:
    listed, running = (server.get(f"/api/{name}").json()["models"] for name in ("tags", "ps"))
    for models in (listed, running):
        assert [one["name"] for one in models] == ["tiny:latest", "other-name:latest"]
    assert all(one["size"] > 0 == one["size_vram"] and one["expires_at"] > "9" for one in running)
    assert listed[0]["model"] == "tiny:latest" and listed[0]["details"]["family"] == "llama"
    assert listed[0]["size"] == server.count("weight_bytes") > 0 and len(listed[0]["digest"]) == 64
    assert datetime.fromisoformat(listed[0]["modified_at"]).tzinfo is not None
    for name in ("tiny", "tiny:latest", "other-name", "other-name:latest"):
        assert whole(server, "/api/chat", model=name, messages=TALK, options={"num_predict": 1})["model"] == name
    for name in ("tiny:8b", "latest", "tin", ":latest"):
        assert "is not served here" in refusal(server.post("/api/chat", model=name, messages=TALK), 404)
    for path, body in (("show", {}), ("embed", {"input": "x"}), ("generate", {})):
        assert "is not served here" in refusal(server.post(f"/api/{path}", model="x", **body), 404)
    shown = server.answer("/api/show", model="tiny", verbose=True)
    assert shown["template"] == TEMPLATE and shown["capabilities"] == ["completion", "tools", "embedding"]
    config = server.model.generator.target.model.model.config  # type: ignore[attr-defined]
    assert shown["model_info"]["llama.embedding_length"] == config.hidden_size
    assert shown["model_info"]["llama.context_length"] == config.max_position_embeddings
    versions = [server.get(path).json() for path in ("/version", "/api/version")]
    assert versions == [{"version": foresay.__version__}] * 2 and server.get("/ping").status_code == 200


def test_tools_are_a_capability_if_requests_with_them_are_answered(serve: Any, tmp_path: Path) -> None:
    """A template that describes tools, and whose calls no format reads; one that the server's user chose reads them."""
    generator = foresay.load(str(chains.save(tmp_path, ["x"], TEMPLATE.replace("<tool_call>", "CALL"))))
    for tool_format, is_answered in (("auto", False), ("hermes", True)):
        running = serve(generator, tool_format=tool_format)
        assert ("tools" in running.answer("/api/show", model="tiny")["capabilities"]) == is_answered
        assert (running.chat(tools=[TIME], max_tokens=2).status_code == 200) == is_answered


def test_embeddings(server: Running) -> None:
    """The vectors of OpenAI's route, also by the route's older form; a text that does not fit is refused, not cut."""
    texts = ["hello", "and then"]
    expected = [one["embedding"] for one in server.answer("/v1/embeddings", input=texts)["data"]]
    answer = server.post("/api/embed", model="tiny:latest", input=texts, truncate=True, keep_alive="5m", options={})
    body = answer.json()
    assert body["embeddings"] == expected and body["model"] == "tiny:latest" and body["total_duration"] > 0
    assert ignored_by(answer) == "truncate, keep_alive, options"
    assert body["prompt_eval_count"] == sum(count(server, prompt=one) for one in texts)
    assert server.answer("/api/embed", input="hello", dimensions=len(expected[0]))["embeddings"] == expected[:1]
    older = server.post("/api/embeddings", model="tiny", prompt="hello", keep_alive="5m")
    assert ignored_by(older) == "keep_alive" and older.json() == {"embedding": expected[0]}
    assert "prompt" in refusal(server.post("/api/embeddings", model="tiny", prompt=""))


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/api/generate", {"prompt": "x", "raw": True, "format": "json"}, "format"),
        ("/api/generate", {"prompt": "x", "suffix": "y", "think": True}, "think"),
        ("/api/embed", {"input": "x", "dimensions": 3}, "dimensions"), ("/api/embed", {"input": [1]}, "input"),
        ("/api/embed", {"input": "x " * 9000}, "input"),
        *(("/api/chat", {"messages": TALK, **more}, name) for more, name in (
            ({"messages": [{**TALK[0], "images": ["aGk="]}]}, "messages.0.images"),
            ({"messages": [{"role": "developer", "content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"), ({"keep_alive": "soon"}, "keep_alive"),
            ({"tool_choice": "required"}, "tool_choice"), ({"foresay": {"origins": True}}, "foresay.origins"),
            ({"top_logprobs": 2}, "top_logprobs"),
        )),
        *(
            ("/api/chat", {"messages": TALK, "options": {name: value}}, f"options.{name}")
            for name, value in {
                "temperature": 3, "top_p": 2, "top_k": -5, "min_p": 2, "seed": -7, "stop": "", "num_predict": 0,
                "repeat_penalty": 0, "presence_penalty": 3, "frequency_penalty": "x", "mirostat": 1, "typical_p": 0.5,
                "repeat_last_n": -2, "vocab_only": True, "penalize_newline": False, "temprature": 1,
            }.items()
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_refusals_name_the_field(server: Running, path: str, body: dict[str, Any], name: str) -> None:
    text = refusal(server.post(path, **body))
    assert text.startswith(name) or f"{name!r}" in text, text


def test_errors_have_ollamas_shape(serve: Any, server: Running) -> None:
    def sent(content: bytes, **headers: str) -> httpx.Response:
        return server.request("POST", "/api/chat", content=content, headers=headers)

    assert "no content type" in refusal(sent(b"{}", origin="http://127.0.0.1"), 415)
    assert "body is not JSON" in refusal(sent(b"{"))
    assert "Not Found" in refusal(server.get("/api/blobs"), 404)
    assert "API key" in refusal(serve(keys=frozenset({"k"})).get("/api/tags"), 401)


def test_drafting_can_be_chosen_and_reported(server: Running) -> None:
    body, texts = {"messages": TALK, "options": {**GREEDY, "num_predict": 12}}, set()
    for drafting in ({"drafter": "suffix", "length": 1}, {"drafter": "suffix", "length": 3}, {"drafter": "none"}):
        done = whole(server, "/api/chat", **body, foresay={**drafting, "stats": True})
        texts.add(done["message"]["content"])
        assert done["foresay"]["passes"] >= 1
    assert len(texts) == 1
