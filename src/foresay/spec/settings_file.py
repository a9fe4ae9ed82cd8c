"""The settings file `foresay.toml`: a target and how to decode it, written by `foresay tune`; or several, each with a name.

Owns the file's keys and their checks. Loads no model.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foresay.checks import check_int
from foresay.errors import ConfigError, UnknownNameError
from foresay.files import atomic_write, unreadable
from foresay.json_files import read_limited

FILE = "foresay.toml"
"""Name of the file that commands read from the current folder."""
_LOADED = ("dtype", "weights", "activations", "kv_cache_dtype", "backend")
"""Settings that are options of loading a model, where "auto" means not given."""
MAX_BYTES = 1 << 20
"""Size of the largest file that is read."""
MAX_MODELS = 64
"""Limit on the models of a file."""
_NAME = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,99}", re.ASCII)
"""Names of models in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A target and how to decode it; None leaves a choice to `foresay.load`."""

    target: str
    drafter: str | None = None
    """An expression (docs/reference/expressions.md)."""
    length: str | int | None = None
    """Draft tokens per step, or a length policy."""
    rule: str | None = None
    max_batch_size: int | None = None
    dtype: str | None = None
    weights: str | None = None
    """A quantized weight format."""
    activations: str | None = None
    """Rounding of the inputs of linear layers in the CPU kernels."""
    kv_cache_dtype: str | None = None
    """Format of keys and values in the CPU kernels."""
    backend: str | None = None
    """Backend of the forward passes; None uses transformers and foresay's own kernels."""

    def __post_init__(self) -> None:
        for name in ("target", "drafter", "rule", *_LOADED):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError("must be a non-empty string", param=name, value=value)
        if isinstance(self.length, bool) or not isinstance(self.length, str | int | None):
            text = "must be an integer or an expression of a length policy"
            raise ConfigError(text, param="length", value=self.length)
        if self.max_batch_size is not None:
            check_int("max_batch_size", self.max_batch_size, 1)

    def given(self) -> dict[str, Any]:
        """Return the settings that are not None, except for the target."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "target"}
        return {name: value for name, value in values.items() if value is not None}

    def filled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return load options with those of the settings where none, or "auto", is given."""
        found = {name: getattr(self, name) for name in _LOADED}
        missing = {
            name: value
            for name, value in found.items()
            if value is not None and options.get(name, "auto") in (None, "auto")
        }
        return {**options, **missing}

    def target_from(self, file: str | os.PathLike[str]) -> str:
        """Return the target; a relative path is resolved from the file's folder if it exists there."""
        near = Path(file).parent / self.target
        return str(near) if near.exists() else self.target

    def __str__(self) -> str:
        length = [] if self.length is None else [f"length {self.length}"]
        return ", ".join([f"target {self.target}", f"drafter {self.drafter or 'auto'}", *length])


@dataclass(frozen=True, slots=True)
class Models:
    """Several models of a server."""

    models: Mapping[str, Settings]
    """Settings by the names in the API."""
    max_loaded: int = 1
    """Models that are loaded at a time."""

    def __post_init__(self) -> None:
        check_int("max_loaded", self.max_loaded, 1)


def is_settings(source: object) -> bool:
    """Return True if a target is given by a settings file (a path that ends in .toml)."""
    return isinstance(source, str | os.PathLike) and os.fspath(source).endswith(".toml")


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a settings file of one model; the table `measured`, which reports what the choice gained, is ignored.

    Raises ConfigError naming the file for an unknown key, a wrong value, several models or a file that is not TOML.
    """
    with _naming(path):
        values = _values(path)
        if "models" in values:
            raise ConfigError("are several, which only `foresay serve` loads; give a target by name", param="models")
        return _settings(values)


def read_models(path: str | os.PathLike[str]) -> Models | None:
    """Read a settings file with a table `models`; return None for other files.

    A relative path of a target is resolved from the file's folder if it exists there. Raises ConfigError as `read_settings`.
    """
    with _naming(path):
        values = _values(path)
        if "models" not in values:
            return None
        models, most = values.pop("models"), values.pop("max_loaded", 1)
        for key in values:
            raise ConfigError("belongs into the table of a model, such as [models.NAME]", param=key, value=values[key])
        if not isinstance(models, dict) or not 1 <= len(models) <= MAX_MODELS:
            raise ConfigError(f"must be 1 to {MAX_MODELS} tables [models.NAME]", param="models", value=models)
        found = {name: _model(name, one) for name, one in models.items()}
        return Models({name: replace(one, target=one.target_from(path)) for name, one in found.items()}, most)


def _model(name: str, values: object) -> Settings:
    if not _NAME.fullmatch(name):
        text = "must have 1 to 100 letters, digits and ._:/@-, the first a letter or digit, as the name of a model"
        raise ConfigError(text, param="models", value=name)
    if not isinstance(values, dict):
        raise ConfigError(f"must be a table [models.{name}]", param=f"models.{name}", value=values)
    values.pop("measured", None)
    try:
        return _settings(values)
    except ConfigError as error:
        raise error.about(f"models.{name}", owned=True) from None


def _values(path: str | os.PathLike[str]) -> dict[str, Any]:
    values = tomllib.loads(read_limited(path, MAX_BYTES).decode("utf-8-sig"))
    values.pop("measured", None)
    return values


def _settings(values: Mapping[str, Any]) -> Settings:
    known = {f.name for f in fields(Settings)}
    for key in values:
        if key not in known:
            raise UnknownNameError("setting", key, known)
    if "target" not in values:
        raise ConfigError("is missing; it must name a model", param="target")
    return Settings(**values)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ConfigError with the file's name for every error of reading it."""
    name = os.fspath(path)
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from None
    except ConfigError as error:
        raise error.about(name, owned=True) from None
    except (ValueError, RecursionError) as error:  # too long numbers and invalid UTF-8 are ValueErrors
        raise ConfigError(f"is not valid TOML ({error})", param="path", value=path) from None


def write_settings(path: str | os.PathLike[str], settings: Settings, measured: Mapping[str, Any]) -> None:
    """Write a settings file atomically. measured: results to report in the file, strings and numbers."""
    lines = [f"target = {_toml(settings.target)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.given().items()]
    lines += ["", "[measured]", *(f"{name} = {_toml(value)}" for name, value in measured.items() if value is not None)]
    with atomic_write(path) as whole:
        whole.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    """Return a string, number or bool in TOML syntax; JSON strings are TOML strings, except for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
