"""Structured output: a logits processor that masks every token the grammar does not allow next.

Owns the synchronization of the grammar library's state with a context that grows by draft tokens and is rewound. A mask depends
on the context alone, so target and drafter get the same mask and speculative decoding stays exact. Knows no engine and no API.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import copy
from decimal import Decimal
from time import perf_counter, thread_time
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from foresay.errors import ConfigError
from foresay.text.grammar_library import compiled, one_line, vocabulary

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
Source: TypeAlias = Mapping[str, Any] | str
"""A JSON schema, or a grammar in Lark's syntax, whose schemas were checked."""
MAX_BYTES, MAX_DEPTH = 1 << 16, 32
MAX_GRAMMAR_BYTES = 1 << 18
MAX_MULTIPLE = 10_000
"""The largest `multipleOf`, ignoring powers of ten: the library makes one automaton state for each remainder."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are not schemas."""
BURST_S, SHARE = 1.0, 0.2
"""Time for which the masks of a request may keep others waiting: at once, and per second."""
_MOST_KEPT, _POLL_S = 64, 0.01
_WORKERS = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "foresay-masks")
"""Threads that compute masks next to passes: the library releases the interpreter's lock."""
_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


class Grammar:
    """A JSON schema or grammar, compiled for a tokenizer. Call `mask_after` once per output; the result masks its logits."""

    def __init__(self, source: Source, tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> None:
        """Compile a schema or grammar.

        vocab_size: width of the scores. eos: token ids that end an output, allowed where the grammar may end. Time and memory
        are not bounded: use `schema_compiler.SchemaCompiler` for untrusted schemas. Raises ConfigError for a schema that is too
        large, that the library does not support or that matches no text, and if the library is not installed.
        """
        library_tokenizer = _library_tokenizer(tokenizer, vocab_size, tuple(sorted(eos)))
        self._source = checked(source)
        self._matcher = compiled(library_tokenizer, self._source, is_lark=isinstance(source, str))
        self._vocab_size, self._time = vocab_size, MaskTime()

    def mask_after(self, prompt_length: int) -> JsonMask:
        """Return the processor for one output. prompt_length: tokens of its prompt."""
        return JsonMask(self._matcher.deep_copy(), self._vocab_size, prompt_length, self._source, self._time)


class MaskTime:
    """Time for which the masks of a request, of all its outputs, may still keep others waiting."""

    def __init__(self, clock: Callable[[], float] = perf_counter, work: Callable[[], float] = thread_time) -> None:
        """work: processor time of the current thread."""
        self.clock, self.work = clock, work
        self._left, self._last = BURST_S, clock()

    @property
    def left(self) -> float:
        """Seconds that are left; 0 or less if there are none."""
        now = self.clock()
        self._left, self._last = min(BURST_S, self._left + SHARE * (now - self._last)), now
        return self._left

    def spend(self, seconds: float) -> None:
        """Count time for which others have waited."""
        self._left -= seconds


class JsonMask:
    """A LogitsProcessor that constrains the tokens after the prompt to a grammar."""

    def __init__(
        self, matcher: Any, vocab_size: int, prompt_length: int, source: str, time: MaskTime | None = None
    ) -> None:
        """matcher: a library matcher before its first token, not shared with another output. source: see ForcesTokens."""
        self._matcher, self._vocab_size, self._prompt_length = matcher, vocab_size, prompt_length
        self.source, self._consumed, self._time = source, list[int](), time or MaskTime()
        self._masks: dict[tuple[int, ...], bytes | str | None] = {}
        """Outputs -> the mask after them, None if the grammar does not accept them, or why it cannot continue."""
        self._job: Future[None] | None = None
        """Masks that are being computed: until they are, the matcher is not used."""
        self._spent = 0.0
        """Processor time that the library has taken since others last waited for it."""

    def begin(self, token_ids: Sequence[int], draft: Sequence[int]) -> None:
        """Begin to compute the masks after a row's tokens and after each draft token; see BeginsEarly."""
        if self._job is None or self._job.done():
            self._masks.clear()
            output = list(token_ids[self._prompt_length :])
            self._job = _WORKERS.submit(self._follow, output, list(draft))

    def _follow(self, output: list[int], draft: list[int]) -> None:
        for count in range(len(draft) + 1):
            if not isinstance(self._mask([*output, *draft[:count]]), bytes):
                return

    @contextmanager
    def _counted(self, least: float = 0.0) -> Iterator[bool]:
        """Wait for masks that are being computed, and count the time of the block. Yields False if at most `least` s are left.

        The request is charged for the work of its own masks alone, and only as far as others have waited for it.
        """
        begun, left = self._time.clock(), self._time.left
        while self._job is not None and left > self._spent:
            if wait([self._job], _POLL_S).done:
                self._job.result()
                self._job = None
        try:
            yield self._job is None and left > least
        finally:
            self._time.spend(min(self._spent, self._time.clock() - begun))
            self._spent = 0.0

    @contextmanager
    def _working(self) -> Iterator[None]:
        begun = self._time.work()
        yield
        self._spent += self._time.work() - begun

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask scores [1, V] after token_ids [1, L]. Unchanged if the tokens (draft tokens) violate the grammar."""
        with self._counted() as is_free:
            if not is_free:
                text = f"takes too long: others have waited more than {BURST_S:g} s for what it permits next; give a simpler one"
                raise ConfigError(text, param="schema or grammar")
            found = self._mask(token_ids[0, self._prompt_length :].tolist())
        if isinstance(found, str):
            raise ConfigError(f"can no longer be followed by the output: {found}", param="schema or grammar")
        if found is None:
            return scores
        bits = np.frombuffer(found, dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        mask = torch.from_numpy(allowed).to(scores.device)
        out = scores.clone()
        out[:, : len(mask)] = out[:, : len(mask)].masked_fill(~mask, -torch.inf)
        out[:, len(mask) :] = -torch.inf
        return out

    def forced_tokens(self, output: Sequence[int]) -> list[int] | None:
        """Return the tokens that the grammar leaves after an output's tokens; see ForcesTokens."""
        with (
            self._counted(BURST_S / 2) as is_free,
            self._working(),
        ):  # a draft is no reason for an error: masks have the rest
            if not is_free or not self._advance(list(output)) or self._matcher.is_error():
                return None
            return [int(token) for token in self._matcher.compute_ff_tokens()]

    def _mask(self, output: list[int]) -> bytes | str | None:
        """Return the mask after an output; see `_masks`. A matcher that stops at one of its own limits cannot continue."""
        key = tuple(output)
        if key not in self._masks:
            if len(self._masks) >= _MOST_KEPT:
                self._masks.clear()
            with self._working():
                found = bytes(self._matcher.compute_bitmask()) if self._advance(output) else None
            self._masks[key] = one_line(self._matcher.get_error()) if self._matcher.is_error() else found
        return self._masks[key]

    def _advance(self, output: list[int]) -> bool:
        """Move the matcher to the end of the output. Return True if the grammar accepts all of its tokens."""
        common = min(len(self._consumed), len(output))
        while self._consumed[:common] != output[:common]:  # only draft tokens, at the end, can differ
            common -= 1
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        accepted = self._matcher.try_consume_tokens(output[common:])
        self._consumed += output[common : common + accepted]
        return len(self._consumed) == len(output)


def checked(source: Source) -> str:
    """Return a schema as JSON text, or a grammar as it is.

    Raises ConfigError for a source that is too large, and for a schema that is too deep or has a `multipleOf` above MAX_MULTIPLE.
    """
    if isinstance(source, str):
        if len(source) > MAX_GRAMMAR_BYTES:
            problem = f"has {len(source)} bytes; at most {MAX_GRAMMAR_BYTES} bytes are allowed"
            raise ConfigError(problem, param="schema or grammar")
        return source
    schema = source
    text = json.dumps(schema)
    depth = _depth(schema)
    if len(text) > MAX_BYTES or depth > MAX_DEPTH:
        problem = (
            f"has {len(text)} bytes and depth {depth}; at most {MAX_BYTES} bytes and depth {MAX_DEPTH} are allowed"
        )
        raise ConfigError(problem, param="schema")
    for path, value in _multiples(schema):
        digits = Decimal(str(value)).normalize().as_tuple().digits  # 2 and 5 of 0.25, and of 2500
        if int("".join(map(str, digits)) or "0") > MAX_MULTIPLE:
            problem = f"has too many remainders; use at most {MAX_MULTIPLE}, times any power of ten"
            raise ConfigError(problem, param=f"schema {path}", value=value)
    return text


def tokenizer_json(tokenizer: Any) -> str:
    """Return the text of tokenizer.json, without padding and truncation. Raises ConfigError for a tokenizer written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = "cannot be used for structured output; use a fast tokenizer"
        raise ConfigError(text, param="tokenizer", value=type(tokenizer).__name__)
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _library_tokenizer(tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """Return the library's tokenizer, cached because it takes a second to build."""
    cached = _tokenizers.setdefault(tokenizer, {})
    if (vocab_size, eos) not in cached:
        cached[vocab_size, eos] = vocabulary(tokenizer_json(tokenizer), vocab_size, eos)
    return cached[vocab_size, eos]


def _multiples(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield (path, number) for each `multipleOf`; a property of that name has a schema instead of a number."""
    pending: list[tuple[tuple[Any, ...], Any]] = [((), schema)]
    while pending:
        path, node = pending.pop()
        children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
        for name, value in children:
            if name == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
                yield ".".join(map(str, (*path, name))), value
            elif name not in _DATA:
                pending.append(((*path, name), value))


def _depth(value: Any) -> int:
    """Count the levels of objects and lists, without recursion, because schemas come from clients."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        node, depth = pending.pop()
        deepest = max(deepest, depth)
        children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        pending += [(child, depth + 1) for child in children]
    return deepest
