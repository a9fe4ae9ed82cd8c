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


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "needs json"),
        ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex", "regex parse error"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
         "structured_outputs", "text.format"),
        ({"structured_outputs": {"regex": "a"}, "tool_choice": "required",
          "tools": [{"type": "function", "name": "time"}]}, "structured_outputs.regex", "requires calls"),
        ({"guided_regex": "a"}, "guided_regex", "not supported"),
    ],
)  # fmt: skip
def test_contradictions_in_the_responses_api(fields: dict[str, Any], param: str, message: str, server: Running) -> None:
    assert_refused(server.post("/v1/responses", input="hello", **fields), param, message)


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


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "needs json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "structured_outputs.json"),
        ({"guided_regex": "a", "grammar": GBNF}, "grammar", "cannot be combined with guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "response_format"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "grammar"),
        ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex", "regex parse error"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"guided_json": "[]"}, "guided_json", "not an object"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "schema is not supported"),
        ({"grammar": 'root ::= "a" other'}, "grammar", "no rule 'other'"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "supported"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace", ""),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"guided_regex": "a{1000}{1000}"}, "guided_regex", "needs more"),
    ],
)  # fmt: skip
def test_contradictions_and_members_without_support(
    fields: dict[str, Any], param: str, message: str, route: str, server: Running
) -> None:
    given = {"messages": TALK} if route == "chat/completions" else {"prompt": "hello"}
    assert_refused(server.post(f"/v1/{route}", **given, **fields), param, message)


def test_calls_that_are_required_exclude_a_constraint(server: Running) -> None:
    refused = server.chat(tools=[TIME], tool_choice="required", structured_outputs={"regex": "a"})
    assert_refused(refused, "structured_outputs.regex", "requires calls")


def test_a_backend_is_a_hint(server: Running) -> None:
    answer = server.chat(guided_regex="a", guided_decoding_backend="xgrammar")
    assert answer.status_code == 200 and answer.headers["x-foresay-ignored"] == "guided_decoding_backend"
