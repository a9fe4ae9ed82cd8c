"""Packed weights of GGUF files, kept in the cache folder and mapped by later loads.

Owns the format of the folder: the weights as the kernels read them, and an index. A folder belongs to one file and one version of
the kernels, appears complete or not at all, and is trusted after a crash of the machine only if it had reached the disk before.
The least recently used folders are removed to stay within a limit. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from time import time
from typing import Any

import torch

from foresay import __version__
from foresay.errors import ConfigError
from foresay.files import atomic_write, cache_dir, remove_stale, work_folder
from foresay.models.cpu.build import source_digest
from foresay.models.cpu.product import (
    BLOCKS,
    NativeProduct,
    Packed,
    StackedProduct,
    in_memory,
    packed_shapes,
    packed_views,
)
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.types import is_quantized

logger = logging.getLogger("foresay")

LIMIT = "FORESAY_PACKED_GB"
"""Environment variable: most gigabytes of packed weights that are kept; 0 keeps none."""
_DEFAULT_LIMIT_GB = 20.0
_QUIET_S = 20.0
"""Age of weights from which they are written to the disk: while they were, the rest of a load took twice as long."""
_ALIGNMENT = 64
"""Multiple of bytes at which weights begin: a line of the processor's cache."""
_WEIGHTS, _INDEX = "weights.bin", "index.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Part:
    """Weights [rows, depth] of a type in BLOCKS. at: byte of the file at which they begin."""

    kind: str
    rows: int
    depth: int
    at: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.at + sum(math.prod(shape) for shape in packed_shapes(self.kind, self.rows, self.depth))


class KeptWeights:
    """The weights of a file from an earlier load, mapped: pages are read when they are used, and shared between processes."""

    def __init__(self, folder: Path, parts: Mapping[str, Sequence[Part]]) -> None:
        """Raises OSError if the weights cannot be mapped."""
        with (folder / _WEIGHTS).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._parts = parts

    def find(
        self, name: str, rows: int, depth: int, bias: torch.Tensor | None
    ) -> NativeProduct | StackedProduct | None:
        """Return the product of weights [rows, depth], or None if there is none of this name and shape."""
        parts = self._parts.get(name, ())
        if sum(part.rows for part in parts) != rows or {part.depth for part in parts} != {depth}:
            return None
        biases = [None] * len(parts) if bias is None else torch.split(bias, [part.rows for part in parts])
        products = []
        for part, one in zip(parts, biases, strict=True):
            packed = packed_views(self._memory, part.at, part.kind, part.rows, part.depth)
            products.append(NativeProduct.of_packed(part.kind, part.rows, part.depth, packed, one))
        return products[0] if len(products) == 1 else StackedProduct(products)

    def allocate(self, name: str, kind: str, rows: int, depth: int) -> Packed:
        """Allocate weights that the index lacks; they are not kept."""
        return in_memory(kind, rows, depth)


class NewWeights:
    """The weights of a file as they are packed: in a mapped file of `folder`, or in memory."""

    def __init__(self, folder: Path | None, size: int) -> None:
        """folder: None keeps nothing. size: most bytes of all weights. Raises OSError if the disk has no room for them."""
        self._folder = folder
        self._parts: dict[str, list[Part]] = {}
        self._end = 0
        self._memory: mmap.mmap | None = None
        if folder is None:
            return
        with (folder / _WEIGHTS).open("w+b") as file:
            # with its blocks allocated now, a full disk is an error here instead of a signal at the first write to the map
            os.posix_fallocate(file.fileno(), 0, size)
            self._memory = mmap.mmap(file.fileno(), size)

    def find(self, name: str, rows: int, depth: int, bias: torch.Tensor | None) -> None:
        """Return None: nothing was packed before."""

    def allocate(self, name: str, kind: str, rows: int, depth: int) -> Packed:
        """Allocate a part of the weights called `name`."""
        part = Part(kind, rows, depth, -(-self._end // _ALIGNMENT) * _ALIGNMENT)
        if self._memory is None or part.end > len(self._memory):
            return in_memory(kind, rows, depth)
        self._parts.setdefault(name, []).append(part)
        self._end = part.end
        return packed_views(self._memory, part.at, kind, rows, depth)

    def keep(self, folder: Path) -> None:
        """Make this the content of a folder in the cache, unless another process did. Raises OSError."""
        if self._memory is None or self._folder is None or _kept(folder) is not None:
            return
        os.truncate(self._folder / _WEIGHTS, self._end)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        _make_room(folder.parent, self._end)
        _write_index(self._folder, _boot_id() or "unknown", self._parts, self._end)
        self._folder.rename(folder)
        _settle(folder, self._parts, self._end)


def _make_room(root: Path, size: int) -> None:
    """Remove the least recently used folders until `size` more bytes stay within the limit."""
    limit = _limit_bytes()
    for _, one, folder in sorted(map(_use, root.glob("[!.]*")), reverse=True):
        size += one
        if size > limit:
            shutil.rmtree(folder, ignore_errors=True)


def _use(folder: Path) -> tuple[float, int, Path]:
    """Return a folder's last use in seconds, its bytes, and its path; zeros if it is not a folder of weights."""
    try:
        return (folder / _INDEX).stat().st_mtime, (folder / _WEIGHTS).stat().st_size, folder
    except OSError:
        return 0.0, 0, folder


PackedWeights = KeptWeights | NewWeights


@contextlib.contextmanager
def packed_weights(header: GgufHeader) -> Iterator[PackedWeights]:
    """Yield the packed weights of a file, which are kept at the end of the block if they are new.

    Without room on the disk or within the limit, or a writable cache folder, they are in memory only. Raises ConfigError for an
    invalid $FORESAY_PACKED_GB.
    """
    limit, size = _limit_bytes(), _most_bytes(header)
    folder = _root() / _key(header) if 0 < size <= limit else None
    kept = None if folder is None else _kept(folder)
    if kept is not None:
        yield kept
        return
    with contextlib.ExitStack() as stack:
        new = NewWeights(None, 0)
        if folder is not None:
            with _unkept():
                new = NewWeights(_new_folder(folder, size, stack), size)
        yield new
        if folder is not None and header.is_unchanged():
            with _unkept():
                new.keep(folder)


@contextlib.contextmanager
def _unkept() -> Iterator[None]:
    """Log why the file system keeps no weights, which is no error. AttributeError: a system without `posix_fallocate`."""
    try:
        yield
    except (OSError, AttributeError, ConfigError) as error:
        logger.info("packed weights are not kept: %s", error)


def settle() -> None:
    """Wait until all kept weights have reached the disk, so that they survive a crash of the machine."""
    _hurry.set()
    for thread in list(_settling):
        thread.join()
    _hurry.clear()


_settling: set[threading.Thread] = set()
_hurry = threading.Event()


def _root() -> Path:
    return cache_dir() / "packed"


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT, "")
    try:
        limit = float(text) if text else _DEFAULT_LIMIT_GB
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise ConfigError(f"{LIMIT}={text!r} must be a number of gigabytes, or 0 to keep no packed weights")
    return int(limit * 1e9)


def _key(header: GgufHeader) -> str:
    """Return the name of a file's folder: a digest of the file's identity and of the code that packs it."""
    digest = hashlib.sha256(f"{__version__} {source_digest()} {_code_digest()} {header.identity}".encode())
    digest.update(header.short_values)
    for name, tensor in header.tensors.items():
        digest.update(f"{name} {tensor.kind} {tensor.shape}".encode())
    return digest.hexdigest()[:32]


@functools.cache
def _code_digest() -> str:
    """Return a digest of the Python code on which the packed bits depend: names, orders of rows, rounding of other types."""
    here = Path(__file__).parent
    files = [here / name for name in ("blocks.py", "packed.py", "types.py")]
    files += [here.parent / "cpu" / name for name in ("product.py", "rounding.py")]
    digest = hashlib.sha256(importlib.metadata.version("gguf").encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _most_bytes(header: GgufHeader) -> int:
    """Return the most bytes that a file's packed weights can have; products of several tensors have fewer."""
    total = 0
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1 and is_quantized(tensor):
            kind, [*experts, rows, depth] = tensor.kind if tensor.kind in BLOCKS else "Q8_0", tensor.shape
            part = Part(kind, rows, depth, 0).end
            total += math.prod(experts) * (part + _ALIGNMENT)
    return total


def _new_folder(folder: Path, size: int, stack: contextlib.ExitStack) -> Path:
    """Return a folder for new weights. Raises OSError if it cannot be made, or if the disk would be almost full."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(folder.parent)
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * size:
        raise OSError(f"of {free} free bytes {size} would be used")
    made = stack.enter_context(work_folder(folder.name, folder.parent)) / folder.name
    made.mkdir(mode=0o700)
    return made


def _kept(folder: Path) -> KeptWeights | None:
    """Return the weights of a folder; None if there are none, or damaged ones, or ones that may not have reached the disk."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        size, boot = index["size"], index["boot"]
        parts = {str(name): [_part(one, size) for one in found] for name, found in index["parts"].items()}
        if (folder / _WEIGHTS).stat().st_size < size:
            raise ValueError(f"{_WEIGHTS} is shorter than {size} bytes")
        if boot and boot != _boot_id():  # also without a boot id
            raise ValueError("the machine was restarted before they had reached the disk")
        kept = KeptWeights(folder, parts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.info("the packed weights in %s are made again: %s", folder, error)
        return None
    with contextlib.suppress(OSError):  # a folder that can only be read
        os.utime(folder / _INDEX)
        if boot:
            _settle(folder, parts, size)
    return kept


def _part(stored: Any, size: int) -> Part:
    """Return a part of an index. Raises ValueError if it exceeds the file."""
    kind, rows, depth, at = stored
    if kind not in BLOCKS or any(type(number) is not int or number < 0 for number in (rows, depth, at, size)):
        raise ValueError(f"the index has an invalid part {stored!r}")
    part = Part(kind, rows, depth, at)
    if rows == 0 or depth == 0 or depth % BLOCKS[kind][0] or at % _ALIGNMENT or part.end > size:
        raise ValueError(f"the index has an invalid part {stored!r}")
    return part


def _write_index(folder: Path, boot: str, parts: Mapping[str, Sequence[Part]], size: int) -> None:
    """Write the index. boot: the start of the machine during which the weights are valid; "" for any."""
    stored = {name: [astuple(part) for part in found] for name, found in parts.items()}
    with atomic_write(folder / _INDEX) as path:
        path.write_text(json.dumps({"size": size, "boot": boot, "parts": stored}), encoding="utf-8")


def _boot_id() -> str:
    """Return a string that differs from one start of the machine to the next; "" if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _settle(folder: Path, parts: Mapping[str, Sequence[Part]], size: int) -> None:
    """Write the weights to the disk in a thread, then mark them as valid after a restart of the machine.

    If they cannot be written, the folder is removed: pages that the system drops would come back as something else.
    """

    def work() -> None:
        try:
            age = time() - (folder / _WEIGHTS).stat().st_mtime
            _hurry.wait(_QUIET_S - age)
            with (folder / _WEIGHTS).open("r+b") as file:
                os.fsync(file.fileno())
                if os.path.samestat(os.fstat(file.fileno()), (folder / _WEIGHTS).stat()):
                    _write_index(folder, "", parts, size)
        except (FileNotFoundError, PermissionError, ConfigError):  # removed meanwhile, or only to be read
            pass
        except OSError as error:
            logger.info("packed weights are not kept: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            _settling.discard(threading.current_thread())

    thread = threading.Thread(target=work, name="foresay-packed-weights", daemon=True)
    _settling.add(thread)
    thread.start()
