"""Each case is sent, and the class of its answer is the recorded one."""

from __future__ import annotations

import pytest

from clients.cases.case import Case, Suite
from clients.cases.servers import Servers
from clients.cases.suites import all_suites

PARAMETERS = [
    pytest.param(suite, case, id=f"{suite.project}/{suite.file}/{case.name}")
    for suite in all_suites()
    for case in suite.cases
]


@pytest.mark.parametrize(("suite", "case"), PARAMETERS)
def test_a_case_has_its_class(suite: Suite, case: Case, servers: Servers) -> None:
    replies = servers.replies(case)
    found = case.outcome(replies)
    shown = "\n".join(f"[{i}] {one.status} {one.text[:1500]}" for i, one in enumerate(replies))
    assert all(one.status < 500 for one in replies), f"an internal error\n{shown}"
    assert (found.kind, found.name) == (case.ours.kind, case.ours.name), (
        f"recorded {case.ours}, found {found}; expectations that do not apply: {case.failed(replies)}\n{shown}"
    )


def test_cases_have_different_names() -> None:
    ids = [one.id for one in PARAMETERS]
    assert len(set(ids)) == len(ids) >= 250
    files = [(one.project, one.file) for one in all_suites()]
    assert len(set(files)) == len(files)


def test_a_different_answer_has_a_reason() -> None:
    for suite in all_suites():
        for case in suite.cases:
            assert bool(case.ours.reason) == (case.ours.kind == "different"), case.name
            assert bool(case.ours.name) == (case.ours.kind == "refused"), case.name
            assert case.expected, case.name
