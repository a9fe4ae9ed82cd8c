"""Which format a model has, and grammars of outputs that must call a tool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from foresay.text.grammar import Grammar
from foresay.text.reasoning import REASONING, THINK
from foresay.text.tool_calls.call_grammars import grammar_of
from foresay.text.tool_calls.calls import Tool
from foresay.text.tool_calls.families import FORMATS
from foresay.text.tool_calls.formats import format_of, visible_ids
from foresay.text.tool_calls.terminals import Terminals
from helpers import tiny
from helpers.refusals import refused
from helpers.tool_chats import written
from helpers.tool_formats import accepts, marks_in

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


def tokenizer(template: str | None, *added: str, special: bool = True) -> Any:
    one = tiny.tokenizer()
    one.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    one.chat_template = template
    return one


def test_a_template_has_a_format() -> None:
    for name, template in TEMPLATES.items():
        assert format_of(tokenizer(template)).name == name
        assert format_of(tokenizer(template), "hermes").name == "hermes", "the choice of a user comes first"
    several: Any = {"default": "{{ messages }}", "tool_use": TEMPLATES["mistral"]}
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


def test_only_special_tokens_have_to_be_made_visible() -> None:
    chosen = FORMATS["mistral_named"]
    one = tokenizer(None, "[TOOL_CALLS]")
    assert visible_ids(chosen, one) == (one.convert_tokens_to_ids("[TOOL_CALLS]"),)
    for other in (tokenizer(None, "[TOOL_CALLS]", special=False), tokenizer(None)):
        assert visible_ids(chosen, other) == ()
    both = tokenizer(None, "[TOOL_CALLS]", "</think>")
    assert len(visible_ids(chosen, both)) == len(visible_ids(None, both, reasoning=THINK)) == 1
    assert len(visible_ids(chosen, both, reasoning=THINK)) == 2 and visible_ids(None, both) == ()


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
