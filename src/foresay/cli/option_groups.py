"""Options in groups: a command names a dataclass of options as one parameter, and `flatten_groups` lays it out.

def run(prompt: PromptArgument, models: ModelOptions, sampling: SamplingOptions) -> int: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any


def flatten_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with each parameter that is a group replaced by the group's fields, as the command line sees it."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if not dataclasses.is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        kind: Any = parameter.annotation
        fields = list(inspect.signature(kind, eval_str=True).parameters.values())
        groups[parameter.name] = (kind, [field.name for field in fields])
        parameters += fields
    if not groups:
        return command

    @functools.wraps(command)
    def laid_out(**given: Any) -> Any:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields})
        return command(**given)

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    laid_out.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    laid_out.__annotations__ = {p.name: p.annotation for p in keyword}
    del laid_out.__wrapped__
    return laid_out
