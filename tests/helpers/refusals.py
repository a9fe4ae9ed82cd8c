"""Refusals: the parameter and the value that an error has, in place of its sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY

import pytest

from foresay.errors import ConfigError, ForesayError, PromptError


@contextmanager
def refused(
    param: str | None, value: Any = ANY, kind: type[ForesayError] = ConfigError, *, at: str = ""
) -> Iterator[pytest.ExceptionInfo[ForesayError]]:
    """Expect an error of this parameter and value, whose message is one line that names the parameter.

    at: the beginning of the message, the position in a file; its parameter is the position, or a field there.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error, message = raised.value, str(raised.value)
    found = (error.param or "").removeprefix(at).removeprefix(": ") if at else error.param
    assert (found, error.value) == (param, value), error
    assert message.startswith(at) and "\n" not in message
    assert isinstance(error, PromptError) or (param or "") in message


def refuses(
    call: Callable[[], object], param: str | None, value: Any = ANY, kind: type[ForesayError] = ConfigError, **more: Any
) -> None:
    """Expect that a call is refused; see `refused`."""
    with refused(param, value, kind, **more):
        call()
