"""The formats in which model families write tool calls: which one a chat template has, its parser, and its grammar.

Owns the texts around calls, as the families' templates show them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import json_rule, rule_of
from foresay.text.tool_calls import message
from foresay.text.tool_calls.calls import CallParser, Parser, Tool
from foresay.text.tool_calls.harmony import CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, START, HarmonyParser
from foresay.text.tool_calls.objects import NamedReader, ObjectReader
from foresay.text.tool_calls.parsers import MarkedParser, Readers
from foresay.text.tool_calls.pythonic import PythonReader
from foresay.text.tool_calls.tagged import TaggedReader, definitions, ordered, rules_of

Terminal = Callable[[str], str]
"""Returns the grammar's terminals for a text."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments by the names of tools."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of one family's calls."""

    name: str
    signs: tuple[str, ...]
    """Texts of which a chat template of this format has one."""
    parser: Callable[[Schemas, bool], CallParser] | None
    """Returns a parser of calls for the tools, by the schemas of their arguments; None for a format of whole messages.

    Its second argument is True if the output may be an answer in JSON, so that an object without a mark is no call."""
    around: tuple[str, str, str]
    """Texts before the first call, between calls and after the last."""
    call: tuple[str, str, str]
    """Texts before a call's name, between name and arguments, and after the arguments."""
    markers: tuple[str, ...] = ()
    """Texts that may be special tokens."""
    is_python: bool = False
    """True if arguments are keyword arguments of Python."""
    is_tagged: bool = False
    """True if arguments are texts between tags."""
    message: Callable[[], Parser] | None = None
    """Returns a parser of whole messages, for a format that marks more than calls and is read without tools, too."""
    answer: str = ""
    """Text before an answer without calls."""
    thought: tuple[str, str] | None = None
    """Texts around reasoning that may precede calls, where it is not a matter of the chat template's own marks."""
    parallel: bool = True
    """True if an output may have several calls."""


def _json_call(arguments: str, before: str = "", after: str = "") -> tuple[str, str, str]:
    return f'{before}{{"name": "', f'", "{arguments}": ', f"}}{after}"


_AROUND = ("```json", "```", "}", "[", "]", ",")
"""Texts around the object of a call that models add: fences of code, a list, and brackets that are too many."""


def _in_code(schemas: Schemas) -> dict[str, Readers]:
    """Return the readers of calls in blocks of code: then the name is a tool's."""
    reader = partial(ObjectReader, separators=_AROUND[2:], end="```", names=schemas, stops=("```",))
    return {"```json\n": {"": reader}, "```\n": {"": reader}}


def _marked(schemas: Schemas, is_answer: bool) -> CallParser:
    """Return a parser of the calls of Hermes and Qwen3-Coder, which models of both mix.

    They may leave out the first mark, or write an object alone or in a block of code: then the name is a tool's.
    """
    tagged = partial(TaggedReader, schemas=schemas)
    stops = ("</tool_call>", "<tool_call>", "```")
    objects = partial(ObjectReader, separators=_AROUND, end="</tool_call>", stops=stops)
    marked: dict[str, Readers] = {
        "<tool_call>": {"<": tagged, "": objects},
        "<function=": {"": partial(tagged, begun=True)},
    }
    alone = partial(ObjectReader, separators=_AROUND, names=schemas, stops=stops)
    return MarkedParser(marked) if is_answer else MarkedParser(marked | _in_code(schemas), {"{": alone, "[": alone})


def _mistral(schemas: Schemas, is_answer: bool) -> CallParser:
    mark = "[TOOL_CALLS]"
    objects = partial(ObjectReader, separators=("[", ","), end="]", stops=(mark,))
    return MarkedParser({mark: {"[": objects, "{": objects, "": partial(NamedReader, stop=mark)}})


def _python(schemas: Schemas, is_answer: bool) -> CallParser:
    reader = partial(PythonReader, end="<|python_end|>")
    return MarkedParser({"<|python_start|>": {"": reader}}, {"[": reader})


def _llama(schemas: Schemas, is_answer: bool) -> CallParser:
    ends = ("<|eom_id|>", "<|eot_id|>")
    reader = partial(ObjectReader, separators=(";", *_AROUND[2:], *ends), stops=(*ends, "<|python_tag|>"))
    alone = partial(reader, names=schemas)
    tagged = partial(TaggedReader, schemas=schemas, begun=True)
    marked: dict[str, Readers] = {"<|python_tag|>": {"": reader}, "<function=": {"": tagged}}
    return MarkedParser(marked | _in_code(schemas), {"{": alone, "[": alone})


_TABLE = (
    # name, signs, parser, around the calls, in a call, markers
    ToolFormat("mistral_named", ("[ARGS]", "[CALL_ID]"), _mistral, ("", "", ""), ("[TOOL_CALLS]", "[ARGS]", ""),
               ("[TOOL_CALLS]", "[ARGS]")),
    ToolFormat("mistral", ("[TOOL_CALLS]",), _mistral, ("[TOOL_CALLS] [", ", ", "]"), _json_call("arguments"), ("[TOOL_CALLS]",)),
    ToolFormat("harmony", (CHANNEL,), None, ("", "", ""),
               (f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", ""), MARKERS, parallel=False,
               message=HarmonyParser, answer=f"{CHANNEL}final{MESSAGE}",
               thought=(f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant")),
    ToolFormat("qwen3_coder", ("<function=",), _marked, ("", "\n", ""),
               ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"), ("<tool_call>", "</tool_call>"), is_tagged=True),
    ToolFormat("hermes", ("<tool_call>",), _marked, ("", "\n", ""),
               _json_call("arguments", "<tool_call>\n", "\n</tool_call>"), ("<tool_call>", "</tool_call>")),
    ToolFormat("pythonic", ("<|python_start|>", "func_name1(params_name1"), _python, ("[", ", ", "]"), ("", "(", ")"),
               ("<|python_start|>", "<|python_end|>"), is_python=True),
    ToolFormat("llama3_json", ("<|python_tag|>", '"parameters": dictionary of argument'), _llama, ("", "; ", ""),
               _json_call("parameters"), ("<|python_tag|>",), parallel=False),
)  # fmt: skip
FORMATS = {one.name: one for one in _TABLE}
"""The formats by name; of several that a template has, the first is chosen."""


def _found(tokenizer: Any, *, of_messages: bool = False) -> ToolFormat | None:
    """Return the first format whose sign is in a chat template. of_messages: look only at formats of whole messages."""
    template = _template(tokenizer)
    formats = [one for one in FORMATS.values() if one.message is not None or not of_messages]
    return next((one for one in formats if any(sign in template for sign in one.signs)), None)


def has_format(tokenizer: Any) -> bool:
    """True if a chat template's format of calls is known."""
    return _found(tokenizer) is not None


def format_of(tokenizer: Any, name: str = "auto") -> ToolFormat:
    """Return the format of a tokenizer's tool calls. name: one of FORMATS, or "auto".

    Raises ConfigError for a model without a chat template for tools, or with an unknown format.
    """
    if not describes_tools(tokenizer):
        raise ConfigError("the chat template of this model does not describe tools")
    found = _found(tokenizer) if name == "auto" else FORMATS[name]
    if found is None:
        names = ", ".join(FORMATS)
        raise ConfigError(f"the format of this model's tool calls is not known; choose it by --tool-format: {names}")
    return found


def message_format(tokenizer: Any) -> ToolFormat | None:
    """Return the format of whole messages that a chat template has, None if it has none."""
    return _found(tokenizer, of_messages=True)


def describes_tools(tokenizer: Any) -> bool:
    """True if the chat template describes tools to the model."""
    return "tools" in _template(tokenizer)


def _template(tokenizer: Any) -> str:
    """Return the chat template that is used with tools."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        return str(tokenizer.get_chat_template(tools=[{}]))
    except (ValueError, AttributeError):  # several templates, none of them the default; not a transformers tokenizer
        return ""


def visible_ids(chosen: ToolFormat | None, tokenizer: Any, *, reasons: bool = False) -> tuple[int, ...]:
    """Return the special tokens that must stay in the text of an output: those of a format, and the marks of reasoning."""
    markers = {*(chosen.markers if chosen is not None else ()), *((message.BEGIN, message.END) if reasons else ())}
    return tuple(sorted(index for index, one in _added(tokenizer).items() if one.special and one.content in markers))


def _added(tokenizer: Any) -> Mapping[int, Any]:
    """Return the added tokens by id; none for a tokenizer of another library."""
    return getattr(tokenizer, "added_tokens_decoder", None) or {}


def grammar_of(
    chosen: ToolFormat | None,
    tools: Sequence[Tool],
    tokenizer: Any,
    *,
    parallel: bool = False,
    after_reasoning: bool = False,
    may_reason: bool = False,
    answer: Mapping[str, Any] | str | None = None,
) -> str:
    """Return the grammar, in Lark's syntax, of an output that calls one of the tools, or several if `parallel`.

    chosen: None without tools. after_reasoning: True if the output begins inside reasoning. may_reason: True if it may begin with
    reasoning. answer: schema or grammar of an output without calls. Raises ConfigError for tools that the format cannot express.
    """
    added = {one.content: index for index, one in _added(tokenizer).items()}
    terminal = _terminal(added, () if chosen is None else chosen.markers)
    outputs, before, rules = list[str](), "", list[str]()
    if chosen is not None and tools:
        begin, between, end = map(terminal, chosen.around)
        more = f"({between} call)*" if parallel and chosen.parallel else ""
        outputs.append(f"{begin} call {more} {end}")
        rules += _calls(chosen, tools, terminal)
    if answer is not None:
        outputs.append(f"{'' if chosen is None else terminal(chosen.answer)} answer")
        rules.append(f"answer: {rule_of(answer)}")
    if chosen is not None and chosen.thought is not None:
        before = f"({terminal(chosen.thought[0])} thought)?"
        rules.append(_up_to("thought", chosen.thought[1], terminal))
    if after_reasoning or may_reason:
        marks = _terminal(added, (message.BEGIN, message.END))
        before += " reasoning /\\n*/" if after_reasoning else f" ({marks(message.BEGIN)} reasoning /\\n*/)?"
        rules.append(_up_to("reasoning", message.END, marks))
    return "\n".join([f"start: {before} output", f"output: {' | '.join(outputs)}", *rules]) + "\n"


def _calls(chosen: ToolFormat, tools: Sequence[Tool], terminal: Terminal) -> list[str]:
    """Return the rules of a call of one of the tools."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        before, middle, after = chosen.call
        rules.append(f"call_{i}: {terminal(before + tool.name + middle)} args_{i} {terminal(after)}")
        if chosen.is_tagged:
            rules += rules_of(f"args_{i}", tool)
        elif chosen.is_python:
            rules += _keywords(f"args_{i}", tool)
        else:
            rules.append(f"args_{i}: {json_rule({'type': 'object', **tool.parameters})}")
    return rules


def _up_to(rule: str, ending: str, terminal: Terminal) -> str:
    """Return the rule of any text up to an ending: a token, with what follows it, or a text."""
    last = terminal(ending)
    if last.lstrip().startswith("<["):
        return f"{rule}: /(.|\\n)*/ {last}"
    return f"{rule}[suffix={json.dumps(ending)}]: /(.|\\n)*/"


def _terminal(added: Mapping[str, int], markers: Sequence[str]) -> Terminal:
    """Return a function from a text to its terminals: markers that are tokens as such, the rest as strings."""
    pattern = re.compile("(" + "|".join(re.escape(one) for one in markers if one in added) + ")")

    def terminals(text: str) -> str:
        parts = pattern.split(text) if pattern.pattern != "()" else [text]
        return " ".join(f"<[{added[one]}]>" if i % 2 else json.dumps(one) for i, one in enumerate(parts) if one)

    return terminals


def _keywords(rule: str, tool: Tool) -> list[str]:
    """Return the rules of keyword arguments: the required ones, then others, in the order of the schema.

    Raises ConfigError for tools that cannot be written as Python calls with keyword arguments.
    """
    names, count = ordered(tool)
    for name in (*tool.name.split("."), *names):
        if not name.isidentifier() or iskeyword(name):
            raise ConfigError(
                f"this model writes Python calls, in which {name!r} cannot be a name; use tool_choice='auto'"
            )
    shared, schemas = definitions(tool), [tool.parameters["properties"][name] for name in names]
    rules = [
        f"{rule}_{i}: {json.dumps(name + '=')} {json_rule({**shared, **(one if isinstance(one, Mapping) else {})})}"
        for i, (name, one) in enumerate(zip(names, schemas, strict=True))
    ]
    tails = [f'{rule}_tail_{i}: (", " {rule}_{i})? {rule}_tail_{i + 1}' for i in range(count, len(names))]
    if count:
        whole = ' ", " '.join(f"{rule}_{i}" for i in range(count)) + f" {rule}_tail_{count}"
    else:
        whole = " | ".join(['""', *(f"{rule}_{i} {rule}_tail_{i + 1}" for i in range(len(names)))])
    return [f"{rule}: {whole}", *rules, *tails, f'{rule}_tail_{len(names)}: ""']
