"""`foresay.toml`: what to decode with, as `foresay tune` writes it and everything reads it.

Owns the file's keys and how they are checked. Loads nothing.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from foresay.checks import check_int
from foresay.errors import ConfigError, UnknownNameError
from foresay.files import atomic_write
from foresay.json_files import read_limited

FILE = "foresay.toml"
"""The name under which commands look for one in the folder they run in."""
MAX_BYTES = 1 << 20
"""The largest file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A target and how it is decoded; None leaves a choice to `foresay.load`."""

    target: str
    drafter: str | None = None
    """An expression (docs/drafters.md)."""
    length: str | int | None = None
    """Tokens guessed per pass, or a policy."""
    rule: str | None = None
    max_batch_size: int | None = None
    dtype: str | None = None
    weights: str | None = None
    """A weight format, where weights are rounded."""
    backend: str | None = None
    """Whose passes they are; None: transformers' and our own."""

    def __post_init__(self) -> None:
        for name in ("target", "drafter", "rule", "dtype", "weights", "backend"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r} must be a text")
        if isinstance(self.length, bool) or not isinstance(self.length, str | int | None):
            raise ConfigError(f"length={self.length!r} must be a number or the name of a policy")
        if self.max_batch_size is not None:
            check_int("max_batch_size", self.max_batch_size, 1)

    def given(self) -> dict[str, Any]:
        """The choices that are made, the target left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "target"}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        said = [self.drafter or "auto", *([str(self.length)] if self.length is not None else [])]
        return f"{self.target}, {', '.join(said)}"


def is_settings(source: object) -> bool:
    """Whether a target is named by a settings file."""
    return isinstance(source, str | os.PathLike) and os.fspath(source).endswith(".toml")


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a file. A table `measured` says what the choice gained, and is not looked at.

    Raises ConfigError naming the file for a key nobody knows, a value of the wrong kind, and what is no TOML.
    """
    name = os.fspath(path)
    try:
        values = tomllib.loads(read_limited(path, MAX_BYTES).decode("utf-8"))
        values.pop("measured", None)
        known = {f.name for f in fields(Settings)}
        for key in values:
            if key not in known:
                raise UnknownNameError("setting", key, known)
        if "target" not in values:
            raise ConfigError("no target: it must name a model")
        return Settings(**values)
    except OSError as error:
        raise ConfigError(f"cannot read {name!r}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None  # no unknown name of the caller's
    except (ValueError, RecursionError) as error:  # a number too long and a byte that is not UTF-8 are ValueErrors
        raise ConfigError(f"{name}: not TOML ({error})") from None


def write_settings(path: str | os.PathLike[str], settings: Settings, measured: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all. measured: texts and numbers for whoever reads it."""
    lines = [f"target = {_toml(settings.target)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.given().items()]
    lines += ["", "[measured]", *(f"{name} = {_toml(value)}" for name, value in measured.items() if value is not None)]
    with atomic_write(path) as whole:
        whole.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    """A text, number or truth value as TOML writes it; JSON's strings are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
