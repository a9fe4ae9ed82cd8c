"""N-gram tables: the likeliest next token in a corpus after contexts of up to n - 1 tokens.

Owns the search and the file format. Knows only the tokenizer's fingerprint, and not how tables are built (see
training/ngrams.py). Letters in docstrings: V vocabulary, N contexts of one length.
"""

from __future__ import annotations

import dataclasses
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from foresay.checks import check_float, check_int
from foresay.decoding.rows import IntArray
from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError, VocabularyMismatchError, shown
from foresay.files import atomic_write
from foresay.json_files import parse_json, read_limited
from foresay.version import __version__

MAX_ORDER = 5
TOKEN_BITS = 21
"""Bits of a token in a packed key: MAX_ORDER - 2 tokens fit into an int64."""
MAX_VOCAB_SIZE = 1 << TOKEN_BITS
_KIND, _FORMAT = "foresay n-gram table", 1
_LEVEL_ARRAYS = ("starts", "keys", "successor")

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus that a table was built from."""

    files: tuple[str, ...]
    """File names without folders."""
    num_tokens: int
    num_documents: int
    min_count: int
    """N-grams with a smaller count were left out."""
    num_ngrams: tuple[int, ...] = ()
    """Distinct n-grams of 2 tokens, of 3, and so on, before min_count was applied."""
    num_pruned: int = 0
    """N-grams dropped while counting because memory was full; one that recurred and was dropped again counts twice."""
    pruned_count: int = 0
    """The highest count of a dropped n-gram: n-grams with higher counts are complete."""

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in self.files):
            raise ConfigError("must be names", param="files", value=self.files)
        for count in self.num_ngrams:
            check_int("num_ngrams", count, 0)
        for name in ("num_tokens", "num_documents", "min_count", "num_pruned", "pruned_count"):
            check_int(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Contexts of k - 1 tokens, k >= 3, and the likeliest token after each.

    Contexts are sorted by their last token t, whose entries are those from starts[t] to starts[t + 1], and then by the packed key
    of the tokens before it: key = sum of token[-2 - j] << (21 j).
    """

    starts: IntArray
    """[V + 1] int64."""
    keys: IntArray
    """[N] int64."""
    successor: TokenArray
    """[N] int32."""


@dataclass(frozen=True, slots=True, eq=False)
class NgramTable:
    """The likeliest next token after a context, by its longest known suffix."""

    successor: TokenArray
    """[V] int32: the likeliest token after each token, -1 if unknown."""
    counts: IntArray | None = None
    """[V] int64: how often each token occurs in the corpus; None in a table without counts."""
    levels: tuple[Level, ...] = ()
    """Contexts of 2 tokens, of 3, and so on."""
    fingerprint: str | None = None
    """`text.tokenizer_fingerprint` of the ids' tokenizer; None if unknown."""
    corpus: Corpus | None = None
    _views: tuple[tuple[memoryview, ...], ...] = field(init=False, repr=False)
    _next: memoryview = field(init=False, repr=False)
    learned: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every array. Raises ConfigError naming the array and the problem."""
        own = partial(object.__setattr__, self)
        own("successor", _integers("successor", self.successor, np.int32, -1, np.size(self.successor) - 1))
        size = len(self.successor)
        if not 1 <= size <= MAX_VOCAB_SIZE:
            raise ConfigError(f"must be in [1, {MAX_VOCAB_SIZE}]", param="vocab_size", value=size)
        if len(self.levels) > MAX_ORDER - 2:
            raise ConfigError(f"must be in [2, {MAX_ORDER}]", param="order", value=self.order)
        if self.counts is not None:
            own("counts", _integers("counts", self.counts, np.int64, 0, 2**62, size))
        if self.fingerprint is not None and not _is_fingerprint(self.fingerprint):
            raise ConfigError("must be 64 hexadecimal digits", param="fingerprint", value=self.fingerprint)
        own("levels", tuple(_checked(level, k, size) for k, level in enumerate(self.levels, 3)))
        own("_views", tuple((level.starts.data, level.keys.data, level.successor.data) for level in self.levels))
        own("_next", self.successor.data)
        digest = blake2b(self.successor.data, digest_size=8)
        for view in (one for views in self._views for one in views):
            digest.update(view)
        own("learned", digest.digest())

    @property
    def order(self) -> int:
        """The n of the n-grams: 2 for a bigram table, whose contexts are single tokens."""
        return len(self.levels) + 2

    @property
    def vocab_size(self) -> int:
        """V: ids are from 0 to V - 1."""
        return len(self.successor)

    @property
    def num_contexts(self) -> tuple[int, ...]:
        """Number of known contexts of 1 token, of 2, and so on."""
        return int((self.successor >= 0).sum()), *(len(level.keys) for level in self.levels)

    @property
    def max_id(self) -> int:
        """Highest id in the table; -1 if it is empty."""
        arrays: list[npt.NDArray[Any]] = [
            self.successor,
            *(level.successor for level in self.levels),
            np.flatnonzero(self.successor >= 0),
        ]
        if self.counts is not None:
            arrays.append(np.flatnonzero(self.counts))
        return max(int(ids.max(initial=-1)) for ids in arrays)

    def next(self, context: Sequence[int] | IntArray) -> int | None:
        """Return the likeliest token after the longest known suffix of the context; None if its last token is unknown."""
        return self._find(_tail(context, self.order - 1))

    def continuation(self, context: Sequence[int] | IntArray, count: int) -> list[int]:
        """Return up to `count` tokens, each the likeliest after those before it; fewer after an unknown context."""
        width = self.order - 1
        tokens = _tail(context, width)
        given = len(tokens)
        for _ in range(count):
            token = self._find(tokens[-width:])
            if token is None:
                break
            tokens.append(token)
        return tokens[given:]

    def _find(self, tokens: list[int]) -> int | None:
        """Return the likeliest token after at most n - 1 tokens. Ids outside the vocabulary are unknown tokens."""
        size = len(self._next)
        if not tokens or not 0 <= tokens[-1] < size:
            return None
        last, key, shift = tokens[-1], 0, 0
        found: int = self._next[last]
        packed = []
        for token in tokens[-2::-1]:
            if not 0 <= token < size:
                break
            key |= token << shift
            shift += TOKEN_BITS
            packed.append(key)
        for (starts, keys, successor), key in zip(self._views[len(packed) - 1 :: -1], packed[::-1], strict=False):
            end = starts[last + 1]
            at = bisect_left(keys, key, starts[last], end)
            if at < end and keys[at] == key:
                found = successor[at]
                break
        return found if found >= 0 else None

    def frequent(self, count: int | None = None, *, coverage: float | None = None) -> IntArray:
        """Return the ids of the most frequent tokens, ascending: `count` of them, or the fewest that cover a share of the corpus.

        coverage: the share, in (0, 1]. Of equally frequent tokens the smaller ids come first. Raises ConfigError unless
        exactly one of the arguments is given, or if the table has no counts.
        """
        if (count is None) == (coverage is None):
            raise ConfigError("and {coverage}: give exactly one of them", param="count", value=count, coverage=coverage)
        if self.counts is None or not self.counts.any():
            text = "are missing in this table; build one with `foresay distill --kind ngram`"
            raise ConfigError(text, param="counts")
        ranked = np.argsort(-self.counts, kind="stable")
        if coverage is not None:
            share = check_float("coverage", coverage, 0, 1, open_low=True)
            wanted = Fraction(repr(share)) * int(self.counts.sum())  # 0.55 of 100 tokens is 55, not 56
            count = int(np.searchsorted(np.cumsum(self.counts[ranked]), -(-wanted // 1))) + 1
        assert count is not None
        check_int("count", count, 1, self.vocab_size)
        return np.sort(ranked[:count]).astype(np.int64)

    def draft_vocabulary(self, size: int | None, coverage: float, ends: Iterable[int], vocab_size: int) -> list[int]:
        """Return the sorted ids of a reduced draft vocabulary: the most frequent tokens and the end tokens, below vocab_size.

        size: number of frequent tokens; None selects them by coverage. ends: end tokens.
        """
        frequent = self.frequent(coverage=coverage) if size is None else self.frequent(size)
        return sorted(i for i in {*frequent.tolist(), *ends} if i < vocab_size)

    def check(self, fingerprint: str | None, vocab_size: int, own_tokens: int = 0) -> None:
        """Raise VocabularyMismatchError if the table was built with another tokenizer.

        fingerprint, vocab_size: of the tokenizer in use. own_tokens: size of its vocabulary without added tokens and padding, the
        smallest size of a table without a fingerprint.
        """
        advice = "build a table with this tokenizer: foresay distill TABLE --kind ngram --text FILE --model NAME"
        if fingerprint is not None and self.fingerprint is not None and fingerprint != self.fingerprint:
            raise VocabularyMismatchError(
                f"the n-gram table was built with another tokenizer (fingerprint {self.fingerprint[:12]}, "
                f"{self.vocab_size} tokens) than the one in use ({fingerprint[:12]}, {vocab_size} tokens); {advice}"
            )
        if None in (fingerprint, self.fingerprint) and self.vocab_size < own_tokens:
            raise VocabularyMismatchError(
                f"the n-gram table was built for a vocabulary of {self.vocab_size} tokens, but the one in use has {own_tokens}; "
                f"{advice}"
            )
        if self.max_id >= vocab_size:
            raise VocabularyMismatchError(
                f"the n-gram table contains token {self.max_id}, but the vocabulary in use has {vocab_size} tokens; {advice}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically, replacing an existing one. Raises ConfigError if it cannot be written."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise ConfigError("must end in .safetensors", param="path", value=path)
        tensors: dict[str, npt.NDArray[Any]] = {"successor": self.successor}
        if self.counts is not None:
            tensors["counts"] = self.counts
        for k, level in enumerate(self.levels, 3):
            tensors |= {f"level_{k}.{name}": getattr(level, name) for name in _LEVEL_ARRAYS}
        facts = {
            "kind": _KIND,
            "format": _FORMAT,
            "order": self.order,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
            "corpus": None if self.corpus is None else dataclasses.asdict(self.corpus),
            "foresay_version": __version__,
        }
        _write(path, tensors, {name: json.dumps(value) for name, value in facts.items()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NgramTable:
        """Read a table written by `save`, or a bigram list of CS-Drafting (.json), which has neither counts nor a fingerprint.

        Entry i of such a list is the id of the token after token i, null or -1 if unknown. Raises ModelNotFoundError for a
        missing file, and ModelLoadError naming the path and the problem.
        """
        path = Path(path)
        if not path.exists():
            raise ModelNotFoundError(f"no such n-gram table: {str(path)!r}")
        if path.is_dir():
            _refuse(path, "it is a folder")
        try:
            return cls(_read_json(path)) if path.suffix == ".json" else cls(**_read_safetensors(path))
        except (ConfigError, OSError) as error:
            _refuse(path, getattr(error, "strerror", None) or str(error), error)


def _tail(context: Sequence[int] | IntArray, width: int) -> list[int]:
    end = context[-width:]
    return end.tolist() if isinstance(end, np.ndarray) else list(end)


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _integers(name: str, value: Any, dtype: Any, low: int, high: int, size: int | None = None) -> npt.NDArray[Any]:
    """Return the value as a read-only array of integers from low to high. Raises ConfigError if it is not one."""
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"must be a list of integers, not {array.dtype} of shape {array.shape}", param=name)
    if size is not None and len(array) != size:
        raise ConfigError(f"has {len(array)} entries instead of {size}", param=name)
    if len(array) and not (low <= array.min() and array.max() <= high):
        worst = int(array.min()) if array.min() < low else int(array.max())
        raise ConfigError(f"contains {worst}, which is not in [{low}, {high}]", param=name)
    array = np.ascontiguousarray(array, dtype=dtype).view()
    array.flags.writeable = False
    return array


def _checked(level: Level, order: int, vocab_size: int) -> Level:
    """Return a checked level that can be searched: starts and keys ascending, tokens in the vocabulary."""
    name, size = f"level_{order}", np.size(level.keys)
    starts = _integers(f"{name}.starts", level.starts, np.int64, 0, size, vocab_size + 1)
    keys = _integers(f"{name}.keys", level.keys, np.int64, 0, (1 << TOKEN_BITS * (order - 2)) - 1)
    successor = _integers(f"{name}.successor", level.successor, np.int32, 0, vocab_size - 1, size)
    if starts[0] != 0 or starts[-1] != size or (np.diff(starts) < 0).any():
        raise ConfigError(f"must ascend from 0 to {size}", param=f"{name}.starts")
    rising = np.diff(keys) > 0
    rising[starts[(starts > 0) & (starts < size)] - 1] = True  # keys start over at each last token
    if not rising.all():
        raise ConfigError("must ascend within each last token", param=f"{name}.keys")
    for shift in range(0, TOKEN_BITS * (order - 2), TOKEN_BITS):
        if size and int((keys >> shift & (MAX_VOCAB_SIZE - 1)).max()) >= vocab_size:
            raise ConfigError(f"contains a token beyond the vocabulary of {vocab_size}", param=f"{name}.keys")
    return Level(starts, keys, successor)


def _write(path: Path, tensors: dict[str, npt.NDArray[Any]], metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with atomic_write(path) as whole:
            save_file(tensors, whole, metadata)
    except SafetensorError as error:
        raise ConfigError(f"cannot be written: {error}", param="path", value=path) from error


def _refuse(path: Path, problem: str, cause: Exception | None = None) -> NoReturn:
    in_one_line = " ".join(problem.split())  # a library's error may repeat the file's line breaks
    raise ModelLoadError(f"{str(path)!r} cannot be read as an n-gram table: {in_one_line}") from cause


def _read_json(path: Path) -> TokenArray:
    try:
        entries = parse_json(read_limited(path))
    except ConfigError as error:
        _refuse(path, str(error), error)
    if not isinstance(entries, list) or not entries:
        _refuse(path, "it must be a JSON list of token ids, with the id of the token after token i at entry i")
    for i, entry in enumerate(entries):
        if entry is not None and (isinstance(entry, bool) or not isinstance(entry, int)):
            _refuse(path, f"entry {i} is {shown(entry)}, neither a token id nor null")
        if entry is not None and not -1 <= entry < len(entries):
            _refuse(path, f"entry {i} is {entry}, which is not in [-1, {len(entries) - 1}]")
    return np.array([-1 if entry is None else entry for entry in entries], dtype=np.int32)


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Return the constructor's arguments, read from a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            facts = _facts(path, file.metadata() or {})
            levels = range(3, facts["order"] + 1)
            needed = {"successor", *(f"level_{k}.{name}" for k in levels for name in _LEVEL_ARRAYS)}
            if wrong := (set(file.keys()) - {"counts"}) ^ needed:
                _refuse(path, f"these arrays are missing or unexpected: {', '.join(sorted(wrong))}")
            try:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except ValueError as error:  # an empty array of a shape that NumPy rejects
                _refuse(path, f"it is not a valid safetensors file: {error}", error)
    except (SafetensorError, TypeError, KeyError, AttributeError) as error:
        _refuse(path, f"it is not a valid safetensors file: {error}", error)
    entries = len(np.atleast_1d(arrays["successor"]))
    if entries != facts["vocab_size"]:
        _refuse(path, f"successor has {entries} entries, vocab_size is {facts['vocab_size']}")
    return {
        "successor": arrays["successor"],
        "counts": arrays.get("counts"),
        "levels": tuple(Level(*(arrays[f"level_{k}.{name}"] for name in _LEVEL_ARRAYS)) for k in levels),
        "fingerprint": facts["fingerprint"],
        "corpus": facts["corpus"],
    }


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked metadata. Raises ConfigError or ModelLoadError if it is not a table's."""
    try:
        facts = {name: parse_json(text) for name, text in metadata.items()}
    except ConfigError:  # another program's metadata
        facts = {}
    if facts.get("kind") != _KIND:
        _refuse(path, "it is a safetensors file, but not an n-gram table")
    if facts.get("format") != _FORMAT:
        found = facts.get("format")
        _refuse(path, f"its format is {found!r}, this version of foresay reads {_FORMAT}; build the table again")
    for name in ("order", "vocab_size", "fingerprint", "corpus"):
        if name not in facts:
            _refuse(path, f"its metadata has no {name}")
    check_int("order", facts["order"], 2, MAX_ORDER)
    check_int("vocab_size", facts["vocab_size"], 1, MAX_VOCAB_SIZE)
    if facts["corpus"] is not None:
        try:
            lists = {name: tuple(facts["corpus"][name]) for name in ("files", "num_ngrams")}
            facts["corpus"] = Corpus(**{**facts["corpus"], **lists})
        except (TypeError, KeyError) as error:
            _refuse(path, f"its description of the corpus is wrong: {error}", error)
    return facts
