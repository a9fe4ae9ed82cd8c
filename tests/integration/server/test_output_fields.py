"""Constraints as clients of OpenAI, vLLM and llama.cpp send them: the text of plain decoding, which matches, by either route.

Schemas that would occupy the server are refused, no other request waits for them, and the process can end.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from foresay.text import client_grammars, schema_compiler
from foresay.text.schema_compiler import TrialLimits
from helpers.schema_bombs import PRODUCT
from helpers.serving import TALK, Running, assert_refused, choice_of, events_of, sent
from helpers.tool_chats import TIME
from helpers.waiting import wait_until

SCHEMA = {"enum": ["red", "green"]}
GBNF = 'root ::= "(" root ")" | word\nword ::= [a-c]{2,4} "!"'
NESTED = r"(\(*)[a-c]{2,4}!(\)*)"
CHOICES = ["the number is seven", "the number is eight"]
WORD = r"[a-f]{3}-\d{2}\.?"
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORM}, '"(red|green)"'),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"(red|green)"'),
    ({"structured_outputs": {"json": SCHEMA}}, '"(red|green)"'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}}, '"(red|green)"'),
    ({"structured_outputs": {"regex": WORD, "json_object": False}}, WORD),
    ({"structured_outputs": {"choice": CHOICES}}, "|".join(CHOICES)),
    ({"structured_outputs": {"grammar": GBNF}}, NESTED),
    ({"structured_outputs": {"grammar": f'start: "<" /{WORD}/ ">"'}}, f"<{WORD}>"),
    ({"guided_json": SCHEMA}, '"(red|green)"'),
    ({"guided_regex": WORD, "guided_decoding_backend": "outlines"}, WORD),
    ({"guided_choice": CHOICES, "response_format": {"type": "text"}}, "|".join(CHOICES)),
    ({"guided_grammar": GBNF}, NESTED),
    ({"grammar": GBNF}, NESTED),
    ({"json_schema": SCHEMA}, '"(red|green)"'),
]
BOTH = ["chat/completions", "completions"]
DRAFTERS: list[dict[str, Any]] = [
    {"drafter": "none"},
    {"drafter": "suffix", "length": 8},
    {"drafter": "prompt_lookup(min_ngram=1)", "length": 3},
]


@pytest.fixture(autouse=True)
def _no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself reads no constraint: a process with limits does."""
    monkeypatch.setattr(client_grammars, "KINDS", {})


def outputs(running: Running, route: str, **body: Any) -> tuple[list[str], int]:
    """The texts of a request's two outputs, and its passes."""
    given = {"messages": TALK} if route == "chat/completions" else {"prompt": "hello there"}
    choices = running.answer(f"/v1/{route}", **given, n=2, max_tokens=200, **body)["choices"]
    assert {one["finish_reason"] for one in choices} == {"stop"}
    texts = [one["message"]["content"] if "message" in one else one["text"] for one in choices]
    return texts, sum(one["foresay"]["passes"] for one in choices)


@pytest.mark.parametrize(
    ("fields", "pattern"), SPELLINGS, ids=[f"{next(iter(one))} {i}" for i, (one, _) in enumerate(SPELLINGS)]
)
def test_the_text_matches_and_is_that_of_plain_decoding(fields: dict[str, Any], pattern: str, server: Running) -> None:
    """By each route; a text of the Responses API, which has vLLM's object alone, is that of a chat."""
    sampled, greedy = {"temperature": 1.2, "seed": 5}, {"temperature": 0}
    for route, params, some in (
        (BOTH[0], sampled, DRAFTERS), (BOTH[0], greedy, DRAFTERS[:2]), (BOTH[1], sampled, DRAFTERS[:2]),
    ):  # fmt: skip
        found = [outputs(server, route, foresay={"stats": True, **one}, **params, **fields)[0] for one in some]
        assert all(one == found[0] for one in found)
        for text in found[0]:
            match = re.fullmatch(pattern, text)
            assert match and (pattern != NESTED or len(match[1]) == len(match[2])), text
    if "structured_outputs" in fields:
        chat = server.chat(temperature=0, **fields).json()["choices"][0]["message"]["content"]
        for one in DRAFTERS:
            answer = server.answer("/v1/responses", input=TALK[1:], temperature=0, foresay=one, **fields)
            assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", chat)


def test_each_output_of_a_stream_matches(server: Running) -> None:
    pieces = ["", ""]
    for event in events_of(server.chat(response_format=FORM, stream=True, n=2)):
        pieces[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content") or ""
    assert all(json.loads(one) in ("red", "green") for one in pieces)


def test_forced_tokens_of_a_choice_are_drafted(server: Running) -> None:
    plain, drafted = (
        outputs(server, "completions", guided_choice=CHOICES, temperature=0, foresay={"stats": True, **one})[1]
        for one in DRAFTERS[:2]
    )
    assert drafted < plain / 2


def test_an_answer_after_reasoning(chain: Running) -> None:
    """Its grammar stands within that of the message; a call is still possible where tools are offered."""
    for fields in ({"guided_choice": ["Let me look", "No"]}, {"grammar": 'root ::= "Let me look" | "No"'}):
        for drafting in ({"drafter": "none"}, {}):
            done = chain.chat(temperature=0, foresay=drafting, **fields).json()["choices"][0]
            assert done["message"]["reasoning_content"] == "What is asked?"
            assert done["message"]["content"] == "Let me look" and done["finish_reason"] == "stop"
    called = chain.chat(temperature=0, tools=[TIME], guided_regex="[0-9]").json()["choices"][0]["message"]
    assert called.get("tool_calls") or re.fullmatch("[0-9]", called["content"])


GOOD = {"enum": ["yes", "no"]}


def is_compiling() -> bool:
    """Whether a process that tries schemas has a fork at work."""
    with suppress(psutil.NoSuchProcess):
        tried = [one for one in psutil.Process().children() if "foresay.text.grammar_process" in one.cmdline()]
        return any(one.children() for one in tried)
    return False


def wanted(schema: Any) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": TALK, "max_tokens": 20, "response_format": named}


def ask(running: Running, schema: Any) -> httpx.Response:
    return running.chat(**wanted(schema))


def test_schemas_that_take_too_much_are_refused_and_others_answered(serve: Any) -> None:
    running, us = serve(), psutil.Process()
    before = us.memory_info().rss
    assert_refused(ask(running, {"type": "integer", "multipleOf": 9999991}), "response_format", "multipleOf=9999991")
    with ThreadPoolExecutor(4) as threads:
        bad = [threads.submit(ask, running, PRODUCT) for _ in range(2)]
        good = [threads.submit(ask, running, GOOD) for _ in range(3)]
        assert {one.result().status_code for one in good} == {200}
        for one in bad:
            assert_refused(one.result(), "response_format", "to compile; give a simpler one")
    assert choice_of(ask(running, GOOD))["message"]["content"] in ('"yes"', '"no"')
    assert us.memory_info().rss - before < 500 << 20


def test_an_open_request_starts_no_process_once_the_server_ends(serve: Any) -> None:
    running, before = serve(), psutil.Process().children()
    running.model.stop_compiling()
    assert ask(running, GOOD).status_code == 503 and psutil.Process().children() == before


def test_a_client_that_leaves_and_a_server_that_ends_take_their_schemas_along(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, endless = serve(), TrialLimits(cpu_s=1e6, wall_s=1e6, memory_bytes=8 << 30)
    monkeypatch.setattr(schema_compiler, "TrialLimits", lambda: endless)
    with sent(running.port, wanted(PRODUCT), "/v1/chat/completions"):
        wait_until(is_compiling, "a schema is compiled")
    wait_until(lambda: not is_compiling(), "the compilation is ended")
    assert ask(running, GOOD).status_code == 200
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, running, PRODUCT)
        wait_until(is_compiling, "a schema is compiled")
        running.drain()
        assert answer.result().status_code == 503
    wait_until(lambda: not is_compiling(), "the compilation is ended")
