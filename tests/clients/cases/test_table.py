"""The page of the documentation is that of the cases."""

from __future__ import annotations

from pathlib import Path

from clients.cases.suites import all_suites
from clients.cases.table import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(all_suites()), (
        "scripts/compatibility.py > docs/reference/compatibility.md"
    )


def test_the_page_counts_every_case() -> None:
    suites = all_suites()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page(suites).splitlines()]
    totals = [list(map(int, row[1:])) for row in rows if len(row) == 5 and row[1].isdigit()]
    files = [list(map(int, row[1:])) for row in rows if len(row) == 4 and row[1].isdigit()]
    assert len(totals) == 2 and len(files) == len(suites)
    assert [row[0] for row in totals] == [sum(row[1:]) for row in totals]
    counted = [sum(numbers) for numbers in zip(*files, strict=True)]
    assert counted == [sum(numbers) for numbers in zip(*(row[1:] for row in totals), strict=True)]
    assert sum(counted) == sum(len(suite.cases) for suite in suites)


def test_the_page_lists_every_difference_and_refusal() -> None:
    text = page(all_suites())
    for suite in all_suites():
        for case in suite.cases:
            if case.ours.kind == "different":
                assert f"| {case.name} | {case.ours.reason} | `{suite.file}` |" in text
    rows = {line.split("|")[2].strip(" `"): line for line in text.splitlines() if line.startswith("| ")}
    assert "seed" in rows["/v1/responses"] and "seed" not in rows, "a field of one route is no field of another"
    assert "any name of a model is accepted" in rows["model"], "a value of a field that foresay has"
