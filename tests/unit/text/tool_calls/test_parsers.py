"""Calls in every format, however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foresay.text.reasoning import THINK
from foresay.text.tool_calls.calls import CallPiece, Pieces
from foresay.text.tool_calls.families import FORMATS
from helpers.tool_chats import parser_of, read_output, written

Found = tuple[str, str, list[tuple[str, str]]]
SCHEMAS: dict[str, Any] = {
    "w": {},
    "v": {},
    "m.time_now": {},
    "find": {"type": "object", "properties": {"what": {"type": "string"}}},
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALLS = [
    ("weather", {"city": "Rome", "days": 3}),
    ("m.time-now", {}),
    ("find", {"what": "a \"}]' x", "in": ["b", {"c": None}]}),
]


def parsed(name: str, text: str, cuts: int | random.Random, **more: Any) -> Found:
    """Content, reasoning and calls of an output."""
    return read_output(parser_of(name, SCHEMAS, **more), text, cuts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_what_a_family_writes(name: str, seed: int) -> None:
    chance, one = random.Random(seed), FORMATS[name]
    calls = [chance.choice(CALLS[: 1 if one.is_python and seed else 3]) for _ in range(chance.randrange(1, 4))]
    calls = [(n.replace("-", "_"), a) for n, a in calls if not (one.is_python and "in" in a)] or CALLS[:1]
    calls = calls if one.parallel or name == "llama3_json" else calls[:1]
    content, reasoning, found = parsed(name, written(one, *calls, value=repr), chance)
    assert (content.strip(), reasoning) == ("", "")
    assert [(n, json.loads(a)) for n, a in found] == calls


CODER = "<tool_call>\n<function=w>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
THINKS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
HARMONY = '<|channel|>commentary to=functions.w <|constrain|>json<|message|>{"a": 1}<|call|>'
HERMES = '<tool_call>\n{"name": "w", "arguments": {"a": 1}}\n</tool_call>'
DEEP = "[" * 3000 + "]" * 3000
CASES: dict[str, tuple[str, str, Found]] = {
    "tagged: text around": ("qwen3_coder", f"I look.\n{CODER}\nDone.", ("I look.\nDone.", "", [("w", '{"a": 1}')])),
    "tagged: two": ("qwen3_coder", f"{CODER}\n{CODER}", ("", "", [("w", '{"a": 1}')] * 2)),
    "tagged: lines": ("qwen3_coder",
        "<tool_call><function=find><parameter=what>\na <b>\n\n1\n</parameter></function></tool_call>",
        ("", "", [("find", '{"what": "a <b>\\n\\n1"}')])),
    "tagged: text that is no JSON": ("qwen3_coder",
        "<tool_call><function=w><parameter=a>Rome</parameter><parameter=b>NaN</parameter></function></tool_call>",
        ("", "", [("w", '{"a": "Rome", "b": "NaN"}')])),
    "tagged: cut in a value": ("qwen3_coder", CODER[:40], ("", "", [("w", '{"a": 1}')])),
    "tagged: no call": ("qwen3_coder", "<tool_call>hello</tool_call>", ("<tool_call>hello</tool_call>", "", [])),
    "harmony: all channels": ("harmony", f"{THINKS}<|channel|>final<|message|>Hello.<|return|>", ("Hello.", "hm", [])),
    "harmony: a call": ("harmony", THINKS + HARMONY, ("", "hm", [("w", '{"a": 1}')])),
    "harmony: a preamble": ("harmony", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY}",
        ("I look.", "", [("w", '{"a": 1}')])),
    "harmony: two calls": ("harmony", f"{HARMONY}<|start|>assistant{HARMONY}", ("", "", [("w", '{"a": 1}')] * 2)),
    "harmony: cut": ("harmony", "<|channel|>analysis<|message|>because it <|e", ("", "because it <|e", [])),
    "harmony: plain text": ("harmony", "just text", ("just text", "", [])),
    "an object alone": ("hermes", '{"name": "w", "arguments": {"a": 1}}\n', ("", "", [("w", '{"a": 1}')])),
    "an object alone that names no tool": ("hermes", '{"name": "x", "a": 1}', ('{"name": "x", "a": 1}', "", [])),
    "white space alone": ("hermes", " \n", (" \n", "", [])),
    "text before a call": ("hermes", f"I look.\n{HERMES}", ("I look.\n", "", [("w", '{"a": 1}')])),
    "text after a call": ("hermes", f"{HERMES}\nDone.", ("Done.", "", [("w", '{"a": 1}')])),
    "text between calls": ("hermes", f"{HERMES} and {HERMES}", ("and ", "", [("w", '{"a": 1}')] * 2)),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "w"}</tool_call>', ("", "", [("w", '{"a": 1}')])),
    "no arguments": ("hermes", '<tool_call>{"name": "w"}</tool_call>', ("", "", [("w", "{}")])),
    "no call after the marker": ("hermes", "<tool_call>none</tool_call> x", ("<tool_call>none</tool_call> x", "", [])),
    "an object that is no call": ("hermes", '<tool_call>{"x": 1}</tool_call>', ('<tool_call>{"x": 1}</tool_call>', "", [])),
    "a name that is none": ("hermes", '<tool_call>{"name": 7}</tool_call>', ('<tool_call>{"name": 7}</tool_call>', "", [])),
    "a block of other JSON": ("hermes", '```json\n{"name": "Bob"}\n```', ('```json\n{"name": "Bob"}\n```', "", [])),
    "a block of code in between": ("hermes", f"```\nx\n```\n{HERMES}", ("```\nx\n```\n", "", [("w", '{"a": 1}')])),
    "nearly a marker": ("hermes", "a < b <tool", ("a < b <tool", "", [])),
    "a JSON answer": ("llama3_json", '{"answer": {"name": "w"}}', ('{"answer": {"name": "w"}}', "", [])),
    "a marker and two calls": ("llama3_json",
        '<|python_tag|>{"name": "w", "parameters": {"a": 1}}; {"name": "v", "parameters": {}}',
        ("", "", [("w", '{"a": 1}'), ("v", "{}")])),
    "an answer with an object": ("llama3_json", 'It is {"name": "w"}', ('It is {"name": "w"}', "", [])),
    "the older form": ("mistral", '[TOOL_CALLS] [{"name": "w", "arguments": {"a": [1]}}, {"name": "v", "arguments": {}}]',
        ("", "", [("w", '{"a": [1]}'), ("v", "{}")])),
    "the newer form": ("mistral_named", 'x[TOOL_CALLS]w[CALL_ID]12[ARGS]{"a": 1}[TOOL_CALLS]v{}',
        ("x", "", [("w", '{"a": 1}'), ("v", "{}")])),
    "arguments in Python's words": ("mistral_named", "[TOOL_CALLS]w[ARGS]{'a': 1} [TOOL_CALLS]v[ARGS]{\"a\": 1}",
        ("", "", [("w", '{"a": 1}'), ("v", '{"a": 1}')])),
    "no name": ("mistral_named", "[TOOL_CALLS][ARGS]{}", ("[TOOL_CALLS][ARGS]{}", "", [])),
    "an object after a call": ("hermes", '<tool_call>{"name": "w", "arguments": {}}\n{"note": "x", "more": 2}</tool_call>bye',
        ('{"note": "x", "more": 2}</tool_call>bye', "", [("w", "{}")])),
    "two members with arguments": ("hermes",
        '<tool_call>{"name": "w", "parameters": {"a": 1}, "arguments": {"bbbbb": 22222}}</tool_call>',
        ("", "", [("w", '{"a": 1}')])),
    "a name that is no text": ("hermes", '<tool_call>{"name": "\\ud83d"}</tool_call>',
        ('<tool_call>{"name": "\\ud83d"}</tool_call>', "", [])),
    "arguments as a string of no characters": ("hermes",
        '<tool_call>{"name": "w", "arguments": "{\\"a\\": \\"\\\\ud83d\\"}"}</tool_call>',
        ("", "", [("w", '{"a": "\\ud83d"}')])),
    "arguments too deep": ("hermes", f'<tool_call>{{"name": "w", "arguments": {DEEP}}}</tool_call>',
        (f'<tool_call>{{"name": "w", "arguments": {DEEP}}}</tool_call>', "", [])),
    "escapes of JSON": ("pythonic", '[w(a="a\\/b", b="\\ud83d\\ude00", c=\'\\x41\')]',
        ("", "", [("w", '{"a": "a/b", "b": "\U0001f600", "c": "A"}')])),
    "an infinite number": ("pythonic", "[w(a=1e999)]", ("[w(a=1e999)]", "", [])),
    "a set of lists": ("pythonic", "[w(a={[1]})]", ("[w(a={[1]})]", "", [])),
    "a number of many digits": ("pythonic", f"[w(a=0x{'f' * 5000})]", (f"[w(a=0x{'f' * 5000})]", "", [])),
    "words of JSON": ("pythonic", "[w(a=true, b=null, c=-1.5)]", ("", "", [("w", '{"a": true, "b": null, "c": -1.5}')])),
    "markers around": ("pythonic", "<|python_start|>[w()]<|python_end|>", ("", "", [("w", "{}")])),
    "a list": ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", "", [])),
    "a link": ("pythonic", "[see](http://x) y", ("[see](http://x) y", "", [])),
    "code that is no call": ("pythonic", "[w(1)] y", ("[w(1)] y", "", [])),
    "an unfinished list": ("pythonic", "[w(a=1), ", ("[w(a=1), ", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_outputs(case: str) -> None:
    name, text, wanted = CASES[case]
    for step in (1, 2, 3, 7, 1000):
        assert parsed(name, text, step) == wanted, step


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning(step: int) -> None:
    for text, is_open, wanted in (
        (f"<think>\nhm <b>\n</think>\n\nyes {HERMES}", False, ("yes ", "hm <b>\n", [("w", '{"a": 1}')])),
        (f"hm\n</think>\n\n{HERMES}", True, ("", "hm\n", [("w", '{"a": 1}')])),
        (" plain </think> text", False, ("text", " plain ", [])),
        (" plain </thi", False, (" plain </thi", "", [])),
        (f"[hm </think> {HERMES}", False, ("", "[hm ", [("w", '{"a": 1}')])),
        (f"{HERMES} </think> x", False, ("</think> x", "", [("w", '{"a": 1}')])),
        ("<think>a</think> b </think> c", False, ("b </think> c", "a", [])),
        ("<think> for ever </thin", False, ("", "for ever </thin", [])),
        ("<thi", False, ("<thi", "", [])),
    ):
        assert parsed("hermes", text, step, reasoning=THINK, is_open=is_open) == wanted
    assert parsed("", "a </think> b", step, reasoning=THINK, is_closed=True) == ("a </think> b", "", [])
    assert parsed("", "a </think> b", step, reasoning=THINK) == ("b", "a ", [])
    assert parsed("", "<think>a</think>\nb", step, reasoning=THINK) == ("b", "a", [])
    assert parsed("", "<think>a</think>\nb", step) == ("<think>a</think>\nb", "", []), (
        "control: a model without reasoning"
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[]", "[f]", "[f(1)]", "[f(**a)]", "[f(a=g())]", "[f(a=b)]", "[f(a={1: 2})]", "[f(a=1j)]", "[f(a=...)]",
        "(" * 9999,
    ],
)  # fmt: skip
def test_no_code_is_evaluated(text: str) -> None:
    assert parsed("pythonic", text, 1000) == (text, "", [])


def test_pieces_of_one_call_become_one() -> None:
    """Some clients read only the first piece of a call in an event."""
    pieces = Pieces("a", calls=[CallPiece(0, "f", "{")])
    pieces.add(Pieces("b", calls=[CallPiece(0, None, '"x": 1'), CallPiece(0, None, "}"), CallPiece(1, "g", "{}")]))
    assert pieces == Pieces("ab", calls=[CallPiece(0, "f", '{"x": 1}'), CallPiece(1, "g", "{}")])
