"""Grammars of outputs that call a tool, in the format of each family, with reasoning before the call where the family has it.

Owns the rules of calls and arguments; those of tagged arguments are in tagged.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import json_rule, rule_of
from foresay.text.reasoning import Reasoning
from foresay.text.tool_calls.calls import Tool
from foresay.text.tool_calls.families import NUMBER, ToolFormat
from foresay.text.tool_calls.schema_types import Allowed
from foresay.text.tool_calls.tagged import definitions, ordered, rules_of, value_rules
from foresay.text.tool_calls.terminals import Terminals

_BREAKS = "/\\n{0,2}/"
"""White space between reasoning and what follows it."""


def grammar_of(
    chosen: ToolFormat | None,
    tools: Sequence[Tool],
    tokenizer: Any,
    *,
    parallel: bool = False,
    reasoning: Reasoning | None = None,
    after_reasoning: bool = False,
    answer: Mapping[str, Any] | str | None = None,
) -> str:
    """Return the grammar, in Lark's syntax, of an output that calls one of the tools, or several if `parallel`.

    chosen: None without tools. reasoning: marks of the reasoning with which the output may begin. after_reasoning: True if it
    begins inside. answer: schema or grammar of an output without calls. Raises ConfigError for tools that the format cannot
    express.
    """
    terminals = Terminals(tokenizer)
    outputs, before, rules = list[str](), "", list[str]()
    if chosen is not None and tools:
        begin, between, end = map(terminals, chosen.around)
        more = f"({between} call)*" if parallel and chosen.parallel else ""
        outputs.append(f"{begin} call {more} {end}")
        rules += _calls(chosen, tools, terminals)
    if answer is not None:
        outputs.append(f"{'' if chosen is None else terminals(chosen.answer)} answer")
        rules.append(f"answer: {rule_of(answer)}")
    if reasoning is not None:
        begin = "" if after_reasoning else terminals(reasoning.begin)
        before = f"({begin} reasoning {terminals(reasoning.after) or _BREAKS}){'' if after_reasoning else '?'}"
        rules.append(terminals.up_to("reasoning", reasoning.end))
    return "\n".join([f"start: {before} output", f"output: {' | '.join(outputs)}", *rules]) + "\n"


def _calls(chosen: ToolFormat, tools: Sequence[Tool], terminals: Terminals) -> list[str]:
    """Return the rules of a call of one of the tools."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        before, middle, after = chosen.call
        opening = " /[0-9]{1,4}/ ".join(map(terminals, (before + tool.name + middle).split(NUMBER)))
        rules.append(f"call_{i}: {opening} args_{i} {terminals(after)}")
        rules += _arguments(chosen, f"args_{i}", tool, terminals)
    return rules


def _arguments(chosen: ToolFormat, rule: str, tool: Tool, terminals: Terminals) -> list[str]:
    if chosen.tags is not None:
        return rules_of(chosen.tags, rule, tool, terminals)
    if chosen.is_python:
        return _keywords(rule, tool)
    if chosen.quote:
        shared = definitions(tool)
        ordered(tool)  # the checks of a tool's schema
        return _members(rule, tool.parameters, shared, tool.name, chosen.quote, terminals)
    return [f"{rule}: {json_rule({'type': 'object', **tool.parameters})}"]


def _given_once(rule: str, count: int, total: int, separator: str) -> list[str]:
    """Return the rules of `total` parts in their order, of which the first `count` are required, with separators between them."""
    tails = [f"{rule}_tail_{i}: ({json.dumps(separator)} {rule}_{i})? {rule}_tail_{i + 1}" for i in range(count, total)]
    if count:
        whole = f" {json.dumps(separator)} ".join(f"{rule}_{i}" for i in range(count)) + f" {rule}_tail_{count}"
    else:
        whole = " | ".join(['""', *(f"{rule}_{i} {rule}_tail_{i + 1}" for i in range(total))])
    return [f"{rule}: {whole}", *tails, f'{rule}_tail_{total}: ""']


def _keywords(rule: str, tool: Tool) -> list[str]:
    """Return the rules of keyword arguments: the required ones, then others, in the order of the schema.

    Raises ConfigError for tools that cannot be written as Python calls with keyword arguments.
    """
    names, count = ordered(tool)
    for name in (*tool.name.split("."), *names):
        if not name.isidentifier() or iskeyword(name):
            text = "cannot be a name in the Python calls that this model writes; use tool_choice='auto'"
            raise ConfigError(text, param="tool", value=name)
    shared, schemas = definitions(tool), [tool.parameters["properties"][name] for name in names]
    rules = [
        f"{rule}_{i}: {json.dumps(name + '=')} {json_rule({**shared, **(one if isinstance(one, Mapping) else {})})}"
        for i, (name, one) in enumerate(zip(names, schemas, strict=True))
    ]
    return [*_given_once(rule, count, len(names), ", "), *rules]


def _members(
    rule: str, schema: Mapping[str, Any], shared: Mapping[str, Any], tool: str, quote: str, terminals: Terminals
) -> list[str]:
    """Return the rules of the members of an object whose names have no quotes and whose texts have marks around them."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    names = sorted(properties, key=lambda name: name not in required)
    rules = _given_once(rule, sum(one in required for one in names), len(names), ",")
    for i, name in enumerate(names):
        inside = f"{rule}_{i}"
        rules.append(f"{inside}: {json.dumps(name + ':')} {inside}_value")
        rules += _marked_value(f"{inside}_value", properties[name], shared, tool, quote, terminals)
    return rules


def _marked_value(
    rule: str, schema: Any, shared: Mapping[str, Any], tool: str, quote: str, terminals: Terminals
) -> list[str]:
    more = (shared, tool, quote, terminals)
    allowed = Allowed(schema, shared)
    if allowed.has_strings:
        first, *rest = value_rules(rule, quote, schema, shared, tool, terminals)
        return [first.replace(": ", f": {terminals(quote)} ", 1), *rest]
    if isinstance(schema, Mapping) and schema.get("type") == "object" and schema.get("properties"):
        return [f'{rule}: "{{" {rule}_in "}}"', *_members(f"{rule}_in", schema, *more)]
    if isinstance(schema, Mapping) and schema.get("type") == "array" and "items" in schema:
        item = f"{rule}_item"
        return [f'{rule}: "[" ({item} ("," {item})*)? "]"', *_marked_value(item, schema["items"], *more)]
    if allowed.is_scalar:
        return [f"{rule}: {json_rule({**shared, **schema})}"]
    text = "has a value of any type, or of several, which a required call of this model does not express; use tool_choice='auto'"
    raise ConfigError(text, param="tool", value=tool)
