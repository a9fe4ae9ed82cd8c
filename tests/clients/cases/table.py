"""The page of the documentation that counts the cases. Owns its form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from clients.cases.case import Case, Kind, Suite
from clients.cases.suites import PROJECTS
from foresay.server.adapters.message_fields import CountRequest, MessagesRequest
from foresay.server.adapters.response_fields import ResponsesRequest
from foresay.server.embedding import EmbeddingRequest
from foresay.server.fields import Fields
from foresay.server.requests import ChatRequest, CompletionRequest, TokenizeRequest

_KINDS: tuple[Kind, ...] = ("passed", "refused", "different")
_FOLDERS = {"llama.cpp": "`tools/server/tests/unit`", "vLLM": "`tests/entrypoints`, `tests/tool_use`"}
"""Project -> the folders of its tests."""
_BODIES: dict[str, type[Fields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
}
"""Route -> the fields that foresay has."""
_ID = re.compile(r"(?<=/slots/)\w+|(?<=/responses/)resp_\w+")
_HEAD = """# Compatibility

<!-- written by scripts/compatibility.py; do not edit -->

This page compares foresay's server with llama.cpp's and vLLM's by the requests of their own tests.

| tests of | cases | passed | refused | different |
|---|---:|---:|---:|---:|
"""
_CLASSES = """
- *passed*: the response is as the test expects. This includes wrong values that both servers refuse.
- *refused*: foresay does not have the route, the field or its value. It answers 400 or 404, and the error names it.
- *different*: foresay answers otherwise. [Each of these](#different-answers) has its reason below.

A case is a test or one of its parameter sets: its request, and what it expects, such as a status, a field, or equal texts of
two responses. The cases run on tiny models, so names of models, numbers of tokens and texts are theirs. Metrics have the prefix
`foresay_`. Requests to llama.cpp's route `/completion` are sent as they are, and also to `/v1/completions` if they can be
expressed there. `make test-clients` runs all cases.
"""
_COLUMNS = "| file | passed | refused | different |\n|---|---:|---:|---:|\n"
_ROUTES = """
## Refused routes

| tests of | routes |
|---|---|
"""
_UNKNOWN = """
## Refused fields

Fields that foresay does not have in this route, or accepts only with a value that has no effect. The number of cases is in
parentheses.

| tests of | route | fields |
|---|---|---|
"""
_VALUES = """
## Refused values

Values of fields that foresay has, by the cases that send them.

| tests of | field | cases |
|---|---|---|
"""


def page(suites: Sequence[Suite]) -> str:
    """Return the page in Markdown."""
    parts = (_HEAD, _totals(suites), _CLASSES, *(_files(one, suites) for one in PROJECTS.values()))
    return "".join((*parts, _different(suites), _UNKNOWN, _unknown(suites), _VALUES, _values(suites), _routes(suites)))


def _row(*cells: object) -> str:
    plain = [str(one).replace("|", r"\|") for one in cells]
    return f"| {' | '.join(plain)} |\n"


def _of(project: str, suites: Iterable[Suite]) -> list[Suite]:
    return [one for one in suites if one.project == project]


def _cases(suites: Iterable[Suite]) -> list[Case]:
    return [case for suite in suites for case in suite.cases]


def _counts(suites: Iterable[Suite]) -> list[int]:
    counts = Counter(case.ours.kind for case in _cases(suites))
    return [counts[kind] for kind in _KINDS]


def _totals(suites: Sequence[Suite]) -> str:
    rows = [(f"{project} ({_FOLDERS[project]})", _counts(_of(project, suites))) for project in PROJECTS.values()]
    return "".join(_row(name, sum(counts), *counts) for name, counts in rows)


def _files(project: str, suites: Sequence[Suite]) -> str:
    rows = [_row(f"`{one.file}`", *_counts([one])) for one in _of(project, suites)]
    return f"\n## Cases of {project}\n\n{_COLUMNS}{''.join(rows)}"


def _different(suites: Sequence[Suite]) -> str:
    out = "\n## Different answers\n"
    for project in PROJECTS.values():
        out += f"\n### Of {project}'s cases\n\n| case | foresay | file |\n|---|---|---|\n"
        out += "".join(
            _row(case.name, case.ours.reason, f"`{suite.file}`")
            for suite in _of(project, suites)
            for case in suite.cases
            if case.ours.kind == "different"
        )
    return out


def _has(case: Case) -> bool:
    """Return True if foresay has the field that it refuses, with another value."""
    kind = _BODIES.get(case.sent[-1].path)
    return kind is not None and case.ours.name.split(".")[0] in kind.model_fields


def _refused(suites: Sequence[Suite], project: str) -> list[Case]:
    return [case for case in _cases(_of(project, suites)) if case.ours.kind == "refused"]


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}` ({count})" for name, count in sorted(Counter(names).items()))


def _is_route(case: Case) -> bool:
    return case.ours.name.startswith("/")


def _grouped(project: str, suites: Sequence[Suite], key: Callable[[Case], str], *, has: bool) -> dict[str, list[Case]]:
    """Refused cases by a key, in its order. has: of values of fields that foresay has, else of other fields."""
    found: dict[str, list[Case]] = {}
    for case in sorted(_refused(suites, project), key=key):
        if not _is_route(case) and _has(case) == has:
            found.setdefault(key(case), []).append(case)
    return found


def _unknown(suites: Sequence[Suite]) -> str:
    return "".join(
        _row(project, f"`{route}`", _counted(one.ours.name for one in cases))
        for project in PROJECTS.values()
        for route, cases in _grouped(project, suites, lambda case: case.sent[-1].path, has=False).items()
    )


def _values(suites: Sequence[Suite]) -> str:
    return "".join(
        _row(project, f"`{name}`", "; ".join(dict.fromkeys(one.name for one in cases)))
        for project in PROJECTS.values()
        for name, cases in _grouped(project, suites, lambda case: case.ours.name, has=True).items()
    )


def _routes(suites: Sequence[Suite]) -> str:
    out = _ROUTES
    for project in PROJECTS.values():
        cases = [one for one in _refused(suites, project) if _is_route(one)]
        out += _row(project, _counted(_ID.sub("{id}", one.ours.name) for one in cases))
    return out
