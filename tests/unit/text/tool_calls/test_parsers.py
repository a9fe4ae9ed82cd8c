"""Calls in every format, as families write them and as models do, by public reports on parsers of other servers.

They are read where one reading exists, however the text is cut; other text is content.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foresay.text.reasoning import THINK
from foresay.text.tool_calls import parsers
from foresay.text.tool_calls.calls import Pieces
from foresay.text.tool_calls.families import FORMATS
from foresay.text.tool_calls.message import MessageParser
from foresay.text.tool_calls.parsers import Reader
from helpers.tool_chats import parser_of, read_output, written

TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "flag": {"type": "boolean"},
            "map": {"$ref": "#/$defs/map"},
            "list": {"type": "array"},
        },
        "$defs": {"map": {"type": "object"}},
    },
    **{name: {} for name in ("g", "w", "m.time_now")},
}
Call = tuple[str, dict[str, Any]]
X: Call = ("f", {"path": "x"})
INNER = '"name": "f", "arguments": {"path": "x"}'
CODER, HERMES, LLAMA, PYTHON, MISTRAL = "qwen3_coder", "hermes", "llama3_json", "pythonic", "mistral_named"


def tagged(inner: str, end: str = "\n</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=f>\n{inner}{end}"


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


A, B = "<parameter=path>\nx\n</parameter>\n", "<parameter=text>\ny\n</parameter>"
PATH, TO_F = '{"path": "x"}', "<|channel|>commentary to=functions.f<|message|>"
W: Call = ("w", {"a": 1})
W_CODER = "<tool_call>\n<function=w>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
W_HARMONY = '<|channel|>commentary to=functions.w <|constrain|>json<|message|>{"a": 1}<|call|>'
W_HERMES = '<tool_call>\n{"name": "w", "arguments": {"a": 1}}\n</tool_call>'
THINKS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
DEEP = hermes("[" * 3000 + "]" * 3000)
OUTPUTS: dict[str, tuple[str, str, str, list[Call]]] = {
    "an optional string of digits": (CODER, tagged("<parameter=name>\n5\n</parameter>"), "", [("f", {"name": "5"})]),
    "an optional string that is null": (CODER, tagged("<parameter=name>\nnull\n</parameter>"), "", [("f", {"name": None})]),
    "Python's None": (CODER, tagged("<parameter=name>\nNone\n</parameter>"), "", [("f", {"name": None})]),
    "a string that is JSON": (CODER, tagged('<parameter=path>\n{"a": 1}\n</parameter>'), "", [("f", {"path": '{"a": 1}'})]),
    "Python's True": (CODER, tagged("<parameter=flag>\nTrue\n</parameter>"), "", [("f", {"flag": True})]),
    "Python's mapping": (CODER, tagged("<parameter=map>\n{'a': [1, None,]}\n</parameter>"), "",
        [("f", {"map": {"a": [1, None]}})]),
    "Python's list": (CODER, tagged("<parameter=list>['python', 'it''s']</parameter>"), "",
        [("f", {"list": ["python", "it''s"]})]),
    "a whole number with a point": (CODER, tagged("<parameter=count>\n5.0\n</parameter>"), "", [("f", {"count": 5})]),
    "text for a number": (CODER, tagged("<parameter=count>\nmany\n</parameter>"), "", [("f", {"count": "many"})]),
    "no closing tag before the next one": (CODER, tagged(f"<parameter=path>\nx\n{B}"), "", [("f", {"path": "x", "text": "y"})]),
    "no closing tag of the last one": (CODER, tagged("<parameter=path>\nx"), "", [X]),
    "no closing tag of the function": (CODER, tagged(A, "</tool_call>"), "", [X]),
    "no closing tag at all": (CODER, tagged("<parameter=path>\nx\n", ""), "", [X]),
    "no closing tag, and text": (CODER, tagged("<parameter=path>\nx\n", "</function>\nDone."), "Done.", [X]),
    "a closing tag cut": (CODER, tagged("<parameter=path>\nx\n</para", ""), "", [X]),
    "an opening tag cut": (CODER, tagged(f"{A}<parameter=te", ""), "", [X]),
    "a tag without its last character": (CODER, tagged("<parameter=path\nx\n</parameter>"), "", [X]),
    "a closing tag in a value": (CODER, tagged("<parameter=text>\na </parameter> b </function> c\n</parameter>") + "Done.",
        "Done.", [("f", {"text": "a </parameter> b </function> c"})]),
    "an opening tag in a value": (CODER, tagged("<parameter=text>\n<parameter=x> is a tag\n</parameter>"), "",
        [("f", {"text": "<parameter=x> is a tag"})]),
    "an end of calls in a value": (CODER, tagged("<parameter=text>\n</tool_call> ends\n</parameter>"), "",
        [("f", {"text": "</tool_call> ends"})]),
    "two functions in one mark": (CODER, tagged(A, "</function>\n<function=g>\n</function>\n</tool_call>"), "", [X, ("g", {})]),
    "no first mark, and a last": (CODER, f"I look.\n<function=f>\n{A}</function>\n</tool_call>", "I look.\n", [X]),
    "an object in the tagged format": (CODER, f"<tool_call>\n{{{INNER}}}\n</tool_call>", "", [X]),
    "arguments as an object in a tag": (CODER, '<function=f>{"path": "x"}</function>', "", [X]),
    "a parameter that no schema has": (CODER, tagged(f"{A}<parameter=z>\n1\n</parameter>"), "", [("f", {"path": "x", "z": 1})]),
    "tags in the format of objects": (HERMES, tagged(A), "", [X]),
    "single quotes": (HERMES, "<tool_call>{'name': 'f', 'arguments': {'path': 'x'}}</tool_call>", "", [X]),
    "an apostrophe": (HERMES, """<tool_call>{'name': 'f', 'arguments': {'path': "it's"}}</tool_call>""", "",
        [("f", {"path": "it's"})]),
    "Python's words": (HERMES, "<tool_call>{'name': 'f', 'arguments': {'a': True, 'b': None}}</tool_call>", "",
        [("f", {"a": True, "b": None})]),
    "trailing commas": (HERMES, hermes('{"path": "x",},'), "", [X]),
    "a bracket too few": (HERMES, f"<tool_call>{{{INNER}</tool_call>ok", "ok", [X]),
    "two brackets too few": (HERMES, '<tool_call>{"name": "f", "arguments": {"path": "x"</tool_call>', "", [X]),
    "a bracket too many": (HERMES, f"<tool_call>{{{INNER}}}}}</tool_call>ok", "ok", [X]),
    "no last mark": (HERMES, f"<tool_call>\n{{{INNER}}}\n", "", [X]),
    "no last mark before the next call": (HERMES, f"<tool_call>{{{INNER}}}<tool_call>{{{INNER}}}</tool_call>", "", [X, X]),
    "a raw line break": (HERMES, hermes('{"text": "a\n\tb"}'), "", [("f", {"text": "a\n\tb"})]),
    "an escape that JSON lacks": (HERMES, hermes(r'{"text": "\d\'\x41\u"}'), "", [("f", {"text": r"\d'A\u"})]),
    "a unicode escape": (HERMES, hermes(r'{"path": "\u00fc"}'), "", [("f", {"path": "ü"})]),
    "brackets in strings": (HERMES, hermes('{"text": "}}]{"}'), "", [("f", {"text": "}}]{"})]),
    "the last mark in a string": (HERMES, hermes('{"text": "</tool_call>"}'), "", [("f", {"text": "</tool_call>"})]),
    "arguments as a text": (HERMES, hermes(r'"{\"path\": \"x\"}"'), "", [X]),
    "no arguments as a text": (HERMES, hermes('""'), "", [("f", {})]),
    "arguments that are a text without an object": (HERMES, hermes('"Rome"'), hermes('"Rome"'), []),
    "the other word for arguments": (HERMES, '<tool_call>{"name": "f", "parameters": {"path": "x"}}</tool_call>', "", [X]),
    "OpenAI's form": (HERMES, f'<tool_call>{{"type": "function", "function": {{{INNER}}}}}</tool_call>', "", [X]),
    "a list in a mark": (HERMES, f"<tool_call>[{{{INNER}}}, {{{INNER}}}]</tool_call>", "", [X, X]),
    "code in a mark": (HERMES, f"<tool_call>\n```json\n{{{INNER}}}\n```\n</tool_call>", "", [X]),
    "code alone": (HERMES, f"So:\n```json\n{{{INNER}}}\n```", "So:\n", [X]),
    "a list alone": (HERMES, f"[{{{INNER}}}]", "", [X]),
    "a list alone that names no tool": (HERMES, '[{"name": "Bob", "arguments": {}}]', '[{"name": "Bob", "arguments": {}}]', []),
    "words without quotes": (HERMES, '<tool_call>{"name": "f", "arguments": {"path": x}}</tool_call>', "", [X]),
    "two texts in a row": (HERMES, hermes('{"path": "x" "y"}'), "", [("f", {"path": 'x" "y'})]),
    "quotes in a text": (HERMES, hermes('{"path": "He wrote "hi" ok"}'), "", [("f", {"path": 'He wrote "hi" ok'})]),
    "a fault in the arguments": (HERMES, hermes('{"path": "x", 7: "y"}') + "ok", "ok", [X]),
    "a fault before the next call": (HERMES,
        f'<tool_call>{{"name": "f", "arguments": {{"path": "x" ,, 1<tool_call>{{{INNER}}}</tool_call>ok', "ok", [X, X]),
    "a fault before the name": (HERMES, '<tool_call>{"name" "f"}</tool_call>', '<tool_call>{"name" "f"}</tool_call>', []),
    "a fault in a tag": (CODER, '<function=f>{"path": "x",, 1}</function>ok', "ok", [X]),
    "words as keys": (HERMES, '<tool_call>{name: "f", arguments: {path: "x"}}</tool_call>', "", [X]),
    "words as keys of a value": (CODER, tagged("<parameter=map>{a: 1}</parameter>"), "", [("f", {"map": {"a": 1}})]),
    "arguments that are a list": (HERMES, hermes("[1]"), hermes("[1]"), []),
    "arguments that are null": (HERMES, hermes("null"), "", [("f", {})]),
    "an answer in code with a tool's name": (HERMES, 'Here:\n```json\n{"name": "f", "id": "x"}\n```\nok',
        'Here:\n```json\n{"name": "f", "id": "x"}\n```\nok', []),
    "no arguments in code": (HERMES, '```json\n{"name": "f"}\n```\nok', "ok", [("f", {})]),
    "an answer of Llama with a tool's name": (LLAMA, '{"name": "f", "id": "x"}', '{"name": "f", "id": "x"}', []),
    "an answer of Llama": (LLAMA, '{"name": "my-package", "parameters": {}}', '{"name": "my-package", "parameters": {}}', []),
    "an unknown name after the prefix": (LLAMA, '<|python_tag|>{"name": "z", "id": "x"}', "", [("z", {})]),
    "quotes around names": (CODER, '<tool_call><function="f"><parameter="path">x</parameter></function></tool_call>', "", [X]),
    "a repeated parameter": (CODER, tagged(f"{A}<parameter=path>\nz\n</parameter>\n{B}"), "",
        [("f", {"path": "x", "text": "y"})]),
    "a repeated key": (HERMES, '<tool_call>{"name": "f", "arguments": "n", "arguments": "{}"}</tool_call>', "", [("f", {})]),
    "cut in a string": (HERMES, '<tool_call>{"name": "f", "arguments": {"path": "x', "", [X]),
    "cut in a key": (HERMES, '<tool_call>{"name": "f", "arguments": {"path": "x", "te', "", [X]),
    "cut in an escape": (HERMES, '<tool_call>{"name": "f", "arguments": {"path": "x\\u00', "", [X]),
    "cut before the arguments": (HERMES, '<tool_call>{"name": "f", "ar', '<tool_call>{"name": "f", "ar', []),
    "the prefix for code": (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"path": "x"}}', "", [X]),
    "text before the prefix": (LLAMA, 'I look.<|python_tag|>{"name": "f", "parameters": {"path": "x"}}', "I look.", [X]),
    "a mark of the end": (LLAMA, '{"type": "function", "name": "f", "parameters": {"path": "x"}}<|eom_id|>', "", [X]),
    "arguments in place of parameters": (LLAMA, f"{{{INNER}}}", "", [X]),
    "code of Llama": (LLAMA, '```json\n{"name": "f", "parameters": {"path": "x"}}\n```', "", [X]),
    "a list of Llama": (LLAMA, '[{"name": "f", "parameters": {"path": "x"}}]', "", [X]),
    "a tag of Llama": (LLAMA, '<function=f>{"path": "x"}</function>', "", [X]),
    "code that is no object": (LLAMA, '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    "a raw line break in Python": (PYTHON, "[f(text='cat << EOF\nx\nEOF')]", "", [("f", {"text": "cat << EOF\nx\nEOF"})]),
    "names that Python forbids": (PYTHON, "[class(from='x', a-b=1), m.get-w()]", "",
        [("class", {"from": "x", "a-b": 1}), ("m.get-w", {})]),
    "triple quotes": (PYTHON, "[f(text='''a 'b'\nc''')]", "", [("f", {"text": "a 'b'\nc"})]),
    "a raw string": (PYTHON, r"[f(text=r'\d+')]", "", [("f", {"text": r"\d+"})]),
    "a tuple": (PYTHON, "[f(list=(1, -2.5))]", "", [("f", {"list": [1, -2.5]})]),
    "no last bracket": (PYTHON, "[f(path='x')", "", [X]),
    "a trailing comma in Python": (PYTHON, "[f(path='x',),]", "", [X]),
    "text before a mark of Python": (PYTHON, "I look. <|python_start|>[f(path='x')]<|python_end|>", "I look. ", [X]),
    "cut in Python": (PYTHON, "[f(path='x'), g(a=", "[f(path='x'), g(a=", []),
    "code that calls": (PYTHON, "[f(path=open('x'))]", "[f(path=open('x'))]", []),
    "an object in single quotes": (MISTRAL, "[TOOL_CALLS]f[ARGS]{'path': 'x'}", "", [X]),
    "an answer after the mark": (MISTRAL, "[TOOL_CALLS]I cannot. Sorry {see below}", "[TOOL_CALLS]I cannot. Sorry {see below}",
        []),
    "a word before braces": (MISTRAL, "[TOOL_CALLS]Sorry {see below}", "[TOOL_CALLS]Sorry {see below}", []),
    "a fault in Mistral's object": (MISTRAL, '[TOOL_CALLS]f{"path": "x", 7: 1}[TOOL_CALLS]f{"path": "x"}ok', "ok", [X, X]),
    "quotes in Mistral's text": (MISTRAL, '[TOOL_CALLS]f{"path": "a "b" c"}', "", [("f", {"path": 'a "b" c'})]),
    "an object that is cut": (MISTRAL, '[TOOL_CALLS]f[ARGS]{"path": "x', "", [X]),
    "the body of a message in single quotes": ("harmony",
        "<|channel|>commentary to=functions.f<|message|>{'path': 'x'}<|call|>", "", [X]),
    "a recipient first": ("harmony", f" to=functions.f<|channel|>commentary json<|message|>{PATH}<|call|>", "", [X]),
    "a recipient alone": ("harmony", f"to=functions.f<|message|>{PATH}", "", [X]),
    "text before a channel": ("harmony", "An assistant.<|channel|>final<|message|> Yes.", "An assistant. Yes.", []),
    "a body in a block of code": ("harmony", f"{TO_F}```json\n{PATH}```<|call|>", "", [X]),
    "a body with text after it": ("harmony", f"{TO_F}{PATH} is it<|call|>", " is it", [X]),
    "a body that is a text": ("harmony", f'{TO_F}"x"<|call|>', '"x"', []),
    "a body that is a word": ("harmony", f"{TO_F}final<|end|>", "final", []),
    "a body that is a list": ("harmony", f"{TO_F}[{PATH}]<|end|>", f"[{PATH}]", []),
    "a fault in a body": ("harmony", f'{TO_F}{{"path": "x", 7: 1}}<|call|><|start|>assistant{TO_F}{PATH}', "", [X, X]),
    "a body that never begins": ("harmony", f"{TO_F}``", "``", []),
    "another recipient": ("harmony", "<|channel|>commentary to=assistant<|message|>hi<|end|>", "hi", []),
    "no body of a message": ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", "", [("f", {})]),
    "tagged: text around": (CODER, f"I look.\n{W_CODER}\nDone.", "I look.\nDone.", [W]),
    "tagged: two": (CODER, f"{W_CODER}\n{W_CODER}", "", [W, W]),
    "tagged: no call": (CODER, "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    "tagged: no JSON": (CODER, "<tool_call><function=w><parameter=a>NaN</parameter></function>", "", [("w", {"a": "NaN"})]),
    "harmony: a preamble": ("harmony", f"<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant{W_HARMONY}", "Hm.", [W]),
    "harmony: two calls": ("harmony", f"{W_HARMONY}<|start|>assistant{W_HARMONY}", "", [W, W]),
    "harmony: plain text": ("harmony", "just text", "just text", []),
    "an object alone": (HERMES, '{"name": "w", "arguments": {"a": 1}}\n', "", [W]),
    "an object alone that names no tool": (HERMES, '{"name": "x", "a": 1}', '{"name": "x", "a": 1}', []),
    "white space alone": (HERMES, " \n", " \n", []),
    "text around a call": (HERMES, f"I look.\n{W_HERMES}\nDone.", "I look.\nDone.", [W]),
    "text between calls": (HERMES, f"{W_HERMES} and {W_HERMES}", "and ", [W, W]),
    "arguments first": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "w"}</tool_call>', "", [W]),
    "no arguments": (HERMES, '<tool_call>{"name": "w"}</tool_call>', "", [("w", {})]),
    "no call after the marker": (HERMES, "<tool_call>none</tool_call> x", "<tool_call>none</tool_call> x", []),
    "an object that is no call": (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    "a name that is none": (HERMES, '<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    "a name that is no text": (HERMES, '<tool_call>{"name": "\\udc00"}</tool_call>',
        '<tool_call>{"name": "\\udc00"}</tool_call>', []),
    "a block of other JSON": (HERMES, '```json\n{"name": "Bob"}\n```', '```json\n{"name": "Bob"}\n```', []),
    "a block of code in between": (HERMES, f"```\nx\n```\n{W_HERMES}", "```\nx\n```\n", [W]),
    "nearly a marker": (HERMES, "a < b <tool", "a < b <tool", []),
    "an object after a call": (HERMES, '<tool_call>{"name": "w", "arguments": {}}\n{"note": "x", "more": 2}</tool_call>bye',
        '{"note": "x", "more": 2}</tool_call>bye', [("w", {})]),
    "two members with arguments": (HERMES,
        '<tool_call>{"name": "w", "parameters": {"a": 1}, "arguments": {"bbbbb": 22222}}</tool_call>', "", [W]),
    "arguments as a string of no characters": (HERMES, hermes('"{\\"a\\": \\"\\\\ud83d\\"}"'), "", [("f", {"a": "\ud83d"})]),
    "arguments too deep": (HERMES, DEEP, DEEP, []),
    "a JSON answer": (LLAMA, '{"answer": {"name": "w"}}', '{"answer": {"name": "w"}}', []),
    "an answer with an object": (LLAMA, 'It is {"name": "w"}', 'It is {"name": "w"}', []),
    "a marker and two calls": (LLAMA, '<|python_tag|>{"name": "w", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
        [W, ("g", {})]),
    "Mistral's older form": ("mistral", '[TOOL_CALLS] [{"name": "w", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "",
        [W, ("g", {})]),
    "Mistral's newer form": (MISTRAL, 'x[TOOL_CALLS]w[CALL_ID]12[ARGS]{"a": 1}[TOOL_CALLS]g{}', "x", [W, ("g", {})]),
    "Mistral's objects in Python's words": (MISTRAL, "[TOOL_CALLS]w[ARGS]{'a': 1} [TOOL_CALLS]w[ARGS]{\"a\": 1}", "", [W, W]),
    "Mistral's mark without a name": (MISTRAL, "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", []),
    "escapes of JSON": (PYTHON, '[w(a="a\\/b", b="\\ud83d\\ude00", c=\'\\x41\')]', "",
        [("w", {"a": "a/b", "b": "😀", "c": "A"})]),
    "words of JSON": (PYTHON, "[w(a=true, b=null, c=-1.5)]", "", [("w", {"a": True, "b": None, "c": -1.5})]),
    "marks around Python": (PYTHON, "<|python_start|>[w()]<|python_end|>", "", [("w", {})]),
    **{f"no call of Python, {i}": (PYTHON, text, text, []) for i, text in enumerate((
        "", "x", "[]", "[f]", "[f(1)]", "[f(1)] y", "[f(**a)]", "[f(a=g())]", "[f(a=b)]", "[f(a={1: 2})]", "[f(a=1j)]",
        "[f(a=...)]", "[f(a=1), ", "[f(a=1e999)]", "[f(a={[1]})]", f"[f(a=0x{'f' * 5000})]", "(" * 9999, "[1, 2] is a list",
        "[see](http://x) y",
    ))},
}  # fmt: skip


def read(
    name: str, text: str, cuts: int | random.Random = 1 << 20, **more: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """The message that a text becomes, cut into pieces of a length or anywhere."""
    return read_output(parser_of(name, TOOLS, **more), text, cuts)


def objects(calls: list[tuple[str, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs(case: str) -> None:
    name, text, content, calls = OUTPUTS[case]
    for cuts in (1 << 20, 1, 2, 3, 7, *map(random.Random, range(4))):
        found, reasoning, called = read(name, text, cuts)
        assert (found, reasoning, objects(called)) == (content, "", calls), cuts


CALLS: list[Call] = [
    ("f", {"path": "Rome", "count": 3}),
    ("m.time-now", {}),
    ("f", {"text": "a \"}]' x", "in": ["b", {"c": None}]}),
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_family_writes(name: str) -> None:
    one = FORMATS[name]
    for seed in range(6):
        chance = random.Random(seed)
        calls = [chance.choice(CALLS[: 1 if one.is_python and seed else 3]) for _ in range(chance.randrange(1, 4))]
        calls = [(n.replace("-", "_"), a) for n, a in calls if not (one.is_python and "in" in a)] or CALLS[:1]
        calls = calls if one.parallel or name == LLAMA else calls[:1]
        content, reasoning, found = read(name, written(one, *calls, value=repr), chance)
        assert (content.strip(), reasoning, objects(found)) == ("", "", calls)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning(step: int) -> None:
    for text, is_open, wanted in (
        (f"<think>\nhm <b>\n</think>\n\nyes {W_HERMES}", False, ("yes ", "hm <b>\n", [W])),
        (f"hm\n</think>\n\n{W_HERMES}", True, ("", "hm\n", [W])),
        (" plain </think> text", False, ("text", " plain ", [])),
        (" plain </thi", False, (" plain </thi", "", [])),
        (f"[hm </think> {W_HERMES}", False, ("", "[hm ", [W])),
        (f"{W_HERMES} </think> x", False, ("</think> x", "", [W])),
        ("<think>a</think> b </think> c", False, ("b </think> c", "a", [])),
        ("<think> for ever </thin", False, ("", "for ever </thin", [])),
        ("<thi", False, ("<thi", "", [])),
    ):
        content, reasoning, calls = read(HERMES, text, step, reasoning=THINK, is_open=is_open)
        assert (content, reasoning, objects(calls)) == wanted
    for text, wanted in (
        (f"{THINKS}<|channel|>final<|message|>Hello.<|return|>", ("Hello.", "hm", [])),
        (THINKS + W_HARMONY, ("", "hm", [W])),
        ("<|channel|>analysis<|message|>because it <|e", ("", "because it <|e", [])),
    ):
        content, reasoning, calls = read("harmony", text, step)
        assert (content, reasoning, objects(calls)) == wanted
    assert read("", "a </think> b", step, reasoning=THINK, is_closed=True)[:2] == ("a </think> b", "")
    assert read("", "a </think> b", step, reasoning=THINK)[:2] == ("b", "a ")
    assert read("", "<think>a</think>\nb", step, reasoning=THINK)[:2] == ("b", "a")
    assert read("", "<think>a</think>\nb", step)[:2] == ("<think>a</think>\nb", ""), "control: without reasoning"


PARTS = (
    "<tool_call>", "</tool_call>", "<function=f>", "<parameter=path>", "</parameter>", "</function>", "\n", " ", "x",
    "```json\n", "```", f"{{{INNER}}}", '{"name": "f"', ', "arguments": ', '{"path": ', '"x"', "'y'", "\\", '"', "'", "{",
    "}", "[", "]", "(", ")", ",", ":", "1", "True", "nul", "[f(", "path=", "<|python_tag|>", "<|python_start|>",
    "<|python_end|>", "[TOOL_CALLS]", "[ARGS]", "f", ";", "é", "<", "<|channel|>commentary to=functions.f", "<|message|>",
    "<|end|>"
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(2))
def test_any_text(name: str, seed: int) -> None:
    """However it is cut: the same message, arguments that are objects in JSON, and content that is in the text."""
    chance = random.Random(f"{name} {seed}")
    others = [text for owner, text, _, _ in OUTPUTS.values() if owner == name and 0 < len(text) < 999]
    for _ in range(150):
        text = "".join(chance.choice(PARTS) for _ in range(chance.randrange(1, 25)))
        if chance.random() < 0.5:
            other = chance.choice(others or [text])
            at = chance.randrange(len(other))
            text = other[:at] + chance.choice(["", chance.choice(PARTS)]) + other[at + chance.randrange(3) :]
        content, reasoning, calls = read(name, text)
        for _ in range(3):
            assert read(name, text, chance) == (content, reasoning, calls), text
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict), text
        if name != "harmony":
            assert calls or content == text, "a text without calls is content, whole"
            rest = iter(text)
            assert all(char in rest for char in content), text


@pytest.mark.parametrize("case", [case for case, one in OUTPUTS.items() if one[0] == CODER and "f" in dict(one[3])])
def test_calls_come_back_as_history(case: str) -> None:
    """A template as Qwen3-Coder's writes the arguments, sent back as text, so that they are read as the same again."""
    _, text, _, calls = OUTPUTS[case]
    (sent, *_) = [arguments for _, arguments in read(CODER, text)[2]]
    again = ""
    for key, value in json.loads(sent).items():
        shown = json.dumps(value) if isinstance(value, dict | list) else str(value)
        again += f"<parameter={key}>\n{shown}\n</parameter>\n"
    assert objects(read(CODER, tagged(again))[2]) == calls[:1]


@pytest.mark.parametrize("tag", ["<tool_call><function=", "<tool_call><function=f><parameter="])
def test_a_name_that_never_ends_is_content(tag: str) -> None:
    """No more than a short text is withheld, so that a push reads no more either."""
    calls = FORMATS[CODER].parser
    assert calls is not None
    parser, out, words = MessageParser(calls(TOOLS, False)), Pieces(), 500
    out.add(parser.push(tag))
    for i in range(words):
        out.add(parser.push("word "))
        assert len("word ") * (i + 1) - len(out.content) < 400


def test_repeated_markers_are_read_in_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The characters that readers get, for a whole output at once."""
    push, work = Reader.push, list[int]()

    def counted(self: Any, text: str) -> Any:
        work.append(len(text))
        return push(self, text)

    def worked(name: str, part: str) -> float:
        """Work for each character."""
        work.clear()
        read(name, part * 1500)
        return sum(work) / len(part * 1500)

    monkeypatch.setattr(Reader, "push", counted)
    for part in ("<tool_call>", "<tool_call>{", "<function=f", "x```json\n{", "[TOOL_CALLS]", "[TOOL_CALLS]f{"):
        assert all(worked(name, part) < 100 for name in (HERMES, LLAMA, MISTRAL)), part
    monkeypatch.setattr(parsers, "_PART", 10**9)
    assert worked(HERMES, "<tool_call>") > 100, "control: without parts, the whole rest is read after each marker"


def test_control_of_the_property() -> None:
    """A reader that decides by what happens to have arrived differs between cuts."""

    class Hasty(MessageParser):
        def push(self, text: str) -> Pieces:
            return super().push(text) if "<tool_call>" in text else Pieces(text)

    calls = FORMATS[HERMES].parser
    assert calls is not None
    text = OUTPUTS["single quotes"][1]
    found = [read_output(Hasty(calls(TOOLS, False)), text, step)[0] == text for step in (5, len(text))]
    assert found == [True, False]
