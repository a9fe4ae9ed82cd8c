"""Packed weights of GGUF files, kept in the cache folder and mapped by later loads.

One file for each GGUF file and version of the kernels: a line of JSON, then levels and scales as the kernels read them. It is
renamed to its name after it has reached the disk. The least recently used files are removed to stay within a limit. Knows
nothing of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

import numpy as np
import torch

from foresay.checks import gigabytes
from foresay.errors import ConfigError
from foresay.files import atomic_write, cache_dir
from foresay.models.cpu.build import source_digest
from foresay.models.cpu.product import BLOCKS, NativeProduct, packed_shapes
from foresay.models.gguf.header import GgufHeader
from foresay.version import __version__

logger = logging.getLogger("foresay")

LIMIT = "FORESAY_PACKED_GB"
"""Environment variable: most gigabytes of packed weights that are kept; 0 keeps none."""
_DEFAULT_LIMIT_GB = 20.0
_ANNOUNCED = 50_000_000
"""Least bytes of new weights whose keeping is logged as a warning: users should know of files of that size."""
_PAGE = 4096
"""Multiple of bytes that the first line fills up."""
Parts = dict[str, list[NativeProduct]]
"""Products by the name of their first parameter, each of one type in BLOCKS, of rows one after another."""


class PackedWeights:
    """The products of a file: those of an earlier load, or new ones, which `write` keeps."""

    def __init__(self, header: GgufHeader, part: str = "", progress: Callable[[str], None] = lambda text: None) -> None:
        """part: name of a part of the file that is loaded separately. Raises ConfigError for an invalid $FORESAY_PACKED_GB.

        progress: called with a text for each product that is packed.
        """
        self._header, self._limit, self._progress = header, gigabytes(LIMIT, _DEFAULT_LIMIT_GB), progress
        self._began = monotonic()
        self._path = _root() / f"{_digest(header)}{part}.weights"
        self._kept = _read(self._path) if self._limit else {}
        self._new: Parts = {}

    def product(
        self, name: str, shape: tuple[int, int], bias: torch.Tensor | None, make: Callable[[], NativeProduct]
    ) -> NativeProduct:
        """Return the product of weights [out, in], with bias [out] or without; `make` packs one that was not kept."""
        parts = self._kept.get(name, [])
        rows = [part.out_features for part in parts]
        if sum(rows) == shape[0] and {part.in_features for part in parts} == {shape[1]}:
            biases = [None] * len(parts) if bias is None else torch.split(bias, rows)
            return NativeProduct.stacked([part.with_bias(one) for part, one in zip(parts, biases, strict=True)])
        product = make()
        self._new[name] = list(product.parts) or [product]
        size = sum(part.nbytes for parts in self._new.values() for part in parts) / 1e9
        self._progress(f"Packing {self._header.path.name} for this processor, once: {size:.1f} GB")
        return product

    def write(self) -> None:
        """Keep new products in the cache folder, by a thread for which the process waits at its end."""
        size = sum(part.nbytes for parts in self._new.values() for part in parts)
        if 0 < size <= self._limit and self._header.is_unchanged():
            if size >= _ANNOUNCED:
                text = (
                    "%s was packed for this processor in %.0f s; %.1f GB in %s spare later loads that (%s=0 keeps none)"
                )
                taken = monotonic() - self._began
                logger.warning(text, self._header.path.name, taken, size / 1e9, self._path.parent, LIMIT)
            threading.Thread(target=_write, args=(self._path, self._new, self._limit - size), name=_THREAD).start()


_THREAD = "foresay-packed-weights"


def settle() -> None:
    """Wait until all new weights are kept."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


def _root() -> Path:
    return cache_dir() / "packed"


def _digest(header: GgufHeader) -> str:
    """Return a digest of a file's identity and header, and of the code that packs it."""
    tensors = " ".join(f"{name} {tensor.kind} {tensor.shape}" for name, tensor in header.tensors.items())
    text = f"{__version__} {source_digest()} {header.identity} {tensors}"
    return hashlib.sha256(text.encode() + header.short_values).hexdigest()[:32]


def _write(path: Path, parts: Mapping[str, list[NativeProduct]], room: int) -> None:
    """Write products to a file. room: most bytes of the other files. Logs why the file system refuses, which is no error."""
    index = {
        name: [(part.kind, part.out_features, part.in_features) for part in found] for name, found in parts.items()
    }
    line = json.dumps(index).encode()
    try:
        with atomic_write(path, parents=True) as temporary, temporary.open("wb") as file:
            file.write(line.ljust(-(-(len(line) + 1) // _PAGE) * _PAGE - 1) + b"\n")
            for part in (part for found in parts.values() for part in found):
                for packed in part.packed:
                    file.write(packed.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        others = sorted(path.parent.glob("*.weights"), key=lambda one: one.stat().st_mtime, reverse=True)
        for other in others:
            room -= 0 if other == path else other.stat().st_size
            if room < 0:
                other.unlink()
    except (OSError, ConfigError) as error:
        logger.info("packed weights are not kept: %s", error)


def _read(path: Path) -> Parts:
    """Map a file's products; {} without the file, or for one that is damaged."""
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        line = memory.readline()
        data, at = torch.from_numpy(np.frombuffer(memory, np.uint8)), len(line)
        products: Parts = {}
        for name, parts in json.loads(line).items():
            for kind, rows, depth in parts:
                if type(rows) is not int or type(depth) is not int or min(rows, depth) < 1 or depth % BLOCKS[kind][0]:
                    raise ValueError(f"its first line has a part {kind} {rows} x {depth}")
                packed = []
                for shape in packed_shapes(kind, rows, depth):
                    packed.append(data[at : at + math.prod(shape)].view(shape))
                    at += math.prod(shape)
                products.setdefault(str(name), []).append(NativeProduct.of_packed(kind, rows, depth, packed, None))
        if at != len(data):
            raise ValueError(f"it has {len(data)} bytes instead of {at}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        logger.info("the packed weights in %s are made again: %s", path, error)
        return {}
    with contextlib.suppress(OSError):  # a folder that can only be read
        os.utime(path)
    return products
