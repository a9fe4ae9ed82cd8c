"""Output that keeps to a grammar: a processor of logits that leaves only the tokens that may come next.

Owns how a grammar library's state follows a context that grows, is guessed and taken back. A mask depends on the context alone,
so that it is the same for the target and for whatever drafts, and speculation stays exact. Knows no engine and no API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from foresay.errors import ConfigError
from foresay.text.grammar_library import compiled, one_line, vocabulary

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
MAX_BYTES, MAX_DEPTH = 1 << 16, 32
MAX_MULTIPLE = 10_000
"""The largest `multipleOf`, powers of ten apart: the library makes a state of an automaton for each remainder."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


class JsonSchema:
    """A schema, compiled for a tokenizer. What keeps an output to it is made by `behind`, as often as outputs are wanted."""

    def __init__(self, schema: Mapping[str, Any], tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> None:
        """vocab_size: width of the scores. eos: what ends an output, allowed where the grammar may end.

        Nothing bounds the time and memory that this takes: for schemas from strangers see `grammar_trials.SchemaCompiler`.
        Raises ConfigError for a schema that is too large, that the library does not understand or that no text fits, and
        without the library.
        """
        text = checked(schema)
        self._matcher = compiled(_inner(tokenizer, vocab_size, tuple(sorted(eos))), text)
        self._vocab_size = vocab_size

    def behind(self, prompt_length: int) -> JsonMask:
        """For one output behind a prompt of so many tokens."""
        return JsonMask(self._matcher.deep_copy(), self._vocab_size, prompt_length)


class JsonMask:
    """Keeps one output to a schema. A LogitsProcessor: it counts what comes after the prompt."""

    def __init__(self, matcher: Any, vocab_size: int, prompt_length: int) -> None:
        """matcher: the library's, before its first token; nobody else's."""
        self._matcher, self._vocab_size, self._prompt_length = matcher, vocab_size, prompt_length
        self._consumed: list[int] = []

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """token_ids: [1, L]. scores: [1, V]. Behind tokens that break the grammar, as guesses may, nothing is changed."""
        if not self._follow(token_ids[0, self._prompt_length :].tolist()):
            self._check()
            return scores
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        self._check()
        mask = torch.from_numpy(allowed).to(scores.device)
        out = scores.clone()
        out[:, : len(mask)] = out[:, : len(mask)].masked_fill(~mask, -torch.inf)
        out[:, len(mask) :] = -torch.inf
        return out

    def _check(self) -> None:
        """A matcher that has given up, at a limit of its own, ends the output: nothing would hold it to the grammar."""
        if self._matcher.is_error():
            raise ConfigError(f"the schema cannot be followed further: {one_line(self._matcher.get_error())}")

    def _follow(self, written: list[int]) -> bool:
        """Bring the matcher behind these tokens; whether the grammar takes all of them."""
        common = min(len(self._consumed), len(written))
        while self._consumed[:common] != written[:common]:  # what differs are guesses, at the end
            common -= 1
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        taken = self._matcher.try_consume_tokens(written[common:])
        self._consumed += written[common : common + taken]
        return len(self._consumed) == len(written)


def checked(schema: Mapping[str, Any]) -> str:
    """A schema as text. Raises ConfigError for one that is too large or too deep, and for a `multipleOf` above MAX_MULTIPLE."""
    text = json.dumps(schema)
    depth = _depth(schema)
    if len(text) > MAX_BYTES or depth > MAX_DEPTH:
        raise ConfigError(f"the schema has {len(text)} bytes, {depth} deep; {MAX_BYTES} and {MAX_DEPTH} are taken")
    for path, value in _multiples(schema):
        if _digits(value) > MAX_MULTIPLE:
            raise ConfigError(
                f"the schema's {path}={value} has too many remainders; give at most {MAX_MULTIPLE}, times any power of ten"
            )
    return text


def tokenizer_json(tokenizer: Any) -> str:
    """A tokenizer as the text of a tokenizer.json, without padding and truncation. Raises ConfigError for one in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"this tokenizer ({type(tokenizer).__name__}) cannot be used for structured output: it needs a fast one"
        )
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _inner(tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """The library's own tokenizer, which takes a second to make."""
    made = _tokenizers.setdefault(tokenizer, {})
    if (vocab_size, eos) not in made:
        made[vocab_size, eos] = vocabulary(tokenizer_json(tokenizer), vocab_size, eos)
    return made[vocab_size, eos]


def _multiples(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Each number that a `multipleOf` gives, and where it stands; a property of that name has a schema instead."""
    open_: list[tuple[tuple[Any, ...], Any]] = [((), schema)]
    while open_:
        path, one = open_.pop()
        inside = one.items() if isinstance(one, Mapping) else enumerate(one) if isinstance(one, list) else ()
        for name, value in inside:
            if name == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
                yield ".".join(map(str, (*path, name))), value
            elif name not in _DATA:
                open_.append(((*path, name), value))


def _digits(number: float) -> int:
    """The significant digits of a number, as a whole number: 25 of 0.25 and of 2500."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)) or "0")


def _depth(value: Any) -> int:
    """Levels of objects and lists; counted without calls within calls, since clients write schemas."""
    deepest, open_ = 0, [(value, 1)]
    while open_:
        one, depth = open_.pop()
        deepest = max(deepest, depth)
        inside = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        open_ += [(child, depth + 1) for child in inside]
    return deepest
