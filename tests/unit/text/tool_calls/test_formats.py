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
WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "city": {"enum": ["Rome", "Oslo"]}, "when": {"$ref": "#/$defs/w"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"w": {"type": "boolean"}},
    },
)
TIME = Tool("time", {"type": "object", "properties": {}, "additionalProperties": False})


def tokenizer(template: str | None, *added: str, special: bool = True) -> Any:
    one = tiny.tokenizer()
    one.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    one.chat_template = template
    return one


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_a_format(name: str) -> None:
    assert format_of(tokenizer(TEMPLATES[name])).name == name
    assert format_of(tokenizer(TEMPLATES[name]), "hermes").name == "hermes", "the choice of a user comes first"


def test_templates_of_several_names() -> None:
    one = tokenizer(None)
    one.chat_template = {"default": "{{ messages }}", "tool_use": TEMPLATES["mistral"]}
    assert format_of(one).name == "mistral"


@pytest.mark.parametrize(
    ("template", "param", "value"),
    [
        (None, "tools", None),
        ("{{ messages }}", "tools", None),
        ("{{ tools }}", "tool_format", "auto"),
    ],
)
def test_models_without_tools(template: str | None, param: str, value: Any) -> None:
    with refused(param, value):
        format_of(tokenizer(template))
    if param == "tools":
        with refused("tools"):
            format_of(tokenizer(template), "hermes")  # the tools would not reach the model


def test_only_special_tokens_have_to_be_made_visible() -> None:
    chosen = FORMATS["mistral_named"]
    one = tokenizer(None, "[TOOL_CALLS]")
    assert visible_ids(chosen, one) == (one.convert_tokens_to_ids("[TOOL_CALLS]"),)
    assert (
        visible_ids(chosen, tokenizer(None, "[TOOL_CALLS]", special=False))
        == visible_ids(chosen, tokenizer(None))
        == ()
    )
    both = tokenizer(None, "[TOOL_CALLS]", "</think>")
    assert len(visible_ids(chosen, both)) == len(visible_ids(None, both, reasoning=THINK)) == 1
    assert len(visible_ids(chosen, both, reasoning=THINK)) == 2 and visible_ids(None, both) == ()


def test_a_tokenizer_of_another_library() -> None:
    """With what foresay needs for texts alone."""

    class Small:
        chat_template = TEMPLATES["hermes"]
        eos_token_id = 0

    assert visible_ids(FORMATS["mistral"], Small(), reasoning=THINK) == ()
    with refused("tools"):
        format_of(Small())


def output(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return written(FORMATS[name], *calls)


ROME, OSLO = ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo", "when": True})


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items()])
@pytest.mark.parametrize("added", [False, True])
def test_grammars(name: str, added: bool) -> None:
    """With markers that are tokens, special ones too, and with markers that are texts."""
    chosen = FORMATS[name]
    one = tokenizer(None, *(marks_in(" ".join(chosen.texts)) if added else ()))
    both = grammar_of(chosen, [WEATHER, TIME], one, parallel=True)
    single = grammar_of(chosen, [WEATHER, TIME], one, parallel=False)
    for good in ([ROME], [OSLO], [("time", {})]):
        assert accepts(both, output(name, *good), one) and accepts(single, output(name, *good), one)
    several = output(name, ROME, ("time", {}))
    assert accepts(both, several, one) == chosen.parallel and not accepts(single, several, one)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("weather", {}), ("weather", {"city": "Bonn"}), ("other", {}), ("time", {"city": "Rome"}),
        ("weather", {"city": "Rome", "when": 1}), ("weather", {"city": "Rome", "more": 1}),
    ]  # fmt: skip
    for bad in wrong:
        assert not accepts(both, output(name, bad), one), bad
    assert not accepts(both, "", one) and not accepts(both, "text " + output(name, ROME), one)


@pytest.mark.parametrize("added", [False, True])
def test_a_call_of_harmony_may_follow_reasoning(added: bool) -> None:
    chosen = FORMATS["harmony"]
    one = tokenizer(None, *(marks_in(" ".join(chosen.texts)) if added else ()))
    grammar = grammar_of(chosen, [TIME], one, parallel=False, reasoning=REASONING[0])
    thought = "<|channel|>analysis<|message|>so, the\ntime<|end|><|start|>assistant"
    assert accepts(grammar, thought + output("harmony", ("time", {})), one)
    assert not accepts(grammar, thought, one) and not accepts(
        grammar, thought[:-9] + output("harmony", ("time", {})), one
    )


def test_tagged_arguments() -> None:
    """Any text of a string, the JSON of other types, required ones first, others in order."""
    chosen, one = FORMATS["qwen3_coder"], tokenizer(None)
    schema = {
        "properties": {
            "note": {"type": "string"}, "text": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["a", "b"]},
        },
        "required": ["text", "kind"],
    }  # fmt: skip
    grammar = grammar_of(chosen, [Tool("put", schema)], one, parallel=False)
    text = "two\nlines of <b>"
    assert accepts(grammar, output("qwen3_coder", ("put", {"text": text, "kind": "a"})), one)
    assert accepts(grammar, output("qwen3_coder", ("put", {"text": "", "kind": "b", "note": "x", "count": 3})), one)
    for bad in (
        {"text": "x"},
        {"text": "x", "kind": "c"},
        {"text": "x", "kind": "a", "count": "x"},
        {"kind": "a", "text": "x"},
    ):
        assert not accepts(grammar, output("qwen3_coder", ("put", bad)), one)
    bounded = Tool("put", {"properties": {"text": {"type": "string", "pattern": "^a$"}}})
    with refused("tool", "put"):
        grammar_of(chosen, [bounded], one, parallel=False)


@pytest.mark.parametrize("added", [False, True])
def test_a_grammar_after_reasoning(added: bool) -> None:
    one = tokenizer(None, *(("</think>",) if added else ()))
    grammar = grammar_of(FORMATS["hermes"], [TIME], one, parallel=True, reasoning=THINK, after_reasoning=True)
    call = output("hermes", ("time", {}))
    assert accepts(grammar, f"so, the time\n</think>\n\n{call}", one)
    assert not accepts(grammar, call, one)
    mask = Grammar(grammar, one, len(one), [0]).mask_after(0)
    before, draft = one("so, the ").input_ids, one("time\n</think>\n").input_ids
    assert mask.forced_tokens(before) is not None and mask.forced_tokens(before + draft) is not None
    assert mask.forced_tokens(before + one("x").input_ids) is not None and not mask._matcher.is_error(), (
        "it is taken back"
    )


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


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b"], ["b", "c"], ["a", "b", "c"]])
@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"]])
def test_keyword_arguments_are_complete_and_given_once(names: list[str], required: list[str]) -> None:
    """Required ones come first."""
    one = tokenizer(None)
    tool = Tool("f", {"properties": {key: {"type": "integer"} for key in "abc"}, "required": required})
    grammar = grammar_of(FORMATS["pythonic"], [tool], one, parallel=False)
    ordered = required + [name for name in names if name not in required]
    inside = ", ".join(f"{name}=1" for name in ordered)
    assert accepts(grammar, f"[f({inside})]", one)
    if required:
        assert not accepts(grammar, "[f()]", one)
    assert not accepts(grammar, "[f(a=1, a=1)]", one) and not accepts(grammar, f"[f({inside}, )]", one)


@pytest.mark.parametrize(
    ("mark", "special"),
    [("</call>", True), ("</call>", False), ("[CALL]", True), ("[CALL]", False), ("\n</call>", False)],
)
def test_marks_can_be_taken_back(mark: str, special: bool) -> None:
    """The grammar library's mask after a rejected mark is that of a new matcher."""
    one = tokenizer(None, mark, special=special)
    grammar = f'start: "{{" "days" "}}" {Terminals(one)(mark)} "x"\n'
    compiled = Grammar(grammar, one, len(one), [0])
    ids = [*one("{days}").input_ids, one.convert_tokens_to_ids(mark)]

    def allowed(mask: Any, output: list[int]) -> Any:
        return mask(torch.tensor([output]), torch.zeros(1, len(one)))

    for count in range(len(ids)):
        mask = compiled.mask_after(0)
        before, _ = allowed(mask, ids[:count]), allowed(mask, ids)
        assert torch.equal(allowed(mask, ids[:count]), before)
        assert torch.equal(allowed(compiled.mask_after(0), ids[:count]), before)
