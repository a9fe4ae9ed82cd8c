"""Drafter expressions with a memory: the same method, which also copies from the texts that a folder keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foresay.errors import ConfigError
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import named

_COPYING = ("suffix", "suffix_tree")
"""Drafters that read a memory."""


def remembering(drafter: str, folder: str, *, prompts: bool = True) -> str:
    """Return a drafter expression that copies from a memory where its match is longest, and drafts as before elsewhere.

    folder: where texts are kept. prompts: False to keep only outputs. Raises ConfigError for n-gram drafters other than suffix.
    """
    call = parse(drafter)
    settings = (("memory", folder), *(() if prompts else (("prompts", False),)))
    if call.name == "hybrid":
        if not call.values or call.values[0][0] is not None:
            text = "needs a hybrid that begins with its n-gram drafter: hybrid(suffix, head=PATH)"
            raise ConfigError(text, param="memory", value=folder)
        first, *rest = call.values
        return str(replace(call, values=((first[0], _with(_as_call(first[1]), settings)), *rest)))
    if call.name in _COPYING:
        return str(_with(call, settings))
    if call.name == "none" or call.name in named("lookup"):
        text = "is for drafter suffix, or a model or head, not {drafter}"
        raise ConfigError(text, param="memory", value=folder, drafter=call.name)
    return str(Call("hybrid", ((None, Call("suffix", settings)), (None, call))))


def _as_call(value: Any) -> Call:
    return value if isinstance(value, Call) else parse(str(value))


def _with(call: Call, settings: tuple[tuple[str | None, Any], ...]) -> Call:
    if call.name not in _COPYING:
        raise ConfigError("keeps no memory; use suffix", param="drafter", value=call.name)
    names = {name for name, _ in settings} | {"keep"}
    return replace(call, values=(*(one for one in call.values if one[0] not in names), *settings))
