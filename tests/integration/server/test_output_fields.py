"""Constraints as clients of OpenAI, vLLM and llama.cpp send them: the text of plain decoding, which matches, by either route."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from foresay.text import client_grammars
from helpers.serving import TALK, Running, assert_refused
from helpers.tool_chats import TIME

SCHEMA = {"enum": ["red", "green"]}
GBNF = 'root ::= "(" root ")" | word\nword ::= [a-c]{2,4} "!"'
NESTED = r"(\(*)[a-c]{2,4}!(\)*)"
CHOICES = ["the number is seven", "the number is eight"]
WORD = r"[a-f]{3}-\d{2}\.?"
SPELLINGS: list[tuple[dict[str, Any], str]] = [
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
DRAFTERS: list[dict[str, Any]] = [
    {"drafter": "none"},
    {"drafter": "suffix", "length": 8},
    {"drafter": "prompt_lookup(min_ngram=1)", "length": 3},
]


def outputs(running: Running, route: str, **body: Any) -> tuple[list[str], int]:
    """The texts of a request's two outputs, and its passes."""
    given = {"messages": TALK} if route == "chat/completions" else {"prompt": "hello there"}
    answer = running.post(f"/v1/{route}", **given, n=2, max_tokens=200, **body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {one["finish_reason"] for one in choices} == {"stop"}
    texts = [one["message"]["content"] if "message" in one else one["text"] for one in choices]
    return texts, sum(one["foresay"]["passes"] for one in choices)


@pytest.mark.parametrize(("fields", "pattern"), SPELLINGS)
def test_the_server_itself_reads_no_constraint(
    fields: dict[str, Any], pattern: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with limits does: here are no readers of any kind."""
    monkeypatch.setattr(client_grammars, "KINDS", {})
    (text, _), _ = outputs(server, "chat/completions", foresay={"stats": True}, **fields)
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(("fields", "pattern"), SPELLINGS)
def test_the_text_matches_and_is_that_of_plain_decoding(
    fields: dict[str, Any], pattern: str, route: str, server: Running
) -> None:
    for params in ({"temperature": 0}, {"temperature": 1.2, "seed": 5}):
        found = [outputs(server, route, foresay={"stats": True, **one}, **params, **fields)[0] for one in DRAFTERS]
        assert found[0] == found[1] == found[2]
        for text in found[0]:
            match = re.fullmatch(pattern, text)
            assert match, text
            assert pattern != NESTED or len(match[1]) == len(match[2])


@pytest.mark.parametrize(
    ("value", "pattern"),
    [(one["structured_outputs"], pattern) for one, pattern in SPELLINGS if "structured_outputs" in one],
)
def test_the_responses_api_takes_the_same_object(value: dict[str, Any], pattern: str, server: Running) -> None:
    """Its text is that of a chat, with and without drafts."""
    for params in ({"temperature": 0}, {"temperature": 1.2}):
        texts = []
        for one in DRAFTERS:
            body = {"input": TALK[1:], "foresay": one, "structured_outputs": value, **params}
            answer = server.post("/v1/responses", **body)
            assert answer.status_code == 200 and answer.json()["status"] == "completed", answer.text
            texts.append(answer.json()["output"][0]["content"][0]["text"])
        assert all(re.fullmatch(pattern, text) for text in texts), texts
        if not params["temperature"]:
            chat = server.chat(messages=TALK[1:], structured_outputs=value, **params).json()["choices"][0]["message"]
            assert texts == [chat["content"]] * len(DRAFTERS)


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


def outputs_of(**members: Any) -> dict[str, Any]:
    return {"structured_outputs": members}


BOTH = ["chat/completions", "completions"]
CALL = {"tool_choice": "required", "tools": [{"type": "function", "name": "time"}]}
REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    *(([*BOTH, "responses"], outputs_of(**{name: value}), f"structured_outputs.{name}") for name, value in (
        ("regex", "[.*"), ("regex", ""), ("choice", []), ("json", "{"), ("structural_tag", "{}"))),
    *(([*BOTH, "responses"], outputs_of(json={}, **{name: value}), f"structured_outputs.{name}") for name, value in (
        ("regex", "a"), ("whitespace_pattern", " "), ("disable_any_whitespace", True))),
    *(([*BOTH, "responses"], outputs_of(**members), "structured_outputs") for members in ({}, {"json_object": False})),
    *((BOTH, {name: value}, name) for name, value in (
        ("guided_json", "[]"), ("guided_json", {"type": "nothing"}), ("grammar", 'root ::= "a" other'),
        ("grammar", "start: missing"), ("guided_whitespace_pattern", " "), ("guided_regex", "a{1000}{1000}"))),
    (BOTH, {"guided_regex": "a", "grammar": GBNF}, "grammar"),
    (BOTH, {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    (BOTH, {"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    (["responses"], {"guided_regex": "a"}, "guided_regex"),
    (["responses"], outputs_of(regex="a") | {"text": {"format": {"type": "json_object"}}}, "structured_outputs"),
    (["responses"], outputs_of(regex="a") | CALL, "structured_outputs.regex"),
    (BOTH[:1], outputs_of(regex="a") | {"tool_choice": "required", "tools": [TIME]}, "structured_outputs.regex"),
]  # fmt: skip
"""Routes, fields that contradict each other or have no support, and the parameter of the error."""


@pytest.mark.parametrize(("routes", "fields", "param"), REFUSED)
def test_contradictions_and_members_without_support(
    routes: list[str], fields: dict[str, Any], param: str, server: Running
) -> None:
    prompts = {
        "chat/completions": {"messages": TALK},
        "completions": {"prompt": "hello"},
        "responses": {"input": "hello"},
    }
    for route in routes:
        assert_refused(server.post(f"/v1/{route}", **prompts[route], **fields), param)


def test_a_backend_is_a_hint(server: Running) -> None:
    answer = server.chat(guided_regex="a", guided_decoding_backend="xgrammar")
    assert answer.status_code == 200 and answer.headers["x-foresay-ignored"] == "guided_decoding_backend"
