"""Prompts of every type and their token ids, and chat templates: their variables, and the forms of messages that they read."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from foresay.errors import PromptError
from foresay.text.prompts import ChatOptions, FillIn, encode, is_batch, template_variables
from helpers import tiny
from helpers.making import byte_level
from helpers.refusals import refused

USER = {"role": "user", "content": "the cat"}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    out = deepcopy(byte_level())
    out.chat_template = TEMPLATE
    return out


def test_one_prompt_or_a_batch() -> None:
    array, tensor = np.array([1, 2]), torch.tensor([1, 2])
    for prompt in ("text", [1, 2], (1, 2), range(3), [USER], [USER, USER], tensor, array):
        assert not is_batch(prompt), prompt
    texts: list[Any] = [["text"], ["a", "b"]]
    for prompt in (*texts, [[1, 2], [3]], [(1,), (2,)], [[USER]], [tensor], [array], tensor[None], array[None]):
        assert is_batch(prompt), prompt
    for prompt in (5, None, USER, {1}, b"a", [], ()):
        with refused("prompt", kind=PromptError):
            is_batch(prompt)


def test_token_ids_pass_through_as_plain_integers() -> None:
    tensors = [torch.tensor([3, 1], dtype=kind) for kind in (torch.int64, torch.uint8)]
    for prompt in ([3, 1], (3, 1), [np.int64(3), 1], np.array([3, 1], np.int32), *tensors):
        ids = encode(prompt, None)
        assert ids == [3, 1] and {type(token) for token in ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (torch.tensor([[1, 2]]), "shape (1, 2) and dtype torch.int64"),
        (torch.tensor(1), "shape () and dtype torch.int64"),
        (torch.tensor([1.0]), "shape (1,) and dtype torch.float32"),
        (np.array([True]), "shape (1,) and dtype bool"),
        ([1, 2.0], "prompt item 2.0 of type float"),
        ([True], "prompt item True of type bool"),
        ([1, USER], f"prompt item {USER!r} of type dict"),
        ([None], "prompt item None of type NoneType"),
        (np.array([], np.int64), "the prompt is empty"),
        ("", "the prompt is empty; give at least one character"),
        (b"hello", "bytes"),
        ([USER, {"role": "user"}], "message 1 has the keys ['role']"),
        ([{"content": "x", "name": "y"}], "message 0 has the keys ['content', 'name']"),
        ([USER, {"role": "robot", "content": "x"}], "message 1 has role='robot'; known roles: system, user, assistant, tool"),
        ([{"role": "user", "content": "bad"}], "the chat template refused the messages: no bad words"),
        (FillIn("a", "b"), "no tokens for filling in"),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_prompts_are_named(prompt: Any, words: str, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<fim_prefix>", "<fim_middle>"], special_tokens=True)
    with pytest.raises(PromptError, match=re.escape(words)):
        encode(prompt, tokenizer)


def test_texts_and_messages_need_a_tokenizer_and_messages_a_template() -> None:
    for prompt in ("text", [USER]):
        with refused("tokenizer", kind=PromptError):
            encode(prompt, None)
    with refused("prompt", kind=PromptError):
        encode([USER], byte_level())


def test_a_text_is_encoded_as_it_is_and_messages_by_the_template(tokenizer: Any) -> None:
    text = "<user>the cat\n<assistant>sat\n<user>the cat\n<assistant>"
    ids = encode([USER, {"role": "assistant", "content": "sat"}, USER], tokenizer)
    assert tokenizer.decode(ids) == text == tokenizer.decode(encode(text, tokenizer))
    assert {type(token) for token in ids} == {int} and tokenizer.eos_token_id in encode("a<eos>", tokenizer)
    for role in ("system", "user", "assistant", "tool", "developer"):
        assert tokenizer.decode(encode([{"role": role, "content": "x"}], tokenizer)).startswith(f"<{role}>x")


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ],
)
def test_a_gap_between_two_texts(marks: tuple[str, str, str], tokenizer: Any) -> None:
    tokenizer.add_tokens(list(marks), special_tokens=True)
    before, after, middle = tokenizer.convert_tokens_to_ids(list(marks))
    ids = tokenizer("the cat", add_special_tokens=False).input_ids
    assert encode(FillIn("the cat", "the cat"), tokenizer) == [before, *ids, after, *ids, middle]
    assert encode(FillIn("", "the cat"), tokenizer) == [before, after, *ids, middle]


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
GIVEN: dict[str, tuple[str, str]] = {
    "messages": ("{{ messages[0]['content'] }}", "the cat"),
    "add_generation_prompt": ("{{ add_generation_prompt }}", "True"),
    "tools": ("{{ tools[0]['function']['name'] }}", "f"),
    "special tokens": ("{{ bos_token }}{{ eos_token }}{{ pad_token }}", "<bos><eos><eos>"),
    "documents, absent": ("{{ documents is none or documents is undefined }}", "True"),
    "raise_exception": ("{% if false %}{{ raise_exception('no') }}{% endif %}x", "x"),
    "strftime_now": ("{{ strftime_now('%Y') | length }}", "4"),
    "namespace": ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}", "2"),
    "range": ("{% for i in range(2) %}{{ loop.index0 }}{% endfor %}", "01"),
    "break": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "tojson": ("{{ {'a': '<b>'} | tojson }}", '{"a": "<b>"}'),
    "generation": ("{% generation %}x{% endgeneration %}", "x"),
    "macros": ("{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(1) }}", "[1]"),
    "string methods": ("{{ ' a '.strip().split('a')[0] | length }}{{ 'ab'[::-1] }}", "0ba"),
    "filters": ("{{ [1, 2] | map('string') | join(',') }}{{ 'x' | trim | upper }}", "1,2X"),
    "tests": ("{{ messages is iterable and messages[0].content is string }}", "True"),
}
"""Names that every template may use, which a caller may not set: template, text."""


def test_variables_of_templates() -> None:
    """Names that a caller sets are undefined otherwise; one that the template does not read cannot be set."""
    tokenizer = tiny.tokenizer()

    def written(template: str, **variables: Any) -> tuple[str, frozenset[str]]:
        tokenizer.chat_template = template
        options = ChatOptions([TOOL], variables, True, False)
        return str(tokenizer.decode(encode([USER], tokenizer, options))), template_variables(tokenizer, options)

    for template, wanted in GIVEN.values():
        assert written(template) == (wanted, frozenset()), template
    for name in ("enable_thinking", "controls"):
        template = f"{{{{ {name} if {name} is defined else 'undefined' }}}}"
        assert written(template) == ("undefined", {name})
        assert written(template, **{name: "set"}) == ("set", {name})
    assert written("x")[1] == set()


CALL = '{"city": "Rome"}'
ASKS = "{% if m.content is none %}CALL{% else %}[{{ m.content }}]{% endif %}"
CONTENTS = {
    "asks for none": (ASKS, "CALL"),
    "requests none and a text": ("{% if m.content is not none and m.content != '' %}x{% else %}CALL{% endif %}", "CALL"),
    "adds a text": ("{{ 'a' + m.content + 'b' }}", "ab"),
    "trims": ("<{{ m.content | trim }}>", "<>"),
    "searches": ("{% if '</think>' in m.content %}x{% endif %}ok", "ok"),
    "prints": ("<{{ m.content }}>", "<>"),
    "splits": ("{{ m.content.split('x')[0] }}ok", "ok"),
    "has a default": ("<{{ m.content or 'nothing' }}>", "<nothing>"),
}  # fmt: skip
ARGUMENTS = {
    "an object as JSON": ("{{ c.arguments | tojson }}", CALL),
    "members": ("{% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "city=Rome"),
    "members by a filter": ("{% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %}", "city=Rome"),
    "only an object": ("{% if c.arguments is mapping %}{{ c.arguments | tojson }}{% endif %}", CALL),
    "adds a text": ("{{ '<' + c.arguments + '>' }}", f"<{CALL}>"),
    "prints": ("<{{ c.arguments }}>", f"<{CALL}>"),
    "either": ("{{ c.arguments if c.arguments is string else c.arguments | tojson }}", CALL),
}


def written(template: str, *messages: dict[str, Any]) -> str:
    tokenizer: Any = deepcopy(byte_level())
    tokenizer.chat_template = template
    return str(tokenizer.decode(encode(list(messages), tokenizer)))


def each(part: str) -> str:
    """A template that writes a part for each call."""
    return f"{{% for m in messages %}}{{% for t in m.tool_calls or [] %}}{part}{{% endfor %}}{{% endfor %}}"


def turn(arguments: Any, content: str | None = None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize("case", CONTENTS)
def test_a_missing_content(case: str) -> None:
    part, wanted = CONTENTS[case]
    for before in ("", "None"):
        template = f"{before}{{% for m in messages %}}{part}{{% endfor %}}"
        assert written(template, turn({})) == before + wanted
        assert written(template, turn({}, "y")) != before + wanted or case == "searches", "control"


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str) -> None:
    """Objects, texts, and texts that were cut off or written in Python."""
    part, wanted = ARGUMENTS[case]
    others = ['{"city": "Rome', "{'city': 'Rome'}", '{"city": "Rome", "da', '{"city": "Rome"}}', '{"city": "Rome"}\n]}']
    for given in ({"city": "Rome"}, CALL, *others):
        assert written(each(f"{{% set c = t.function %}}{part}"), turn(given)) == wanted, given


def test_both_forms_at_once() -> None:
    template = "{% for m in messages %}{{ m.content + m.tool_calls[0].function.arguments }}{% endfor %}"
    assert written(template, turn({"city": "Rome"})) == CALL


@pytest.mark.parametrize("given", ["[" * 5000, "Rome", "[1]", '"a"', "null", '{"a": 1}} b'])
def test_arguments_that_are_no_object_are_named(given: str) -> None:
    """Where a template reads members of them, or would make them a string."""
    for part, param in (
        ("{{ t.function.arguments.items() }}", "prompt"),
        ("{{ t.function.arguments | tojson }}", "messages"),
    ):
        with refused(param, kind=PromptError):
            written(each(part), {"role": "user", "content": "x"}, turn(given))
        assert written(each(part), turn('{"a": 1}')), "control"
    assert written(each("{{ t.function.arguments }}"), turn(given)) == given


@pytest.mark.parametrize("calls", [None, 7, [7], [{"function": 7}], [{"name": "f"}], [{"function": {"name": "f"}}]])
def test_calls_of_another_shape(calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert written("{% for m in messages %}ok{% endfor %}", message) == "ok"
