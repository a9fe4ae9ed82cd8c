"""Names that published chat templates read: given by transformers, by the tokenizer, or by the caller; others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from foresay.text.prompts import ChatOptions, encode, template_variables
from helpers import tiny

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
GIVEN: dict[str, tuple[str, str]] = {
    "messages": ("{{ messages[0]['content'] }}", "hello"),
    "add_generation_prompt": ("{{ add_generation_prompt }}", "True"),
    "tools": ("{{ tools[0]['function']['name'] }}", "f"),
    "bos_token": ("{{ bos_token }}", "<bos>"),
    "eos_token": ("{{ eos_token }}", "<eos>"),
    "pad_token": ("{{ pad_token }}", "<eos>"),
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
    "tests": ("{{ messages is iterable and messages[0].content is string and x is not defined }}", "True"),
}
"""Names that every template may use: template, text."""
OF_THE_CALLER = (
    "enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "date_string", "custom_tools", "builtin_tools",
    "tools_in_user_message", "add_vision_id", "controls", "model_identity", "preserve_thinking", "xml_tools", "python_tools",
    "safe_serialization",
)  # fmt: skip
"""Variables that a caller may set, and that are undefined otherwise."""


def _rendered(template: str, **variables: Any) -> str:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    options = ChatOptions([TOOL], variables, True, False)
    return str(tokenizer.decode(encode([{"role": "user", "content": "hello"}], tokenizer, options)))


@pytest.mark.parametrize(("template", "wanted"), GIVEN.values(), ids=GIVEN)
def test_names_of_every_template(template: str, wanted: str) -> None:
    assert _rendered(template) == wanted
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    assert template_variables(tokenizer, ChatOptions([TOOL])) <= {"x"}


@pytest.mark.parametrize("name", OF_THE_CALLER)
def test_variables_of_the_caller(name: str) -> None:
    template = f"{{{{ {name} if {name} is defined else 'undefined' }}}}"
    assert _rendered(template) == "undefined"
    assert _rendered(template, **{name: "set"}) == "set"
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    assert template_variables(tokenizer, ChatOptions([TOOL])) == {name}
    tokenizer.chat_template = "x"  # the server refuses a name that the template does not read
    assert name not in template_variables(tokenizer, ChatOptions([TOOL]))
