"""Each case is sent, and the class of its answer is the recorded one; the page of the documentation is that of the cases."""

from __future__ import annotations

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


def test_the_page_counts_every_case_and_lists_every_difference() -> None:
    text = page(SUITES)
    assert PAGE.read_text(encoding="utf-8") == text, "scripts/compatibility.py > docs/reference/compatibility.md"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    totals, files = ([list(map(int, row[1:])) for row in rows if len(row) == n and row[1].isdigit()] for n in (5, 4))
    assert len(totals) == 2 and len(files) == len(SUITES)
    assert [row[0] for row in totals] == [sum(row[1:]) for row in totals]
    counted = [sum(numbers) for numbers in zip(*files, strict=True)]
    assert counted == [sum(numbers) for numbers in zip(*(row[1:] for row in totals), strict=True)]
    assert sum(counted) == len(PARAMETERS)
    different = [(suite, case) for suite in SUITES for case in suite.cases if case.ours.kind == "different"]
    assert all(f"| {case.name} | {case.ours.reason} | `{suite.file}` |" in text for suite, case in different)
    named = {line.split("|")[2].strip(" `"): line for line in text.splitlines() if line.startswith("| ")}
    assert "seed" in named["/v1/responses"] and "seed" not in named, "a field of one route is no field of another"
    assert "any name of a model is accepted" in named["model"], "a value of a field that foresay has"
