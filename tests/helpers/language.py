"""Words that this project does not use, and where they stand: in docstrings, comments, messages, help pages and documentation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INSTEAD_OF = {
    r"laws?": "distribution",
    r"guess(?:es|ed|ing)?": "draft, draft token",
    r"look(?:ed)?[- ]ups?": "n-gram drafter, prompt lookup",
    r"judg(?:e|es|ed|ing)": "verify",
    r"verdicts?": "verification result",
    r"unless (?:it is |they are |one is )?told": "by default, unless set",
    r"tell|tells|told|telling": "report, return, set",
    r"say|says|said|saying": "report, return, contain",
    r"hear|hears|heard": "receive, observe",
    r"ask|asks|asked|asking": "request",
    r"foretell|foretells|foretold|foretelling|foresee|foresees|foreseen|foresaw": "predict, simulate",
    r"beside": "next to, with",
    r"behind": "after",
    r"dear|dearer|dearest": "expensive",
    r"prices?|priced": "cost",
    r"lean": "fused",
    r"promis(?:e|es|ed|ing)": "guarantee, latency target",
    r"in vain": "without effect",
    r"(?<!in )(?<!in-)(?<!take )(?<!takes )(?<!took )(?<!in the first )places?": "index, position, slot",
    r"lately": "recently",
    r"nobody|somebody|whoever": "no process, a caller",
    r"beforehand": "in advance",
    r"hitherto|thereof|whereof|therein": "plain words",
    r"holds? good|held good": "applies",
}
"""Pattern of a word -> what is written instead. People and sockets are the only ones that say, tell, hear and ask."""
OPENING = re.compile(r"(?:What|Whether what|Of|Those|Who|Whose|That which)\b")
"""Openings that no docstring has."""
_WORDS = "|".join(f"(?:{word})" for word in INSTEAD_OF)
_WORD = re.compile(rf"(?<![\w`/.-])(?:{_WORDS})(?![\w`/(=-])")
_MAYBE = re.compile(rf"(?<!\w)(?:{_WORDS})(?!\w)|[\"']\s*{OPENING.pattern.lower()}")
"""Found in every source with a finding, and quickly absent from most others. Both read lower-case texts, which is faster."""
_CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)


class Finding(NamedTuple):
    """A word or an opening that is not used."""

    line: int
    words: str
    text: str


def in_text(text: str, first_line: int = 1) -> Iterator[Finding]:
    """Words in prose, outside code spans and links."""
    bare = _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in _WORD.finditer(bare.lower()):
        line = bare.count("\n", 0, found.start())
        yield Finding(first_line + line, bare[slice(*found.span())], bare.splitlines()[line].strip())


def in_python(source: str) -> Iterator[Finding]:
    """Words in the docstrings, comments and sentences of a module, and openings of docstrings."""
    if not _MAYBE.search(source.lower()):
        return
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    docstrings.add(statement.lineno)
                    if found := OPENING.match(text.strip()):
                        yield Finding(statement.lineno, found[0], text.strip().splitlines()[0])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        sentence = token.type == tokenize.STRING and (token.start[0] in docstrings or token.string.count(" ") > 2)
        if token.type == tokenize.COMMENT or sentence:
            text = re.sub(r"\{[^{}]*\}", " ", token.string) if token.string[:1] in "fF" else token.string
            yield from in_text(text, token.start[0])


def in_cpp(source: str) -> Iterator[Finding]:
    """Words in the comments and messages of a C++ file."""
    for number, line in enumerate(source.splitlines(), 1):
        for part in re.findall(r"//.*|/\*.*?\*/|^\s*\*.*|\"[^\"]* [^\"]*\"", line):
            yield from in_text(part, number)


def in_file(path: Path) -> list[Finding]:
    """Everything that is found in one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(in_python(text))
    return list(in_cpp(text) if path.suffix in {".h", ".cpp"} else in_text(text))
