"""The formats in which model families write tool calls: the texts around calls, and the parser that reads them.

Owns the table of formats. Does not know which one a chat template has (formats.py), and no grammar (call_grammars.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foresay.text.tool_calls.calls import CallParser, Parser
from foresay.text.tool_calls.harmony import CHANNEL, CONSTRAIN, MARKERS, MESSAGE, HarmonyParser
from foresay.text.tool_calls.objects import NamedReader, ObjectReader
from foresay.text.tool_calls.parsers import GroupReader, MarkedParser, Reader, Readers
from foresay.text.tool_calls.pythonic import PythonReader
from foresay.text.tool_calls.tagged import GLM, HUNYUAN, MINIMAX, QWEN, SEED, STEP, TaggedReader, Tags

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments by the names of tools."""
NUMBER = "{n}"
"""Stands for a number in a text of a call."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of one family's calls."""

    name: str
    signs: tuple[str, ...]
    """Texts of a chat template of this format, for one that describes calls and writes none."""
    parser: Callable[[Schemas, bool], CallParser] | None
    """Returns a parser of calls for the tools, by the schemas of their arguments; None for a format of whole messages.

    Its second argument is True if the output may be an answer in JSON, so that an object without a mark is no call."""
    around: tuple[str, str, str]
    """Texts before the first call, between calls and after the last."""
    call: tuple[str, str, str]
    """Texts before a call's name, between name and arguments, and after the arguments."""
    markers: tuple[str, ...] = ()
    """Texts of marks that only the parser reads."""
    is_python: bool = False
    """True if arguments are keyword arguments of Python."""
    tags: Tags | None = None
    """Tags around arguments that are texts."""
    quote: str = ""
    """Mark around texts in an object of arguments whose names have no quotes."""
    message: Callable[[], Parser] | None = None
    """Returns a parser of whole messages, for a format that marks more than calls and is read without tools, too."""
    answer: str = ""
    """Text before an answer without calls."""
    parallel: bool = True
    """True if an output may have several calls."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in which marks occur."""
        tags = () if self.tags is None else (self.tags.end_value, *self.tags.written)
        return (*self.markers, *self.around, *self.call, self.answer, self.quote, *tags)


def _json_call(arguments: str, before: str = "", after: str = "") -> tuple[str, str, str]:
    return f'{before}{{"name": "', f'", "{arguments}": ', f"}}{after}"


_AROUND = ("```json", "```", "}", "[", "]", ",")
"""Texts around the object of a call that models add: fences of code, a list, and brackets that are too many."""


def _in_code(schemas: Schemas) -> dict[str, Readers]:
    """Return the readers of calls in blocks of code: then the name is a tool's."""
    reader = partial(ObjectReader, separators=_AROUND[2:], end="```", names=schemas, stops=("```",))
    return {"```json\n": {"": reader}, "```\n": {"": reader}}


def _marked(schemas: Schemas, is_answer: bool, tags: Tags = QWEN) -> CallParser:
    """Return a parser of the calls of Hermes, Qwen3-Coder and other families with these marks, which models mix.

    They may leave out the first mark, or write an object alone or in a block of code: then the name is a tool's.
    """
    tagged = partial(TaggedReader, schemas=schemas, tags=tags)
    stops = (tags.end, tags.begin, "```")
    objects = partial(ObjectReader, separators=_AROUND, end=tags.end, stops=stops)
    marked: dict[str, Readers] = {
        tags.begin: {"<": tagged, "": objects},
        tags.name: {"": partial(tagged, begun=True, names=schemas)},
    }
    alone = partial(ObjectReader, separators=_AROUND, names=schemas, stops=stops)
    return MarkedParser(marked) if is_answer else MarkedParser(marked | _in_code(schemas), {"{": alone, "[": alone})


def _glm(schemas: Schemas, is_answer: bool) -> CallParser:
    objects = partial(ObjectReader, separators=_AROUND, end=GLM.end, stops=(GLM.end, GLM.begin))
    return MarkedParser({GLM.begin: {"{": objects, "": partial(TaggedReader, schemas=schemas, tags=GLM)}})


def _mistral(schemas: Schemas, is_answer: bool) -> CallParser:
    mark = "[TOOL_CALLS]"
    objects = partial(ObjectReader, separators=("[", ","), end="]", stops=(mark,))
    return MarkedParser({mark: {"[": objects, "{": objects, "": partial(NamedReader, stops=(mark,))}})


def _python(schemas: Schemas, is_answer: bool) -> CallParser:
    """Return a parser of Python calls; models also write objects."""
    marked: dict[str, Readers] = {_OLMO[0]: {"": partial(PythonReader, end=_OLMO[1], lines=True)}}
    for begin, end in (_LLAMA, _LFM):
        objects = partial(ObjectReader, separators=(";", *_AROUND[2:]), end=end, stops=(end,))
        marked[begin] = {"{": objects, "": partial(PythonReader, end=end)}
    first: dict[str, Callable[[int], Reader]] = {"[": partial(PythonReader, end=_LLAMA[1])}
    if not is_answer:
        first["{"] = partial(ObjectReader, separators=(";", *_AROUND[2:]), names=schemas)
    return MarkedParser(marked, first)


def _llama(schemas: Schemas, is_answer: bool) -> CallParser:
    ends = ("<|eom_id|>", "<|eot_id|>")
    reader = partial(ObjectReader, separators=(";", *_AROUND[2:], *ends), stops=(*ends, "<|python_tag|>"))
    alone = partial(reader, names=schemas)
    tagged = partial(TaggedReader, schemas=schemas, begun=True, names=schemas)
    marked: dict[str, Readers] = {"<|python_tag|>": {"": reader}, "<function=": {"": tagged}}
    return MarkedParser(marked | _in_code(schemas), {"{": alone, "[": alone})


def _listed(schemas: Schemas, is_answer: bool, begin: tuple[str, ...], end: str = "") -> CallParser:
    """Return a parser of objects after one of the marks, alone or in a list."""
    stops = (end, *begin) if end else begin
    reader = partial(ObjectReader, separators=(*_AROUND, *begin), end=end, stops=stops)
    return MarkedParser({one: {"": reader} for one in begin})


_NAME = r"(?P<name>[^\s<>{}\[\]\"]{1,256}?)"
_QUOTE = '<|"|>'
_ACTION, _END_ACTION = "<|START_ACTION|>", "<|END_ACTION|>"
_PHI, _NEMOTRON = ("<|tool_call|>", "<|/tool_call|>"), ("<TOOLCALL>", "</TOOLCALL>")
_OLMO, _LFM = ("<function_calls>", "</function_calls>"), ("<|tool_call_start|>", "<|tool_call_end|>")
_LLAMA = ("<|python_start|>", "<|python_end|>")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SEP = "<|tool_call_argument_begin|>"
_DEEPSEEK = (
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
)
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
_STEP = ("<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_calls_end\uff5c>")
_STEP_CALL = f"{STEP.begin}function<\uff5ctool_sep\uff5c>"


def _named(schemas: Schemas, is_answer: bool, group: tuple[str, str], call: tuple[str, str], head: str) -> CallParser:
    """Return a parser of names with objects.

    group, call: marks around all calls and around one. head: regular expression of a name and what is before its object.
    """
    reader = partial(NamedReader, head=re.compile(head), end=call[1], separators=("```",), stops=(call[0], group[1]))
    return MarkedParser({group[0]: {"": partial(GroupReader, readers={call[0]: {"": reader}}, end=group[1])}})


def _hunyuan(schemas: Schemas, is_answer: bool) -> CallParser:
    """Return a parser of names with an object or tagged arguments, or of a list of objects."""
    end = "</tool_calls>"
    tagged = partial(TaggedReader, schemas=schemas, tags=HUNYUAN)
    objects = partial(ObjectReader, separators=_AROUND, end=end, stops=(end,))
    group = partial(GroupReader, readers={GLM.begin: {"": tagged}}, end=end)
    return MarkedParser({"<tool_calls>": {"[": objects, "{": objects, "": group}})


def _invoked(schemas: Schemas, is_answer: bool, group: tuple[str, str], tags: Tags) -> CallParser:
    """Return a parser of tagged calls between two marks."""
    reader = partial(TaggedReader, schemas=schemas, tags=tags, begun=True)
    return MarkedParser({group[0]: {"": partial(GroupReader, readers={tags.name: {"": reader}}, end=group[1])}})


def _gemma(schemas: Schemas, is_answer: bool) -> CallParser:
    reader = partial(NamedReader, head=re.compile(rf"\s*call:{_NAME}\s*"), end="<tool_call|>", quote=_QUOTE)
    return MarkedParser({"<|tool_call>": {"": reader}})


_kimi = partial(
    _named, group=_KIMI[0], call=_KIMI[1],
    head=rf"\s*(?P<identity>(?:functions\.)?{_NAME}(?::\d+)?)\s*{re.escape(_KIMI_SEP)}\s*",
)  # fmt: skip
_deepseek = partial(
    _named, group=_DEEPSEEK[0], call=_DEEPSEEK[1],
    head=rf"\s*(?:function{_DEEPSEEK_SEP})?{_NAME}(?:{_DEEPSEEK_SEP}|\s*```json)\s*",
)  # fmt: skip
_GLM45 = ToolFormat(
    "glm45", ("<tool_call>", "<arg_key>"), _glm, ("", "\n", ""), ("<tool_call>", "\n", "</tool_call>"), tags=GLM
)
_V3 = ToolFormat(
    "deepseek_v3", (_DEEPSEEK[0][0], _DEEPSEEK_SEP, "```json"), _deepseek, (_DEEPSEEK[0][0], "\n", _DEEPSEEK[0][1]),
    (f"{_DEEPSEEK[1][0]}function{_DEEPSEEK_SEP}", "\n```json\n", f"\n```{_DEEPSEEK[1][1]}"),
)  # fmt: skip
_TABLE = (
    # name, signs, parser, around the calls, in a call
    ToolFormat("mistral_named", ("[TOOL_CALLS]", "[ARGS]"), _mistral, ("", "", ""), ("[TOOL_CALLS]", "[ARGS]", "")),
    ToolFormat("mistral", ("[TOOL_CALLS]",), _mistral, ("[TOOL_CALLS] [", ", ", "]"), _json_call("arguments")),
    ToolFormat("harmony", (CHANNEL,), None, ("", "", ""),
               (f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", ""), MARKERS, parallel=False,
               message=HarmonyParser, answer=f"{CHANNEL}final{MESSAGE}"),
    _GLM45,
    replace(_GLM45, name="glm47", call=("<tool_call>", "", "</tool_call>"),
            tags=replace(GLM, written=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"))),
    ToolFormat("hunyuan", ("<tool_calls>", "<tool_call>"), _hunyuan, ("<tool_calls>", "", "</tool_calls>"),
               ("<tool_call>", "<tool_sep>\n```json\n", "\n```</tool_call>")),
    ToolFormat("hunyuan3", ("<tool_calls>", "<tool_sep>", "<arg_key>"), _hunyuan, ("<tool_calls>\n", "", "</tool_calls>"),
               ("<tool_call>", "<tool_sep>\n", "</tool_call>\n"), tags=HUNYUAN),
    ToolFormat("jamba", ("<tool_calls>", '"arguments"'), _hunyuan, ("<tool_calls>[", ", ", "]</tool_calls>"),
               _json_call("arguments")),
    ToolFormat("seed_oss", ("<seed:tool_call>", "<function="), partial(_marked, tags=SEED), ("", "\n", ""),
               ("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"), tags=SEED),
    ToolFormat("minimax_m2", (_MINIMAX[0], MINIMAX.name), partial(_invoked, group=_MINIMAX, tags=MINIMAX),
               (f"{_MINIMAX[0]}\n", "", _MINIMAX[1]), ('<invoke name="', '">\n', "</invoke>\n"), tags=MINIMAX),
    ToolFormat("step3", (_STEP[0], STEP.name), partial(_invoked, group=_STEP, tags=STEP), (_STEP[0], "", _STEP[1]),
               (f'{_STEP_CALL}<steptml:invoke name="', '">\n', f"</steptml:invoke>{STEP.end}"), tags=STEP),
    ToolFormat("kimi_k2", (_KIMI[0][0], _KIMI_SEP), _kimi, (_KIMI[0][0], "", _KIMI[0][1]),
               (f"{_KIMI[1][0]}functions.", f":{NUMBER}{_KIMI_SEP}", _KIMI[1][1])),
    _V3,
    replace(_V3, name="deepseek_v31", signs=(_DEEPSEEK[0][0], _DEEPSEEK_SEP), around=(_DEEPSEEK[0][0], "", _DEEPSEEK[0][1]),
            call=(_DEEPSEEK[1][0], _DEEPSEEK_SEP, _DEEPSEEK[1][1])),
    ToolFormat("gemma4", ("<|tool_call>", "<tool_call|>"), _gemma, ("", "", ""), ("<|tool_call>call:", "{", "}<tool_call|>"),
               quote=_QUOTE),
    ToolFormat("command", (_ACTION, '"tool_name"'), partial(_listed, begin=(_ACTION,), end=_END_ACTION),
               (f"{_ACTION}[\n    ", ",\n    ", f"\n]{_END_ACTION}"),
               (f'{{"tool_call_id": "{NUMBER}", "tool_name": "', '", "parameters": ', "}"), answer="<|START_RESPONSE|>"),
    ToolFormat("phi4_mini", _PHI, partial(_listed, begin=(_PHI[0], "functools"), end=_PHI[1]), ("", "", ""),
               _json_call("arguments", *_PHI)),
    ToolFormat("granite", (_PHI[0],), partial(_listed, begin=(_PHI[0],)), (f"{_PHI[0]}[", ", ", "]"), _json_call("arguments")),
    ToolFormat("nemotron", _NEMOTRON, partial(_listed, begin=(_NEMOTRON[0],), end=_NEMOTRON[1]),
               (f"{_NEMOTRON[0]}[", ", ", f"]{_NEMOTRON[1]}"), _json_call("arguments")),
    ToolFormat("qwen3_coder", (QWEN.begin, QWEN.name), _marked, ("", "\n", ""),
               ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"), tags=QWEN),
    ToolFormat("hermes", (QWEN.begin,), _marked, ("", "\n", ""), _json_call("arguments", "<tool_call>\n", "\n</tool_call>")),
    ToolFormat("olmo3", _OLMO, _python, (_OLMO[0], "\n", _OLMO[1]), ("", "(", ")"), is_python=True),
    ToolFormat("lfm2", _LFM, _python, (f"{_LFM[0]}[", ", ", f"]{_LFM[1]}"), ("", "(", ")"), is_python=True),
    ToolFormat("pythonic", ("func_name1(params_name1",), _python, ("[", ", ", "]"), ("", "(", ")"), _LLAMA, is_python=True),
    ToolFormat("llama3_json", ("<|python_tag|>",), _llama, ("", "; ", ""), _json_call("parameters"), ("<|python_tag|>",),
               parallel=False),
)  # fmt: skip
FORMATS = {one.name: one for one in _TABLE}
"""The formats by name; of several that read what a template writes, the first with its very text is chosen."""
