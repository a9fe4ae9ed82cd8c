"""Beginnings of prompts in a folder: keys, values and states that outlive the process, in the bits in which they were computed.

Owns the files, their index, and the thread that writes them. A file belongs to one model (its weights, the kernels' results and
the cache's layout), one salt and one sequence of tokens; nothing else ever reads it. The least recently used files are removed to
stay within a limit. A file that is damaged, foreign or of another model is left alone. Files hold prompts in the clear: new
folders have the mode 0700, files 0600.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_native_id
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from foresay.checks import check_float
from foresay.decoding.passes import Logits, ModelInput
from foresay.decoding.rows import IntArray, common_prefix
from foresay.errors import ConfigError
from foresay.files import fingerprint, work_folder, writing
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cache.snapshots import state_lengths
from foresay.models.cache.state_cache import StateCache
from foresay.models.sources.wrapping import LoadedModel
from foresay.version import __version__

logger = logging.getLogger("foresay")
MIN_TOKENS = 64
"""Shorter beginnings are not kept: prefilling them takes no longer than reading a file."""
_FORMAT, _VERSION, _SUFFIX = "foresay-prompt", "1", ".safetensors"
_PROBE = 64
"""Tokens of the pass whose results are a part of a model's identity: they depend on its weights and kernels to the bit."""
_COLUMNS = 4096
"""Sums of each tensor that are a part of a file's checksum."""
_MOST_WAITING = 4
"""Beginnings that wait to be written; further ones are kept when they are used again."""


class Copy(Protocol):
    """A copy of the beginning of a row: keys and values, and states of recurrent layers."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        ...

    def restored(self, tensors: Mapping[str, torch.Tensor], count: int) -> Copy:
        """Return the copy of `count` tokens with these tensors. Raises ValueError or KeyError for those of another layout."""
        ...


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A file: one owner's tokens, and layers whose hidden states it has."""

    path: Path
    salt: str
    tokens: IntArray
    layers: frozenset[int]
    lengths: tuple[int, ...]
    """Lengths at which it has states of recurrent layers, one of which a row goes on at; () for a model without any."""

    def shared(self, wanted: IntArray) -> int:
        """Return the length of the longest prefix in common with other tokens that can be copied."""
        length = common_prefix(self.tokens, wanted)
        return max((one for one in self.lengths if one <= length), default=0) if self.lengths else length


class KeptPrompts:
    """Beginnings of prompts of one model in a folder, which other processes may use, too. All methods are thread-safe."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, identity: str, known: Copy) -> None:
        """identity: of the model's weights and results. known: a copy of some tokens, which other copies are like.

        Raises ConfigError if the folder cannot be made.
        """
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._identity = hashlib.sha256(f"{_VERSION} {identity}".encode()).hexdigest()
        self._copy, self._lock = known, Lock()
        with writing(self.folder):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, mode=0o700)
        self._known: dict[str, KeptPrompt | None] = {}
        """By the file's name; None for one of another model, or one that cannot be read."""
        self._seen = -1
        self._writer = ThreadPoolExecutor(1, "foresay-kept-prompts", initializer=_give_way)
        self._waiting: dict[str, Future[None]] = {}
        self._refused = False

    def longest(self, salt: str, wanted: IntArray, layers: Sequence[int]) -> tuple[int, KeptPrompt | None]:
        """Return the file with the longest prefix in common with some tokens, and that length; (0, None) for none.

        layers: those whose hidden states it must have.
        """
        with self._lock:
            self._look()
            some = [one for one in self._known.values() if one is not None and one.salt == _digest(salt)]
        found = [(one.shared(wanted), i) for i, one in enumerate(some) if one.layers >= {*layers}]
        length, index = max(found, default=(0, -1))
        return (length, some[index]) if length >= MIN_TOKENS else (0, None)

    def load(self, one: KeptPrompt, layers: Sequence[int]) -> tuple[Copy, dict[int, torch.Tensor]] | None:
        """Return keys, values and hidden states of a file; None if it is gone or damaged, which is logged once."""
        try:
            with safe_open(one.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                digest = file.metadata()["digest"]
            if digest != _checksum(tensors):
                raise ValueError("its contents have changed")
            slots = self._copy.restored(tensors, len(one.tokens))
            with suppress(OSError):  # a folder that others write
                os.utime(one.path)
            return slots, {layer: tensors[f"hidden.{layer}"] for layer in layers}
        except FileNotFoundError:  # another process made room
            return None
        except Exception as error:  # of any library that reads it
            self._leave(one.path, error)
            return None

    def keep(self, salt: str, tokens: IntArray, copy: Callable[[], tuple[Copy, Mapping[int, torch.Tensor]]]) -> None:
        """Write the beginning of a prompt, on another thread. copy: returns copies of its keys, values and hidden states."""
        if len(tokens) < MIN_TOKENS:
            return
        name = hashlib.sha256(f"{self._identity} {_digest(salt)} ".encode() + tokens.tobytes()).hexdigest() + _SUFFIX
        with self._lock:
            self._waiting = {other: one for other, one in self._waiting.items() if not one.done()}
            if name in self._waiting or self._known.get(name) or len(self._waiting) >= _MOST_WAITING or self._refused:
                return
            self._waiting[name] = self._writer.submit(self._write, name, salt, tokens, *copy())

    def close(self) -> None:
        """Wait until all is written."""
        with self._lock:
            waiting = list(self._waiting.values())
        for one in waiting:
            one.result()

    def _look(self) -> None:
        """Read the headers of new files, and forget those that are gone."""
        with suppress(OSError):
            if (changed := self.folder.stat().st_mtime_ns) == self._seen:
                return
            names = {path.name for path in self.folder.glob(f"*{_SUFFIX}")}
            self._known = {name: one for name, one in self._known.items() if name in names}
            for name in sorted(names - self._known.keys()):
                self._known[name] = self._read(self.folder / name)
            self._seen = changed

    def _read(self, path: Path) -> KeptPrompt | None:
        """Return what the header of a file names; None for a file of another model."""
        try:
            with safe_open(path, framework="np") as file:
                found: dict[str, str] = file.metadata() or {}
                if (found.get("format"), found.get("identity")) != (_FORMAT, self._identity):
                    return None
                tokens = file.get_tensor("tokens").astype(np.int64)
                names = list(file.keys())
            layers = frozenset(int(name.split(".")[1]) for name in names if name.startswith("hidden."))
            if tokens.ndim != 1 or len(tokens) < MIN_TOKENS:
                raise ValueError("it has no tokens")
            return KeptPrompt(path, found["salt"], tokens, layers, tuple(state_lengths(names)))
        except Exception as error:  # of any library that reads it
            self._leave(path, error)
            return None

    def _leave(self, path: Path, error: Exception) -> None:
        """Log why a file is not used, which it is not from now on."""
        if self._known.get(path.name, path) is not None:
            logger.warning("%s is not used: %s", path, error)
        self._known[path.name] = None

    def _write(self, name: str, salt: str, tokens: IntArray, slots: Copy, hidden: Mapping[int, torch.Tensor]) -> None:
        tensors = slots.tensors() | {f"hidden.{layer}": states.contiguous() for layer, states in hidden.items()}
        tensors["tokens"] = torch.from_numpy(tokens.astype(np.int32))
        stated = {"format": _FORMAT, "version": _VERSION, "identity": self._identity, "salt": _digest(salt)}
        try:
            with writing(self.folder), work_folder("prompt", self.folder) as work:
                save_file(tensors, work / name, stated | {"digest": _checksum(tensors)})
                os.chmod(work / name, 0o600)
                with (work / name).open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(work / name, self.folder / name)
                self._make_room(self.folder / name)
            with self._lock:  # it may replace one that was damaged
                self._known.pop(name, None)
        except ConfigError as error:
            self._refused = True
            logger.warning("prompts are not kept from now on: %s", error)

    def _make_room(self, newest: Path) -> None:
        """Remove the least recently used files beyond the limit, of all models."""
        files = [(one.stat().st_mtime_ns, one.stat().st_size, one) for one in self.folder.glob(f"*{_SUFFIX}")]
        room = self.max_bytes - newest.stat().st_size
        for _, size, path in sorted(files, reverse=True):
            if path != newest and (room := room - size) < 0:
                path.unlink(missing_ok=True)


def _give_way() -> None:
    """Let this thread run where others leave time: passes take all processors, and wait for their slowest thread."""
    with suppress(OSError, AttributeError):  # Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of sums over all tensors, which a damaged bit changes, at the speed of memory: decoding waits for it."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        content = tensors[name].contiguous().view(-1).view(torch.uint8)
        whole = len(content) // (8 * _COLUMNS) * 8 * _COLUMNS
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        found.update(content[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0).numpy().data)
        found.update(content[whole:].numpy().data)
    return found.hexdigest()


def _digest_of(tensors: Mapping[str, Any]) -> str:
    """Return a digest of the contents of all tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def keeping(
    loaded: LoadedModel, folder: str | os.PathLike[str], gigabytes: float, *, share_prefixes: bool = True
) -> KeptPrompts:
    """Return the kept prompts of a model.

    Raises ConfigError for a model whose cache is not on a CPU or also has an encoder's output, for one without sharing of
    prefixes, and for a folder that cannot be made.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError("must be the path of a folder", param="keep_prompts", value=folder)
    if not share_prefixes:
        raise ConfigError("needs {share_prefixes}", param="keep_prompts", value=folder, share_prefixes=True)
    most = check_float("keep_prompts_gb", gigabytes, 0.0, 1e6, open_low=True)
    model, cache = loaded.model, cast(Any, loaded.model.new_cache())
    kinds, able = (SlotCache, RecurrentCache, StateCache), model.capabilities
    if (
        type(cache) not in kinds
        or model.device.type != "cpu"
        or able.reads_source
        or getattr(model, "is_shared", False)
    ):
        text = "is for decoder-only models whose cache one process has on a CPU, unlike this one's"
        raise ConfigError(text, param="keep_prompts", value=folder)
    cache.add_rows(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (1, min(_PROBE, model.max_length)), generator=generator)
    model.forward(ModelInput(ids[:, :-1], [ids.shape[1] - 1], logits=Logits.NONE), cache)
    scores = model.forward(ModelInput(ids[:, -1:], [1]), cache).scores()
    saved = cache.save_prefix(0, ids.shape[1] - 1)
    results = {"scores": scores, **saved.tensors()}
    files = fingerprint(loaded.name).hex() or loaded.name
    identity = f"{__version__} {files} {loaded.precision} {_digest_of(results)}"
    return KeptPrompts(folder, int(most * 1e9), identity, saved)
