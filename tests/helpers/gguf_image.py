"""GGUF files in parts that may contradict each other, and files that differ from sound ones in some values or tensors."""

from __future__ import annotations

import copy
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from helpers.gguf_files import write_gguf

ALIGNMENT = 32
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""struct's letters for the scalar types of GGUF."""
TEXT, LIST = 8, 9


def typed(value: Any) -> tuple[int, bytes]:
    """The type and the bytes of a value, unless it is such a pair."""
    match value:
        case tuple():
            return value
        case bool():
            return 7, bytes([value])
        case str():
            return TEXT, struct.pack("<Q", len(value.encode())) + value.encode()
        case list():
            parts = [typed(one) for one in value]
            return LIST, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(data for _, data in parts)
        case float():
            return 6, struct.pack("<f", value)
    kind = 5 if value < 0 else 4 if value < 1 << 32 else 10
    return kind, struct.pack("<" + FORMATS[kind], value)


@dataclass(slots=True)
class Tensor:
    """An entry of the table of tensors. offset: None for the next free position."""

    name: bytes
    dims: list[int]
    kind: int
    data: bytes
    offset: int | None = None
    num_dims: int | None = None


@dataclass(slots=True)
class Image:
    """A file in parts. values: (key, type, bytes after the type)."""

    values: list[tuple[bytes, int, bytes]]
    tensors: list[Tensor]
    version: int = 3
    num_tensors: int | None = None
    num_values: int | None = None

    @property
    def architecture(self) -> str:
        return next(
            value[8:].decode(errors="replace") for key, _, value in self.values if key == b"general.architecture"
        )

    def put(self, key: str, value: Any) -> None:
        """Give a value to a key of the architecture or, with its namespace, of another one; None takes it away."""
        if key.partition(".")[0] not in ("adapter", "general", "tokenizer", "split"):
            key = f"{self.architecture}.{key}"
        self.values = [one for one in self.values if one[0] != key.encode()]
        if value is not None:
            self.values.append((key.encode(), *typed(value)))

    def tensor(self, name: str) -> Tensor:
        return next(one for one in self.tensors if one.name == f"{name}.weight".encode())

    def changed(self, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray | None] | None = None) -> Image:
        """Return a copy with other values, and with float32 tensors instead of others; None for none."""
        image = copy.deepcopy(self)
        for key, value in values.items():
            image.put(key, value)
        for name, numbers in (tensors or {}).items():
            image.tensors = [one for one in image.tensors if one.name != name.encode()]
            if numbers is not None:
                image.tensors.append(Tensor(name.encode(), [*numbers.shape[::-1]], 0, np.float32(numbers).tobytes()))
        return image

    def renamed(self, architecture: str) -> Image:
        """Return a copy for another architecture."""
        old, image = f"{self.architecture}.".encode(), copy.deepcopy(self)
        image.values = [(key.replace(old, f"{architecture}.".encode()), *rest) for key, *rest in image.values]
        image.put("general.architecture", architecture)
        return image

    def written(self) -> bytes:
        """The bytes of the file."""
        counts = [self.num_tensors, self.num_values]
        counts = [len(one) if n is None else n for n, one in zip(counts, (self.tensors, self.values), strict=True)]
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", self.version & 0xFFFFFFFF, *(n % (1 << 64) for n in counts)))
        for key, kind, value in self.values:
            out += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        data = bytearray()
        for one in self.tensors:
            at = len(data) if one.offset is None else one.offset
            count = len(one.dims) if one.num_dims is None else one.num_dims
            out += struct.pack("<Q", len(one.name)) + one.name + struct.pack("<I", count)
            out += struct.pack(f"<{len(one.dims)}QIQ", *(n % (1 << 64) for n in one.dims), one.kind, at)
            data += one.data + bytes(-len(one.data) % ALIGNMENT)
        return bytes(out + bytes(-len(out) % ALIGNMENT) + data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.written())
        return path


def image_of(model: PreTrainedModel, kinds: Mapping[str, str] | None = None, **more: Any) -> Image:
    """The file of a model, which `write_gguf` writes."""
    with tempfile.TemporaryDirectory() as folder:
        reader = gguf.GGUFReader(write_gguf(Path(folder) / "sound.gguf", model, kinds, **more))
        values = []
        for key, one in reader.fields.items():
            if not key.startswith("GGUF."):
                parts = [part.tobytes() for part in one.parts]
                values.append((parts[1], int(one.parts[2][0]), b"".join(parts[3:])))
        tensors = [
            Tensor(one.name.encode(), [int(n) for n in one.shape], int(one.tensor_type), one.data.tobytes())
            for one in reader.tensors
        ]
    return Image(values, tensors)
