"""Families of calls: the format is chosen by what a template writes, which is read, required and sent back in the same form.

The templates are ours, rebuilt from the families' published formats: each writes calls as the family's own template does.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from foresay.text.grammar import Grammar
from foresay.text.prompts import ChatOptions, encode
from foresay.text.reasoning import REASONING, THINK, reasoning_of
from foresay.text.tool_calls.call_grammars import grammar_of
from foresay.text.tool_calls.calls import Tool
from foresay.text.tool_calls.families import FORMATS
from foresay.text.tool_calls.formats import format_of, has_format, message_format, visible_ids
from foresay.text.tool_calls.terminals import Terminals
from helpers import tiny
from helpers.refusals import refused
from helpers.tool_chats import parser_of, read_output, written
from helpers.tool_formats import accepts, marks_in

_FOR = "{% for call in m.tool_calls %}{% set f = call.function %}"
_COMMA = "{{ ', ' if not loop.last }}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_ARGUMENTS = "{% for k, v in f.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)
_MARKED = (
    "{{ f.name }}{{ '{' }}" + _ARGUMENTS + "{{ k }}:{{ '<|\"|>' + v + '<|\"|>' if v is string else v }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
)
_AGAIN, _END = "{{ '\\n' if not loop.first }}", "{% endfor %}"
_DEEPSEEK, _SEP = "<\uff5ctool\u2581{}\u2581{}\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
_V3 = [_DEEPSEEK.format(*one) for one in (("calls", "begin"), ("call", "begin"), ("call", "end"), ("calls", "end"))]
_STEP = "<\uff5ctool_{}\uff5c>"


def _tagged(before: str, after_name: str, key: str, value: str, end_value: str, after: str) -> str:
    """The loop over calls with tagged arguments."""
    members = f"{_ARGUMENTS}{key}{{{{ k }}}}{value}{_VALUE}{end_value}{{% endfor %}}"
    return f"{_FOR}{before}{{{{ f.name }}}}{after_name}{members}{after}{_END}"


_CALLS = {
    "hermes": f"{_FOR}{_AGAIN}<tool_call>\n{_OBJECT}\n</tool_call>{_END}",
    "qwen3_coder": _tagged(f"{_AGAIN}<tool_call>\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n",
                           "</function>\n</tool_call>"),
    "glm45": _tagged(f"{_AGAIN}<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    "glm47": _tagged(f"{_AGAIN}<tool_call>", "", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    "hunyuan": f"<tool_calls>{_FOR}<tool_call>{{{{ f.name }}}}<tool_sep>\n```json\n{{{{ f.arguments | tojson }}}}\n```"
    f"</tool_call>{_END}</tool_calls>",
    "hunyuan3": "<tool_calls>\n" + _tagged("<tool_call>", "<tool_sep>\n", "<arg_key>", "</arg_key>\n<arg_value>",
                                           "</arg_value>\n", "</tool_call>\n") + "</tool_calls>",
    "jamba": f"<tool_calls>[{_FOR}{_OBJECT}{_COMMA}{_END}]</tool_calls>",
    "seed_oss": _tagged(f"{_AGAIN}<seed:tool_call>\n<function=", ">\n", "<parameter=", ">", "</parameter>\n",
                        "</function>\n</seed:tool_call>"),
    "minimax_m2": "<minimax:tool_call>\n" + _tagged('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n",
                                                    "</invoke>\n") + "</minimax:tool_call>",
    "step3": _STEP.format("calls_begin")
    + _tagged(f'{_STEP.format("call_begin")}function{_STEP.format("sep")}<steptml:invoke name="', '">\n',
              '<steptml:parameter name="', '">', "</steptml:parameter>\n", f"</steptml:invoke>{_STEP.format('call_end')}")
    + _STEP.format("calls_end"),
    "kimi_k2": f"<|tool_calls_section_begin|>{_FOR}<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>"
    f"{{{{ f.arguments | tojson }}}}<|tool_call_end|>{_END}<|tool_calls_section_end|>",
    "deepseek_v3": f"{_V3[0]}{_FOR}{_AGAIN}{_V3[1]}{{{{ call.type }}}}{_SEP}{{{{ f.name }}}}\n```json\n"
    f"{{{{ f.arguments | tojson }}}}\n```{_V3[2]}{_END}{_V3[3]}",
    "deepseek_v31": f"{_V3[0]}{_FOR}{_V3[1]}{{{{ f.name }}}}{_SEP}{{{{ f.arguments | tojson }}}}{_V3[2]}{_END}{_V3[3]}",
    "gemma4": f"{_FOR}<|tool_call>call:{_MARKED}<tool_call|>{_END}",
    "command": "<|START_ACTION|>{{ '[\\n    ' }}" + _FOR + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
    '"parameters": {{ f.arguments | tojson }}}{{ ",\\n    " if not loop.last }}{% endfor %}' + "{{ '\\n]' }}<|END_ACTION|>",
    "phi4_mini": f"{_FOR}<|tool_call|>{_OBJECT}<|/tool_call|>{_END}",
    "granite": f"<|tool_call|>[{_FOR}{_OBJECT}{_COMMA}{_END}]",
    "nemotron": f"<TOOLCALL>[{_FOR}{_OBJECT}{_COMMA}{_END}]</TOOLCALL>",
    "olmo3": f"<function_calls>{_FOR}{_AGAIN}{_PYTHON}{_END}</function_calls>",
    "lfm2": f"<|tool_call_start|>[{_FOR}{_PYTHON}{_COMMA}{_END}]<|tool_call_end|>",
    "pythonic": f"[{_FOR}{_PYTHON}{_COMMA}{_END}]",
    "llama3_json": "{{ raise_exception('one call') if m.tool_calls | length > 1 }}" + _FOR
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
    "mistral": f"[TOOL_CALLS] [{_FOR}{_OBJECT}{_COMMA}{_END}]",
    "mistral_named": f"{_FOR}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{{{{ f.arguments | tojson }}}}{_END}",
    "harmony": f"{_FOR}<|channel|>commentary to=functions.{{{{ f.name }}}} <|constrain|>json<|message|>"
    f"{{{{ f.arguments | tojson }}}}{_END}",
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "put": {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
    "now": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": one}}
    for name, one in SCHEMAS.items()
]
GIVEN: list[tuple[str, dict[str, Any]]] = [("put", {"text": "a b", "count": 3}), ("now", {"zone": "Rome"})]
ASK = {"role": "user", "content": "hello"}


def family(name: str, *, special: bool = True, thought: str = "", calls: str = "") -> Any:
    """A tokenizer with the marks of a family as tokens, and its template."""
    calls = calls or _CALLS[name]
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<assistant>"
        + thought
        + "{{ m.content or '' }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}<eos>{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer(template, *marks_in(calls), special=special)


def rendered(one: Any, messages: list[Any], *, prompt: bool) -> str:
    options = ChatOptions(TOOLS, add_generation_prompt=prompt, control_tokens=True)
    return str(one.decode(encode(messages, one, options)))


def shown(one: Any, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of an assistant's calls that a template writes."""
    found = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for i, (name, given) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": None, "tool_calls": found}
    before, text = rendered(one, [ASK], prompt=True), rendered(one, [ASK, turn], prompt=False)
    assert text.startswith(before) and text.endswith("<eos>")
    return text.removeprefix(before).removesuffix("<eos>")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_family_reads_requires_and_repeats_what_its_template_writes(name: str, special: bool) -> None:
    one, chosen = family(name, special=special), FORMATS[name]
    assert has_format(one) and format_of(one).name == name, "by what the template writes"
    assert (message_format(one) is chosen) == (name == "harmony")
    many = GIVEN if chosen.parallel else GIVEN[:1]
    text, visible = shown(one, many), visible_ids(chosen, one)
    hidden = [mark.content for index, mark in one.added_tokens_decoder.items() if mark.special and index not in visible]
    assert not any(mark in text for mark in hidden), "the parser needs them"
    for cuts in (1, 7, len(text)):
        content, reasoning, calls = read_output(parser_of(name, SCHEMAS, reasoning=reasoning_of(one)), text, cuts)
        assert (content.strip(), reasoning) == ("", "")
        assert [(called, json.loads(arguments)) for called, arguments in calls] == many
    tools = [Tool(name, schema) for name, schema in SCHEMAS.items()]
    grammar = grammar_of(chosen, tools, one, parallel=chosen.parallel)
    assert accepts(grammar, text, one), "a required call is in the family's own form"
    assert not accepts(grammar, text[:-1], one) and not accepts(grammar, "x" + text, one)


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.message is None])
def test_no_family_is_recognized_by_a_mark(name: str) -> None:
    """The control: the template writes the family's marks, and calls that no parser reads."""
    one = family(name, calls=_CALLS[name].replace("f.name }}", "f.name }}!?").replace("call.id }}", "call.id }}!?"))
    assert not has_format(one)
    with refused("tool_format", "auto"):
        format_of(one)


def test_templates_with_marks_and_calls_of_another_form() -> None:
    """A shared mark with arguments of a form of its own is no format; earlier calls without marks, or none, change nothing."""
    own = _FOR + "<tool_call>{{ f.name }}|" + _ARGUMENTS + "{{ k }}~" + _VALUE + "|{% endfor %}</tool_call>{% endfor %}"
    assert not has_format(family("hermes", calls=own))
    for own in (_FOR + "{{ f | tojson }}{% endfor %}", ""):
        assert format_of(family("hermes", calls="said: " + own + "{# <tool_call> #}")).name == "hermes"


def test_ids_that_the_text_has_are_kept() -> None:
    parser = FORMATS["kimi_k2"].parser
    assert parser is not None
    pieces = parser(SCHEMAS, False).push(shown(family("kimi_k2"), GIVEN))
    assert [piece.identity for piece in pieces.calls if piece.name] == ["functions.put:0", "functions.now:1"]


@pytest.mark.parametrize("marks", REASONING, ids=lambda one: one.begin.strip())
def test_reasoning_of_every_family(marks: Any) -> None:
    both = marks_in(marks.begin + marks.end)
    one = family("hermes", thought=f"{{{{ {json.dumps(marks.begin)} + 'hm' + {json.dumps(marks.end)} if m.thinks }}}}")
    one.add_tokens([AddedToken(text, special=True, normalized=False) for text in both])
    assert reasoning_of(one) is marks and reasoning_of(family("hermes")) is reasoning_of(None) is None
    for begin, is_open in ((marks.begin, False), ("", True)):
        parser = parser_of("hermes", SCHEMAS, reasoning=marks, is_open=is_open)
        assert read_output(parser, f"{begin}Hm{marks.end}\nFour", 2)[:2] == ("Four", "Hm")
    assert sorted(one.convert_ids_to_tokens(visible_ids(None, one, reasoning=marks))) == both
    answer = grammar_of(None, [], one, reasoning=marks, answer={"const": 4})
    thought = f"{marks.begin}so\n\n\n\n{marks.end}{marks.after}"
    assert accepts(answer, thought + "4", one) and accepts(answer, "4", one)
    assert marks.after or accepts(answer, thought + "\n\n4", one)
    assert not accepts(answer, thought + "\n\n\n4", one), "line breaks without end"
    for prompt, is_open in ((marks.begin, True), (f"{marks.begin}a{marks.end}\n", False)):
        ids = one("x" + prompt, add_special_tokens=False).input_ids
        assert (marks.is_open(one, ids), marks.is_closed(one, ids)) == (is_open, not is_open)


TEMPLATES = {
    "harmony": "{{ tools }}<|start|>assistant<|channel|>final<|message|>",
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=example>",
    "hermes": "{% if tools %}{{ tools }}{% endif %}<tool_call>",
    "mistral": "{{ tools }}[TOOL_CALLS] [{{ calls }}]",
    "mistral_named": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "pythonic": "{{ tools }}[func_name1(params_name1=params_value1)]",
    "llama3_json": "{{ tools }}<|python_tag|>",
}
CLOSED: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
CITY = {"days": {"type": "integer"}, "city": {"enum": ["Rome", "Oslo"]}, "when": {"$ref": "#/$defs/w"}}
WEATHER = Tool("weather", {**CLOSED, "properties": CITY, "required": ["city"], "$defs": {"w": {"type": "boolean"}}})
TIME = Tool("time", CLOSED)


def tokenizer(template: Any, *added: str, special: bool = True) -> Any:
    one = tiny.tokenizer()
    one.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    one.chat_template = template
    return one


def test_a_template_has_a_format() -> None:
    for name, template in TEMPLATES.items():
        assert format_of(tokenizer(template)).name == name
        assert format_of(tokenizer(template), "hermes").name == "hermes", "the choice of a user comes first"
    several = {"default": "{{ messages }}", "tool_use": TEMPLATES["mistral"]}
    assert format_of(tokenizer(several)).name == "mistral"


def test_models_without_tools() -> None:
    class Small:
        """A tokenizer of another library, with what foresay needs for texts alone."""

        chat_template = TEMPLATES["hermes"]
        eos_token_id = 0

    assert visible_ids(FORMATS["mistral"], Small(), reasoning=THINK) == ()
    for one in (tokenizer(None), tokenizer("{{ messages }}"), Small()):
        with refused("tools"):
            format_of(one)
    with refused("tools"):
        format_of(tokenizer("{{ messages }}"), "hermes")  # the tools would not reach the model
    with refused("tool_format", "auto"):
        format_of(tokenizer("{{ tools }}"))


def output(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return written(FORMATS[name], *calls)


ROME, NOW = ("weather", {"city": "Rome"}), ("time", {})
ADDED = pytest.mark.parametrize("added", [False, True], ids=["texts", "tokens"])
"""Marks that are texts, and marks that are special tokens."""


@pytest.mark.parametrize("name", FORMATS)
@ADDED
def test_grammars(name: str, added: bool) -> None:
    chosen = FORMATS[name]
    one = tokenizer(None, *(marks_in(" ".join(chosen.texts)) if added else ()))
    both = grammar_of(chosen, [WEATHER, TIME], one, parallel=True)
    single = grammar_of(chosen, [WEATHER, TIME], one, parallel=False)
    for good in (ROME, ("weather", {"city": "Oslo", "when": True}), NOW):
        assert accepts(both, output(name, good), one) and accepts(single, output(name, good), one)
    several = output(name, ROME, NOW)
    assert accepts(both, several, one) == chosen.parallel and not accepts(single, several, one)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("weather", {}), ("weather", {"city": "Bonn"}), ("other", {}), ("time", {"city": "Rome"}),
        ("weather", {"city": "Rome", "when": 1}), ("weather", {"city": "Rome", "more": 1}),
    ]  # fmt: skip
    for text in ("", "text " + output(name, ROME), *(output(name, bad) for bad in wrong)):
        assert not accepts(both, text, one), text


@ADDED
def test_a_call_of_harmony_may_follow_reasoning(added: bool) -> None:
    chosen, call = FORMATS["harmony"], output("harmony", NOW)
    one = tokenizer(None, *(marks_in(" ".join(chosen.texts)) if added else ()))
    grammar = grammar_of(chosen, [TIME], one, parallel=False, reasoning=REASONING[0])
    thought = "<|channel|>analysis<|message|>so, the\ntime<|end|><|start|>assistant"
    assert accepts(grammar, thought + call, one)
    assert not accepts(grammar, thought, one) and not accepts(grammar, thought[:-9] + call, one)


def test_tagged_arguments() -> None:
    """Any text of a string, the JSON of other types, required ones first, others in order."""
    chosen, one = FORMATS["qwen3_coder"], tokenizer(None)
    text = {"type": "string"}
    properties = {"note": text, "text": text, "count": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
    tool = Tool("put", {"properties": properties, "required": ["text", "kind"]})
    grammar = grammar_of(chosen, [tool], one, parallel=False)
    for arguments, is_good in (
        ({"text": "two\nlines of <b>", "kind": "a"}, True),
        ({"text": "", "kind": "b", "note": "x", "count": 3}, True),
        ({"text": "x"}, False),
        ({"text": "x", "kind": "c"}, False),
        ({"text": "x", "kind": "a", "count": "x"}, False),
        ({"kind": "a", "text": "x"}, False),
    ):
        assert accepts(grammar, output("qwen3_coder", ("put", arguments)), one) == is_good, arguments
    bounded = Tool("put", {"properties": {"text": {"type": "string", "pattern": "^a$"}}})
    with refused("tool", "put"):
        grammar_of(chosen, [bounded], one, parallel=False)


@ADDED
def test_a_grammar_after_reasoning(added: bool) -> None:
    one, call = tokenizer(None, *(("</think>",) if added else ())), output("hermes", NOW)
    grammar = grammar_of(FORMATS["hermes"], [TIME], one, parallel=True, reasoning=THINK, after_reasoning=True)
    assert accepts(grammar, f"so, the time\n</think>\n\n{call}", one) and not accepts(grammar, call, one)
    mask = Grammar(grammar, one, len(one), [0]).mask_after(0)
    before, draft, other = (one(text).input_ids for text in ("so, the ", "time\n</think>\n", "x"))
    for ids in (before, before + draft, before + other):  # the draft is taken back
        assert mask.forced_tokens(ids) is not None and not mask._matcher.is_error()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("get-w", {}), ("2f", {}), ("f", {"properties": {"from": {}}}), ("f", {"properties": {"a-b": {}}}), ("class", {}),
        ("f", {"properties": {"a": {}}, "required": None}), ("f", {"properties": ["a"]}), ("f", {"required": 5}),
    ],
)  # fmt: skip
def test_tools_that_are_no_python_calls(name: str, parameters: dict[str, Any]) -> None:
    with refused("tool"):
        grammar_of(FORMATS["pythonic"], [Tool(name, parameters)], tokenizer(None), parallel=True)


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"]])
def test_keyword_arguments_are_complete_and_given_once(required: list[str]) -> None:
    """Required ones come first."""
    one = tokenizer(None)
    tool = Tool("f", {"properties": {key: {"type": "integer"} for key in "abc"}, "required": required})
    grammar = grammar_of(FORMATS["pythonic"], [tool], one, parallel=False)
    for names in ("", "a", "ab", "bc", "abc"):
        inside = ", ".join(f"{name}=1" for name in dict.fromkeys([*required, *names]))
        assert accepts(grammar, f"[f({inside})]", one) and not accepts(grammar, f"[f({inside}, )]", one)
    assert accepts(grammar, "[f()]", one) == (not required) and not accepts(grammar, "[f(a=1, a=1)]", one)


@pytest.mark.parametrize(
    ("mark", "special"),
    [("</call>", True), ("</call>", False), ("[CALL]", True), ("[CALL]", False), ("\n</call>", False)],
)
def test_marks_can_be_taken_back(mark: str, special: bool) -> None:
    """The grammar library's mask after a rejected mark is that of a new matcher."""
    one = tokenizer(None, mark, special=special)
    compiled = Grammar(f'start: "{{" "days" "}}" {Terminals(one)(mark)} "x"\n', one, len(one), [0])
    ids = [*one("{days}").input_ids, one.convert_tokens_to_ids(mark)]

    def allowed(mask: Any, output: list[int]) -> Any:
        return mask(torch.tensor([output]), torch.zeros(1, len(one)))

    for count in range(len(ids)):
        mask = compiled.mask_after(0)
        before, _ = allowed(mask, ids[:count]), allowed(mask, ids)
        assert torch.equal(allowed(mask, ids[:count]), before)
        assert torch.equal(allowed(compiled.mask_after(0), ids[:count]), before)
