"""Groups of options: a command takes a dataclass of options as one parameter, and `flatten_groups` spreads its fields.

def run(prompt: PromptArgument, models: ModelOptions, sampling: SamplingOptions) -> int: ...
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin


def flatten_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with each parameter that is a group replaced by the group's fields.

    A group's class attribute PANEL is the heading of its options in a help page.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        if not dataclasses.is_dataclass(kind):
            parameters.append(parameter)
            continue
        fields = list(inspect.signature(kind, eval_str=True).parameters.values())  # type: ignore[arg-type]
        groups[parameter.name] = (kind, [field.name for field in fields])  # type: ignore[assignment]
        parameters += [_in_panel(field, getattr(kind, "PANEL", None)) for field in fields]
    if not groups:
        return command

    @functools.wraps(command)
    def flat(**given: Any) -> Any:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields})
        return command(**given)

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    flat.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in keyword}
    del flat.__wrapped__
    return flat


def _in_panel(parameter: inspect.Parameter, panel: str | None) -> inspect.Parameter:
    """The parameter with its option under a heading, unless it has one. The option may be shared by commands: it is copied."""
    if panel is None or get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, *infos = get_args(parameter.annotation)
    infos = [copy.copy(info) for info in infos]
    for info in infos:
        if getattr(info, "rich_help_panel", panel) is None:
            info.rich_help_panel = panel
    return parameter.replace(annotation=Annotated[(kind, *infos)])
