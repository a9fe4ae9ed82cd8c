"""A case of another server's tests: requests, the observation that its test makes, and the class of foresay's answer.

Owns the form of a case and how a class is computed from replies. Knows no server and no expectation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from clients.cases.replies import Reply, value_at

Kind = Literal["passed", "refused", "different"]


@dataclass(frozen=True, slots=True)
class Check:
    """One observation. test: True if the replies show it."""

    text: str
    test: Callable[[Sequence[Reply]], bool]
    code: int = 0
    """The expected status, if it is one."""


def status(code: int, reply: int = -1) -> Check:
    return Check(f"[{reply}] status {code}", lambda replies: replies[reply].status == code, code)


@dataclass(frozen=True, slots=True)
class From:
    """A value of an earlier reply, as part of a body."""

    reply: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. give_up_s: the time after which the client disconnects."""

    method: str = "POST"
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    server: str | None = None
    give_up_s: float | None = None

    def body_after(self, replies: Sequence[Reply]) -> Any:
        """Return the body with values of earlier replies."""
        return _filled(self.body, replies)


def _filled(value: Any, replies: Sequence[Reply]) -> Any:
    if isinstance(value, From):
        return value_at(replies[value.reply].body, value.path)
    if isinstance(value, dict):
        return {name: _filled(one, replies) for name, one in value.items()}
    return [_filled(one, replies) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Outcome:
    """The class of foresay's answer. name: the refused field or route. reason: why the answer is different."""

    kind: Kind
    name: str = ""
    reason: str = ""


PASSED = Outcome("passed")


def refused(name: str) -> Outcome:
    """Return the class of a request that is answered with 400 or 404 and this field or route."""
    return Outcome("refused", name=name)


NO_ROUTE = Outcome("refused")
"""The class of requests whose last one has a route that does not exist."""


def different(reason: str) -> Outcome:
    """Return the class of an answer that differs for this reason."""
    return Outcome("different", reason=reason)


@dataclass(frozen=True, slots=True)
class Case:
    """A test, or one parameter set of it. together: send the requests at the same time."""

    name: str
    requests: Request | Sequence[Request]
    expected: Sequence[Check]
    ours: Outcome = PASSED
    server: str = "tiny"
    together: bool = False

    @property
    def sent(self) -> Sequence[Request]:
        """The requests in their order."""
        return (self.requests,) if isinstance(self.requests, Request) else self.requests

    def failed(self, replies: Sequence[Reply]) -> list[str]:
        """Return the expectations that do not apply to the replies."""
        return [one.text for one in self.expected if not one.test(replies)]

    def outcome(self, replies: Sequence[Reply]) -> Outcome:
        """Return the class that the replies show, without a reason.

        A field is refused only where the other server takes it: an expected error that has other words is different.
        """
        if not self.failed(replies):
            name = _refused_field(self.sent[-1], replies[-1])
            name = name if _is_unsupported(name, replies[-1]) else _refused_route(self.sent[-1], replies[-1])
            return refused(name) if name else PASSED
        fails = any(one.code >= 400 for one in self.expected)
        for request, reply in zip(self.sent, replies, strict=True):
            if name := _refused_route(request, reply) or ("" if fails else _refused_field(request, reply)):
                return refused(name)
        return Outcome("different")


def _refused_field(request: Request, reply: Reply) -> str:
    """Return the field of the request that an error names in `param`, or in its message if it has no `param`."""
    error = value_at(reply.body, "error")
    if reply.status not in (400, 404) or not isinstance(error, dict) or not isinstance(request.body, dict):
        return ""
    param = error.get("param")
    if "param" not in error:  # Anthropic's errors
        names = (re.search(rf"\b{re.escape(name)}\b[\w.]*", str(error.get("message"))) for name in request.body)
        param = next((found[0] for found in names if found), "")
    if not isinstance(param, str) or not {param, param.split(".")[0]} & set(request.body):
        return ""
    return ".".join(part for part in param.split(".") if not part.isdigit())


def _is_unsupported(name: str, reply: Reply) -> bool:
    """Return True if a field is refused whatever its value: both servers refuse, but for different reasons."""
    return value_at(reply.body, "error.code") == "unsupported_parameter" or name.endswith("content.type")


def _refused_route(request: Request, reply: Reply) -> str:
    """Return the route of the request, if an error names it as one that does not exist."""
    route = request.path.partition("?")[0]
    message = value_at(reply.body, "error.message")
    return route if reply.status == 404 and f"{request.method} {route}: " in str(message) else ""


class together(tuple[Request, ...]):  # noqa: N801 - read as a verb
    """Requests that are sent at the same time."""


def cases(rows: Mapping[str, Any]) -> list[Case]:
    """Return the cases of rows: name -> request, or (requests, *rest).

    rest: checks and lists of them, of which status 200 is one unless another status of the last reply is; at most one
    outcome, if the case does not pass; the name of a server as text. Checks of a refused case could not change its class.
    """
    return [_case(name, row) for name, row in rows.items()]


def _case(name: str, row: Any) -> Case:
    requests, *rest = row if type(row) is tuple else (row,)
    checks, ours, server = list[Check](), PASSED, "tiny"
    for one in rest:
        if isinstance(one, Outcome):
            ours = one
        elif isinstance(one, str):
            server = one
        else:
            checks += [one] if isinstance(one, Check) else one
    if not any(re.match(r"(\[-1\] )?status (\d|is not)", one.text) for one in checks):
        checks.insert(0, status(200))
    if ours == NO_ROUTE:
        last = requests if isinstance(requests, Request) else requests[-1]
        ours = refused(last.path.partition("?")[0])
    return Case(name, requests, checks, ours, server, isinstance(requests, together))


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases of one file of a project's tests."""

    project: str
    file: str
    cases: Sequence[Case]
