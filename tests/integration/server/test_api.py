"""The API as the official client uses it, compared with the library: the same tokens, whatever other requests run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import foresay
from foresay.server.chat_page import PAGE_FILES
from foresay.server.settings import ServerSettings
from helpers import tiny
from helpers.serving import TALK, TEXT, Running, events_of, sent
from helpers.waiting import wait_until


@pytest.fixture(scope="module")
def server(model: foresay.Generator) -> Iterator[Running]:
    with Running(model, max_body_bytes=20_000) as running:
        yield running


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


class TestChat:
    def asked(self, client: openai.OpenAI, most: int, **body: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=most, **{"temperature": 0, **body}
        )

    def test_what_the_library_writes(self, client: openai.OpenAI, model: foresay.Generator) -> None:
        first = model.generate(TALK, max_new_tokens=1).token_ids[0]
        params: dict[str, Any]
        for params in (
            {"temperature": 0.0}, {"temperature": 1.2, "seed": 5, "top_p": 0.9},
            {"logit_bias": {str(first): -100}, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        ):  # fmt: skip
            done = self.asked(client, 24, **params)
            bias = {int(token): float(value) for token, value in params.pop("logit_bias", {}).items()}
            wanted = model.generate(TALK, max_new_tokens=24, logit_bias=bias, **params)
            assert done.choices[0].message.content == wanted.text
            assert done.choices[0].finish_reason == "length" and done.model == "tiny"
            assert done.usage.completion_tokens == 24 and done.usage.prompt_tokens == len(wanted.prompt_token_ids)
        whole = model.generate(TALK, max_new_tokens=32).text
        stop = whole[10:12]
        cut = self.asked(client, 32, stop=[stop]).choices[0]
        assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"

    def test_a_stream_adds_up(self, client: openai.OpenAI, model: foresay.Generator) -> None:
        wanted = model.generate(TALK, max_new_tokens=24).text
        events = list(self.asked(client, 24, stream=True, stream_options={"include_usage": True}))
        assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == wanted
        assert events[0].choices[0].delta.role == "assistant" and len(events) > 3
        assert events[-2].choices[0].finish_reason == "length" and events[-1].usage.completion_tokens == 24
        assert len({e.id for e in events}) == 1

    def test_several_outputs_draw_numbers_of_their_own(self, client: openai.OpenAI, model: foresay.Generator) -> None:
        done = self.asked(client, 16, temperature=1.5, seed=3, n=3)
        wanted = model.generate([TALK] * 3, max_new_tokens=16, temperature=1.5, seed=3)
        assert [one.message.content for one in done.choices] == [one.text for one in wanted]
        assert len({one.message.content for one in done.choices}) == 3
        assert done.usage.completion_tokens == 48 and done.usage.prompt_tokens == len(wanted[0].prompt_token_ids)

    def test_log_probabilities(self, client: openai.OpenAI, model: foresay.Generator) -> None:
        found = self.asked(client, 8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        steps = model.generate(TALK, max_new_tokens=8, logprobs=2).steps
        wanted = [one.logprob for step in steps for one in step.logprobs or ()]
        assert [one.logprob for one in found] == pytest.approx(wanted) and len(found) == 8
        assert all(one.top_logprobs[0].logprob == pytest.approx(one.logprob) for one in found), "greedy"
        assert all(len(one.top_logprobs) == 2 for one in found)

    def test_our_own_field(self, client: openai.OpenAI, model: foresay.Generator) -> None:
        def asked(**ours: Any) -> Any:
            return self.asked(client, 24, extra_body={"foresay": {"stats": True, **ours}}).choices[0]

        plain, drafted = asked(drafter="none"), asked(drafter="prompt_lookup", length=2)
        assert plain.message.content == drafted.message.content == model.generate(TALK, max_new_tokens=24).text
        assert plain.foresay["drafted"] == 0 and plain.foresay["passes"] == 24
        assert drafted.foresay["drafted"] > 0 and max(n for n, _ in drafted.foresay["steps"]) == 2
        assert drafted.foresay["exact"] is True and asked(rule="lenience(2)").foresay["exact"] is False

    def test_json_of_a_schema(self, client: openai.OpenAI) -> None:
        """The same under every drafter, sampled and greedy, and in a stream."""
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        drafters = (
            {"drafter": "none"},
            {"drafter": "prompt_lookup(min_ngram=1)", "length": 4},
            {"drafter": "suffix", "length": 8},
        )
        for params in ({}, {"temperature": 1.0, "seed": 3}):
            found = [
                self.asked(client, 200, response_format=form, extra_body={"foresay": one}, **params).choices[0]
                for one in drafters
            ]
            assert len({one.message.content for one in found}) == 1 and {one.finish_reason for one in found} == {"stop"}
            value = json.loads(found[0].message.content)
            assert value["colour"] in ("red", "green") and 1 <= value["count"] <= 99 and len(value) == 2
        pieces: list[list[str]] = [[], []]
        for event in self.asked(client, 200, response_format=form, stream=True, n=2):
            pieces[event.choices[0].index].append(event.choices[0].delta.content or "")
        assert all(json.loads("".join(some))["colour"] in ("red", "green") for some in pieces)


class TestCompletions:
    def test_texts_ids_and_lists(self, client: openai.OpenAI, model: foresay.Generator) -> None:
        ids = model.generate(TEXT, max_new_tokens=1).prompt_token_ids
        wanted = model.generate(TEXT, max_new_tokens=16).text
        for prompt in (TEXT, ids, [TEXT], [ids, ids]):
            done = client.completions.create(model="other-name", prompt=prompt, temperature=0)
            assert {one.text for one in done.choices} == {wanted}, "16 tokens by default"
            assert [one.index for one in done.choices] == list(range(2 if prompt == [ids, ids] else 1))
        events = list(client.completions.create(model="tiny", prompt=[TEXT, "and"], temperature=0, stream=True, n=2))
        for place, text in enumerate([wanted, wanted, *[model.generate("and", max_new_tokens=16).text] * 2]):
            assert "".join(e.choices[0].text for e in events if e.choices[0].index == place) == text


def test_paths_and_sizes(raw: httpx.Client) -> None:
    assert raw.get("/v1/nothing").status_code == 404
    large = raw.post("/v1/completions", json={"prompt": "x" * 30_000})
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
    pieces = (b'{"prompt": "' if not i else b"x" * 1000 for i in range(30))
    assert raw.post("/v1/completions", content=pieces).status_code == 413, "whatever its length field"


class TestTelling:
    def test_models_tokens_and_predictions(self, raw: httpx.Client, model: foresay.Generator) -> None:
        listed = raw.get("/v1/models").json()["data"]
        assert [(one["id"], one["root"]) for one in listed] == [("tiny", "tiny"), ("other-name", "tiny")]
        assert all(1.7e9 < one["created"] <= time.time() for one in listed)
        assert raw.get("/v1/models/tiny").json()["max_model_len"] == 4096
        ids = raw.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
        assert raw.post("/detokenize", json={"tokens": ids}).json()["prompt"] == TEXT
        assert raw.post("/tokenize", json={"messages": TALK}).json()["count"] > 4
        assert raw.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
        said = raw.post("/predict", json={"prompt": TEXT, "max_tokens": 12}).json()
        assert said == {"text": model.generate(TEXT, max_new_tokens=12).text}

    def test_a_streams_pieces_say_who_wrote_them(self, raw: httpx.Client) -> None:
        body = {
            "messages": TALK,
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
            "foresay": {"origins": True, "stats": True},
        }
        choices = [one["choices"][0] for one in events_of(raw.post("/v1/chat/completions", json=body))]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""} and "foresay" not in choices[0]
        assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "length"
        told = [one["foresay"] for one in choices[1:-1]]
        pieces = [piece for one in told for piece in one["origins"]]
        assert "".join(text for text, _ in pieces) == "".join(one["delta"].get("content", "") for one in choices)
        assert {origin for _, origin in pieces} <= {"draft", "residual", "bonus"} and len(pieces) > 8
        assert sum(one["tokens"] for one in told) == 24
        assert choices[-1]["foresay"]["passes"] == len(told)

    def test_the_page_needs_nothing_from_elsewhere(self, raw: httpx.Client) -> None:
        page = raw.get("/")
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert {f"/{name}" for name in named} | {"/"} == set(PAGE_FILES)
        for name in ["", *named]:
            found = raw.get(f"/{name}")
            policy = found.headers["content-security-policy"].split("; ")
            assert found.status_code == 200 and {"default-src 'none'", "connect-src 'self'"} <= set(policy)
            assert all(re.fullmatch(r"[a-z-]+ '(none|self|script)'", one) for one in policy), "no source but the server"
            assert found.headers["content-type"].split(";")[0] in {"text/html", "text/css", "text/javascript"}

    def test_the_dashboard_asks_for_what_is_counted(self, raw: httpx.Client) -> None:
        page = json.loads((Path(__file__).parents[3] / "docs" / "how-to" / "grafana.json").read_text(encoding="utf-8"))
        asked = {
            name
            for panel in page["panels"]
            for target in panel["targets"]
            for name in re.findall(r"foresay_\w+", target["expr"])
        }
        said = raw.get("/metrics").text
        for name in asked:
            assert re.search(
                rf"^# TYPE {re.sub('_(bucket|sum|count|total)$', '', name)}(_total)? ", said, re.MULTILINE
            ), name

    def test_metrics_count_what_was_done(self, model: foresay.Generator) -> None:
        with Running(model) as running:
            with httpx.Client(base_url=running.url, timeout=60) as raw:
                body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "foresay": {"stats": True}}
                stats = raw.post("/v1/completions", json=body).json()["choices"][0]["foresay"]
                raw.post("/v1/completions", json={"prompt": TEXT, "nothing": 1})
                text = raw.get("/metrics").text
            found = {
                line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if not line.startswith("#")
            }
            assert found["foresay_generation_tokens_total"] == 24
            assert found["foresay_spec_decode_num_draft_tokens_total"] == stats["drafted"]
            assert found["foresay_spec_decode_num_accepted_tokens_total"] == stats["accepted"] > 0
            assert found['foresay_request_success_total{finished_reason="length"}'] == 1
            assert found['foresay_request_failure_total{status="400"}'] == 1
            assert found["foresay_time_to_first_token_seconds_count"] == 1
            assert found["foresay_inter_token_latency_seconds_count"] == 24 - _first(stats)


def _first(stats: dict[str, Any]) -> int:
    """Tokens of the first pass."""
    return int(stats["steps"][0][1]) + 1


class TestManyAtOnce:
    def test_each_answer_is_the_librarys_under_load(self, server: Running, model: foresay.Generator) -> None:
        prompts = [f"{TEXT} {i}" for i in range(24)]

        async def all_of_them() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                done = await asyncio.gather(
                    *(
                        client.completions.create(
                            model="tiny", prompt=prompt, max_tokens=8 + i % 9, temperature=1.0, seed=i,
                            extra_body={"foresay": {"rule": "coupled"}},
                        )
                        for i, prompt in enumerate(prompts)
                    )
                )  # fmt: skip
            return [one.choices[0].text for one in done]

        coupled = foresay.change(model, rule="coupled")
        wanted = [
            coupled.generate(prompt, max_new_tokens=8 + i % 9, temperature=1.0, seed=i).text
            for i, prompt in enumerate(prompts)
        ]
        assert asyncio.run(all_of_them()) == wanted

    @pytest.mark.parametrize("stream", [False, True])
    def test_who_leaves_frees_the_row(self, stream: bool, server: Running) -> None:
        body = {"prompt": TEXT, "max_tokens": 3900, "temperature": 0, "stream": stream}

        assert server.count("num_requests_running") == 0
        with sent(server.port, body):
            wait_until(lambda: server.count("num_requests_running") > 0, "it is decoded")
        wait_until(lambda: server.count("num_requests_running") == 0, "its row is free")


def test_the_page_of_the_docs(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "start" / "serve.md").read_text(encoding="utf-8")
    running = serve()
    running.service.entries[0].names[:] = ["smollm2-135m"]
    page = page.replace("http://127.0.0.1:8000", running.url)
    (command,) = re.findall(r"^curl .*$", page, re.MULTILINE)
    url, body = (shlex.split(command)[i] for i in (2, -1))
    said = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=60).json()
    assert said["choices"][0]["text"]
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/start/serve.md", "exec"), {})
    assert "target passes without a drafter" in capsys.readouterr().out


def test_what_the_command_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Addresses beyond this machine without keys, files and ports; and to serve without the packages that it needs."""
    shell = tiny.Shell(monkeypatch, capsys)
    for args, said in (
        (["--host", "0.0.0.0"], "reachable from other machines"),
        (["--keys-file", str(tmp_path / "none")], "--keys-file"),
        (["--port", "70000"], "--port 70000"),
    ):
        assert said in shell.refused("serve", "--model", "nowhere", *args)
    assert ServerSettings(host="0.0.0.0", keys=frozenset({"x"})).host == "0.0.0.0"
    assert ServerSettings(host="0.0.0.0", open_to_all=True).open_to_all
    for missing in ("fastapi", "uvicorn", "prometheus_client"):
        with monkeypatch.context() as patch:
            patch.setattr(foresay, "server", foresay.server)  # the package is imported again
            for name in [name for name in sys.modules if name.startswith("foresay.server")]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, missing, None)
            said = shell.refused("serve", "--model", "nowhere")
        assert f"server needs {missing}: pip install 'foresay[server]'" in said
