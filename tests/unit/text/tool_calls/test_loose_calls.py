"""Calls as models write them, by public reports on parsers of other servers: read where one reading exists, else content."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foresay.text.tool_calls import parsers
from foresay.text.tool_calls.calls import Pieces
from foresay.text.tool_calls.families import FORMATS
from foresay.text.tool_calls.message import MessageParser
from foresay.text.tool_calls.parsers import Reader
from helpers.tool_chats import parser_of, read_output

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
    "g": {},
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
LOOSE: dict[str, tuple[str, str, str, list[Call]]] = {
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
}  # fmt: skip


def read(name: str, text: str, cuts: random.Random | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    """The message that a text becomes, cut anywhere."""
    return read_output(parser_of(name, TOOLS), text, 1 + len(text) if cuts is None else cuts)


@pytest.mark.parametrize("case", LOOSE)
def test_loose_calls(case: str) -> None:
    name, text, content, calls = LOOSE[case]
    for seed in range(8):
        *found, written = read(name, text, random.Random(seed) if seed else None)
        assert [(one, json.loads(arguments)) for one, arguments in written] == calls
        assert found == [content, ""]


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
    for _ in range(150):
        text = "".join(chance.choice(PARTS) for _ in range(chance.randrange(1, 25)))
        if chance.random() < 0.5:
            loose = chance.choice([one[1] for one in LOOSE.values() if one[0] == name] or [text])
            at = chance.randrange(len(loose))
            text = loose[:at] + chance.choice(["", chance.choice(PARTS)]) + loose[at + chance.randrange(3) :]
        content, reasoning, calls = read(name, text)
        for _ in range(3):
            assert read(name, text, chance) == (content, reasoning, calls), text
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict), text
        if name != "harmony":
            assert calls or content == text, "a text without calls is content, whole"
            rest = iter(text)
            assert all(char in rest for char in content), text


@pytest.mark.parametrize("case", [case for case, one in LOOSE.items() if one[0] == CODER])
def test_calls_come_back_as_history(case: str) -> None:
    """A template as Qwen3-Coder's writes the arguments, sent back as text, so that they are read as the same again."""
    _, text, _, calls = LOOSE[case]
    (sent, *_) = [arguments for _, arguments in read(CODER, text)[2]]
    again = ""
    for key, value in json.loads(sent).items():
        shown = json.dumps(value) if isinstance(value, dict | list) else str(value)
        again += f"<parameter={key}>\n{shown}\n</parameter>\n"
    found = read(CODER, tagged(again))[2]
    assert [(one, json.loads(arguments)) for one, arguments in found] == calls[:1]


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


@pytest.mark.parametrize("name", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize(
    "part", ["<tool_call>", "<tool_call>{", "<function=f", "x```json\n{", "[TOOL_CALLS]", "[TOOL_CALLS]f{"]
)
def test_repeated_markers_are_read_in_linear_work(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The characters that readers get, for a whole output at once."""
    work, long = list[int](), 1500
    monkeypatch.setattr(Reader, "push", counting(Reader.push, work))
    read(name, part * long)
    assert sum(work) < 100 * len(part * long)


def counting(push: Any, work: list[int]) -> Any:
    def counted(self: Any, text: str) -> Any:
        work.append(len(text))
        return push(self, text)

    return counted


def test_control_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without parts, the whole rest is read after each marker."""
    monkeypatch.setattr(parsers, "_PART", 10**9)
    with pytest.raises(AssertionError):
        test_repeated_markers_are_read_in_linear_work(HERMES, "<tool_call>", monkeypatch)


def test_control_of_the_property() -> None:
    """A reader that decides by what happens to have arrived differs between cuts."""

    class Hasty(MessageParser):
        def push(self, text: str) -> Pieces:
            return super().push(text) if "<tool_call>" in text else Pieces(text)

    calls = FORMATS[HERMES].parser
    assert calls is not None
    text = LOOSE["single quotes"][1]
    found = [read_output(Hasty(calls(TOOLS, False)), text, step)[0] == text for step in (5, len(text))]
    assert found == [True, False]
