"""The tokenizer protocols, and the comparison of two tokenizers' vocabularies.

Owns the protocols, the fingerprint and the check of a draft model's vocabulary. Encodes no prompts and decodes no output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from foresay.errors import VocabularyMismatchError

_SAMPLE = "def add(a, b):\n\treturn a + b  # 12 345.678\nIt's 9 o'clock — naïve café, 東京! <|im_start|> [INST] </s>"


class Encoded(Protocol):
    """A text's token ids."""

    input_ids: list[int]


class Tokenizer(Protocol):
    """The methods of a tokenizer that foresay uses; every transformers tokenizer has them."""

    def __call__(self, text: str) -> Encoded:
        """Return a text's ids, with the special tokens that the tokenizer is configured to add."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of the ids."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return the mapping of tokens to ids."""
        ...


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return the sha256 of the (token, id) pairs in hexadecimal: equal if ids mean the same, whatever the implementation."""
    pairs = sorted((str(token), int(i)) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode("ascii")).hexdigest()


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Return the bytes of a token, which may be incomplete UTF-8: a byte-level tokenizer names each byte by a character."""
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    name = str(tokenizer.convert_ids_to_tokens(token_id))
    if _REPLACEMENT not in text:  # a decoder may strip the leading space of a single token
        stripped = name.startswith(_SPACE_MARK) and not text.startswith(" ")
        return (" " * stripped + text).encode("utf-8", "replace")
    if len(name) == 6 and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    if all(character in NAMED_BYTES for character in name):
        return bytes(NAMED_BYTES[character] for character in name)
    return text.encode("utf-8", "replace")


def _named_bytes() -> dict[str, int]:
    """Map characters to bytes in byte-level token names: printable bytes name themselves, the others use characters from 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_REPLACEMENT, _SPACE_MARK = "\ufffd", "\u2581"
NAMED_BYTES = _named_bytes()
"""Characters of byte-level token names -> bytes."""


def check_usable(tokenizer: Tokenizer) -> None:
    """Encode and decode a sample text, so that a tokenizer with inconsistent files fails when loaded. Raises any exception."""
    ids = tokenizer(_SAMPLE).input_ids
    tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def tokenizer_size(tokenizer: Tokenizer) -> int:
    """Return the highest token id plus one. Ids may have gaps, and the tokenizer's own length counts names."""
    return int(max(tokenizer.get_vocab().values())) + 1


def own_size(tokenizer: Tokenizer) -> int:
    """Return the vocabulary size without added tokens."""
    size = getattr(tokenizer, "vocab_size", None)
    return min(size, tokenizer_size(tokenizer)) if isinstance(size, int) else tokenizer_size(tokenizer)


def check_vocabularies(target: Tokenizer | None, draft: Tokenizer | None, names: tuple[str, str]) -> None:
    """Raise VocabularyMismatchError if an id or a text means different tokens to target and draft.

    Embeddings may be padded to different sizes; the ids that both tokenizers name must agree. names: target and draft, for the
    error message. Nothing is checked if a tokenizer is missing.
    """
    if target is None or draft is None:
        return
    target_tokens = {i: token for token, i in target.get_vocab().items()}
    draft_tokens = {i: token for token, i in draft.get_vocab().items()}
    advice = "a draft must share the target's tokenizer"
    for i in sorted(target_tokens.keys() & draft_tokens.keys()):
        if target_tokens[i] != draft_tokens[i]:
            raise VocabularyMismatchError(
                f"token {i} is {target_tokens[i]!r} to the target {names[0]!r} and {draft_tokens[i]!r} "
                f"to the draft {names[1]!r}; {advice}"
            )
    common = len(target_tokens.keys() & draft_tokens.keys())
    if common < 0.9 * max(len(target_tokens), len(draft_tokens)):
        raise VocabularyMismatchError(
            f"the target {names[0]!r} names {len(target_tokens)} tokens, the draft {names[1]!r} {len(draft_tokens)}; {advice}"
        )
    a, b = target(_SAMPLE).input_ids, draft(_SAMPLE).input_ids
    if a != b:
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        raise VocabularyMismatchError(
            f"the tokenizers of {names[0]!r} and {names[1]!r} split the same text differently from token {first} on "
            f"({a[first : first + 3]} and {b[first : first + 3]}); {advice}"
        )
