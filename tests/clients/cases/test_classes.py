"""Classes of made-up replies: what counts as passed, as refused by name, and as different."""

from __future__ import annotations

from typing import Any

import pytest

from clients.cases.bodies import chat, post
from clients.cases.case import PASSED, Case, Outcome, refused
from clients.cases.expect import error, ok, text
from clients.cases.replies import Reply, values_at

WITH_FIELD = Case("a field", chat(grammar="x"), ok(text("choices.0.message.content")))
DIFFERENT = Outcome("different")


def reply(status: int, body: Any) -> Reply:
    return Reply(status, {}, "", body)


def named(param: str | None, message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "param": param}}


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (reply(200, {"choices": [{"message": {"content": "a"}}]}), PASSED),
        (reply(200, {"choices": [{"message": {"content": ""}}]}), DIFFERENT),
        (reply(200, "no JSON"), DIFFERENT),
        (reply(400, named("grammar")), refused("grammar")),
        (reply(404, named("grammar.0.text")), refused("grammar.text")),
        (reply(500, named("grammar")), DIFFERENT),
        (reply(400, named("regex")), DIFFERENT),
        (reply(400, named(None, "grammar is wrong")), DIFFERENT),
        (reply(400, {"error": {"message": "grammar.kind='x' is wrong"}}), refused("grammar.kind")),
        (reply(400, {"error": {"message": "something is wrong"}}), DIFFERENT),
        (reply(404, named(None, "POST /v1/chat/completions: Not Found")), refused("/v1/chat/completions")),
    ],
)
def test_classes_of_a_field(given: Reply, outcome: Outcome) -> None:
    assert WITH_FIELD.outcome([given]) == outcome


def test_a_refusal_that_is_expected_is_passed_or_different() -> None:
    case = Case("a wrong field", chat(grammar="x"), error(400, "grammar"))
    assert case.outcome([reply(400, named("grammar", "grammar is wrong"))]) == PASSED
    assert case.outcome([reply(400, named("messages"))]) == DIFFERENT
    unsupported = {"error": {"message": "grammar", "param": "grammar", "code": "unsupported_parameter"}}
    assert case.outcome([reply(400, unsupported)]) == refused("grammar"), "not for the value that the case is about"
    route = Case("a route", post("/infill", {}), error(400))
    assert route.outcome([reply(404, named(None, "POST /infill: Not Found"))]) == refused("/infill")


def test_expectations_that_lead_nowhere_fail() -> None:
    assert not text("a.b").test([reply(200, {})])
    assert values_at({"a": [{"b": 1}, {"b": 2}]}, "a.*.b") == [1, 2]
    assert values_at({"a": []}, "a.0") == values_at(None, "a") == values_at({"a": [1]}, "a.-2") == []
