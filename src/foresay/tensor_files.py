"""Tensors of untrusted safetensors files: shapes are checked before data is read.

The library validates the header against the file's size; a shape costs nothing until its tensor is read. Knows no format.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from foresay.errors import ModelLoadError

if TYPE_CHECKING:
    import torch


class Stored(Protocol):
    """A tensor that is stored somewhere."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See StoredTensor."""
        ...

    @property
    def dtype(self) -> str:
        """See StoredTensor."""
        ...

    @property
    def floats(self) -> bool:
        """See StoredTensor."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, not read yet."""

    file: Path
    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: F32, BF16, I64, ..."""

    @property
    def floats(self) -> bool:
        """True for the floating-point types of weights."""
        return self.dtype in ("F64", "F32", "F16", "BF16")


def stored_tensors(files: Iterable[str | os.PathLike[str]]) -> dict[str, StoredTensor]:
    """Return the tensors of some files by name; a later file replaces tensors of earlier ones. Raises as `load_tensors` does."""
    from safetensors import SafetensorError, safe_open

    out: dict[str, StoredTensor] = {}
    for path in map(Path, files):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    out[name] = StoredTensor(path, name, tuple(part.get_shape()), str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from None
    return out


def load_tensors(wanted: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Read tensors, under the mapping's names. Raises ModelLoadError for a file that is damaged or cannot be read."""
    from safetensors import SafetensorError, safe_open

    out: dict[str, torch.Tensor] = {}
    for path in sorted({one.file for one in wanted.values()}):
        try:
            with safe_open(path, framework="pt") as file:
                out |= {name: file.get_tensor(one.name) for name, one in wanted.items() if one.file == path}
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from None
    return out


def check_shapes(
    stored: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]], subject: str, reason: str
) -> None:
    """Raise ModelLoadError unless exactly the wanted tensors exist, floating-point and of the wanted shapes.

    subject: the object and its folder, for errors. reason: source of the wanted shapes ("its config.json gives").
    """
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which it should not have"
        raise ModelLoadError(f"{subject} {problem}")
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise ModelLoadError(f"{name} of {subject} is {list(stored[name].shape)}, and {reason} {list(shape)}")
        if not stored[name].floats:
            raise ModelLoadError(f"{name} of {subject} is {stored[name].dtype}, and weights are floating-point numbers")


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"cannot read {str(path)!r}: {' '.join(str(error).split())}")
