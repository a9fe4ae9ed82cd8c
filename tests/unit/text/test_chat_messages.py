"""Messages as templates of real families read them: contents that are missing, and arguments of calls."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from foresay.errors import PromptError
from foresay.text.prompts import encode
from helpers.making import byte_level
from helpers.refusals import refused

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
@pytest.mark.parametrize("before", ["", "None"])
def test_a_missing_content(case: str, before: str) -> None:
    part, wanted = CONTENTS[case]
    template = f"{before}{{% for m in messages %}}{part}{{% endfor %}}"
    assert written(template, turn({})) == before + wanted
    assert written(template, turn({}, "y")) != before + wanted or case in ("searches",), "control"


@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.parametrize(
    "given",
    [
        {"city": "Rome"}, CALL, '{"city": "Rome', "{'city': 'Rome'}", '{"city": "Rome", "da', '{"city": "Rome"}}',
        '{"city": "Rome"}\n]}',
    ],
)  # fmt: skip
def test_arguments(case: str, given: Any) -> None:
    """Objects, texts, and texts that were cut off or written in Python."""
    part, wanted = ARGUMENTS[case]
    assert written(each(f"{{% set c = t.function %}}{part}"), turn(given)) == wanted


def test_both_forms_at_once() -> None:
    template = "{% for m in messages %}{{ m.content + m.tool_calls[0].function.arguments }}{% endfor %}"
    assert written(template, turn({"city": "Rome"})) == CALL


@pytest.mark.parametrize("given", ["[" * 5000, "Rome", "[1]", '"a"'])
def test_arguments_that_are_no_object_are_named(given: str) -> None:
    with refused("prompt", kind=PromptError):
        written(each("{{ t.function.arguments.items() }}"), {"role": "user", "content": "x"}, turn(given))
    printed = (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{{ t.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert written(printed, turn(given)) == given


@pytest.mark.parametrize("given", ["[1,2]", "null", "Rome", '{"a": 1}} b'])
def test_arguments_that_would_become_a_string_are_named(given: str) -> None:
    with refused("messages", kind=PromptError):
        written(each("{{ t.function.arguments | tojson }}"), turn(given))
    assert written(each("{{ t.function.arguments | tojson }}"), turn('{"a": 1}')) == '{"a": 1}', "control"


@pytest.mark.parametrize("calls", [None, 7, [7], [{"function": 7}], [{"name": "f"}], [{"function": {"name": "f"}}]])
def test_calls_of_another_shape(calls: Any) -> None:
    assert (
        written("{% for m in messages %}ok{% endfor %}", {"role": "assistant", "content": "x", "tool_calls": calls})
        == "ok"
    )
