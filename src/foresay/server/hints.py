"""Hints: fields of a request that want more or less of something, and without which the answer is still an answer.

A hint that this model or server cannot follow is ignored and named, in a header of the response and once in the log. Knows no
field.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache

HEADER = b"x-foresay-ignored"
"""Header that names the ignored hints of a request."""
IGNORED: ContextVar[dict[str, None] | None] = ContextVar("ignored", default=None)
"""Ignored hints of the request that the current task handles, in order."""
NAMES: ContextVar[Mapping[str, str] | None] = ContextVar("names", default=None)
"""Names of a chat request's fields in the API of the request."""

logger = logging.getLogger("foresay.server")


def ignore(name: str) -> None:
    """Note that a hint is ignored. name: of the field in the API, or in a chat request."""
    name = (NAMES.get() or {}).get(name, name)
    _log(name)
    noted = IGNORED.get()
    if noted is not None:
        noted[name] = None


@cache
def _log(name: str) -> None:
    logger.warning("requests contain the hint %s, which is ignored here", name)
