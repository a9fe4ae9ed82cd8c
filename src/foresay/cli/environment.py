"""Environment variables of foresay: the one table of their names, and a line about each set one that has no effect.

Owns no value: the modules that read a variable check it. A test compares the sources with the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches

import click

PREFIX = "FORESAY_"
SWITCHES = ("FORESAY_GRAPHS", "FORESAY_NATIVE", "FORESAY_OVERLAP", "FORESAY_PAGES")
"""Variables that are 0 or 1; any other value is that of an unset one."""
READ = (
    *SWITCHES,
    "FORESAY_API_KEYS",
    "FORESAY_CACHE",
    "FORESAY_ISA",
    "FORESAY_KERNELS",
    "FORESAY_PACKED_GB",
    "FORESAY_PAGES_GB",
)
OTHERS = (
    "FORESAY_CHROMIUM",
    "FORESAY_EMULATED",
    "FORESAY_PREBUILD",
    "FORESAY_PYTHON",
    "FORESAY_TEST_DEVICE",
    "FORESAY_VLLM",
)
"""Variables that builds and tests read."""


def of_options(commands: Iterable[click.Command]) -> set[str]:
    """Return the variables from which options of these commands are read."""
    prefixed = [(one.context_settings.get("auto_envvar_prefix"), one.params) for one in commands]
    return {name for prefix, params in prefixed for param in params if (name := of_option(param, prefix))}


def of_option(param: click.Parameter, prefix: str | None) -> str:
    """Return the variable from which an option of a command with this prefix is read; "" if there is none."""
    return f"{prefix}_{(param.name or '').upper()}" if prefix and isinstance(param, click.Option) else ""


def idle(environment: Mapping[str, str], commands: Callable[[], Iterable[click.Command]]) -> Iterator[str]:
    """Yield a line for each unknown variable with our prefix, with the nearest name, and for each switch with another value.

    commands: called only if there is a variable that may be one of their options.
    """
    others = {one for one in environment if one.startswith(PREFIX)} - {*READ, *OTHERS}
    known = {*READ, *OTHERS, *of_options(commands() if others else ())}
    for name in sorted(others - known):
        near = get_close_matches(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in sorted(known)], n=1)
        hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
        yield f"unknown environment variable {name!r} is ignored.{hint}"
    for name in SWITCHES:
        if (value := environment.get(name, "")) not in ("", "0", "1"):
            yield f"{name}={value!r} is ignored; it must be 0 or 1"
