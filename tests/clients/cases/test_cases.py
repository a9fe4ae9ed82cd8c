"""Each case is sent, and the class of its answer is the recorded one; the page of the documentation is that of the cases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.cases.case import Case, Suite
from clients.cases.servers import Servers
from clients.cases.suites import all_suites
from clients.cases.table import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
SUITES = all_suites()
PARAMETERS = [
    pytest.param(suite, case, id=f"{suite.project}/{suite.file}/{case.name}")
    for suite in SUITES
    for case in suite.cases
]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp)
    yield running
    running.close()


@pytest.mark.parametrize(("suite", "case"), PARAMETERS)
def test_a_case_has_its_class(suite: Suite, case: Case, servers: Servers) -> None:
    replies = servers.replies(case)
    found = case.outcome(replies)
    shown = "\n".join(f"[{i}] {one.status} {one.text[:1500]}" for i, one in enumerate(replies))
    assert all(one.status < 500 for one in replies), f"an internal error\n{shown}"
    assert (found.kind, found.name) == (case.ours.kind, case.ours.name), (
        f"recorded {case.ours}, found {found}; expectations that do not apply: {case.failed(replies)}\n{shown}"
    )


def test_cases_are_complete_and_have_different_names() -> None:
    ids = [one.id for one in PARAMETERS]
    assert len(set(ids)) == len(ids) >= 250
    assert len({(one.project, one.file) for one in SUITES}) == len(SUITES)
    for suite in SUITES:
        for case in suite.cases:
            assert bool(case.ours.reason) == (case.ours.kind == "different"), case.name
            assert bool(case.ours.name) == (case.ours.kind == "refused"), case.name
            assert case.expected, case.name


def test_the_page_is_that_of_the_cases() -> None:
    text = page(SUITES)
    assert PAGE.read_text(encoding="utf-8") == text, "scripts/compatibility.py > docs/reference/compatibility.md"
    totals = re.findall(r"^\| .* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert sum(int(row[0]) for row in totals) == len(PARAMETERS) == sum(int(one) for row in totals for one in row[1:])
    named = {line.split("|")[2].strip(" `"): line for line in text.splitlines() if line.startswith("| ")}
    assert "seed" in named["/v1/responses"] and "seed" not in named, "a field of one route is no field of another"
    assert "any name of a model is accepted" in named["model"], "a value of a field that foresay has"
