"""The vocabulary of a GGUF file as stored: its tokens and their types, scores, merges, and special tokens by role.

Owns llama.cpp's rules for the tokens that end a text or a turn. Knows neither transformers' tokenizers nor how texts are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from foresay.errors import ModelLoadError
from foresay.models.families.stated import shortened
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import SUPPRESSED, TOKENS, invalid_value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of the format."""
MARKED = (UNKNOWN, CONTROL, USER_DEFINED)
"""Types that are one token wherever they stand in a text."""
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Special tokens of files that do not name them, by tokenizer model."""
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_NAMES = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> "
    "_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
_END_MARKS = frozenset(_END_NAMES.split())
"""Names of tokens that end a text, a turn, or a file of a completion, in every vocabulary that has them."""
_MARKUP = frozenset({"</s>"})
"""Names that are ordinary text in some vocabularies: they end a text only if they are not normal tokens."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A file's tokens by id."""

    model: str
    """Kind of tokenizer by llama.cpp's name, such as "gpt2"."""
    tokens: Sequence[str]
    ids: dict[str, int]
    """Id of each token."""
    types: Sequence[int]
    special: Mapping[str, int]
    """Ids by role, such as "bos" or "fim_pad"."""
    ends: tuple[int, ...]
    """Ids of the tokens that end a text or a turn; that of the role "eos" is the first."""


_READ = WeakKeyDictionary[GgufHeader, "Vocabulary | None"]()
"""Vocabularies that were read, for as long as their headers are used."""


def read_vocabulary(header: GgufHeader) -> Vocabulary | None:
    """Return the vocabulary, read once for each header; None if the file has none.

    Raises ModelLoadError for tokens that are not distinct UTF-8.
    """
    if header not in _READ:
        _READ[header] = _read(header)
    return _READ[header]


def _read(header: GgufHeader) -> Vocabulary | None:
    stored, model = header.lists.get(TOKENS), str(header.values.get("tokenizer.ggml.model", ""))
    if stored is None:
        return None
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_strings(header, TOKENS))]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        i, twice = next((i, token) for i, token in enumerate(tokens) if ids[token] != i)
        raise ModelLoadError(
            f"{str(header.path)!r} cannot be read: its tokens {i} and {ids[twice]} of {TOKENS} are both {shortened(twice)}"
        )
    kinds = header.lists.get("tokenizer.ggml.token_type")
    types = [NORMAL] * len(tokens) if kinds is None else [int(kind) for kind in kinds.numbers()]
    defaults = _DEFAULT_IDS.get(model, {})
    special = {role: i for role, i in defaults.items() if i < len(tokens) and (kinds is None or types[i] in MARKED)}
    prefix, suffix = "tokenizer.ggml.", "_token_id"
    for key, value in header.values.items():
        if key.startswith(prefix) and key.endswith(suffix):
            special[key.removeprefix(prefix).removesuffix(suffix)] = int(value)
    for role in ("eos", "eot", "eom") if kinds is not None else ("eos", "eot", "eom", "bos", "unknown"):
        if role in special and types[special[role]] not in MARKED:
            types[special[role]] = CONTROL  # it ends a text, so it is no part of one
    return Vocabulary(model, tokens, ids, types, special, _ends(ids, types, special))


def _ends(ids: Mapping[str, int], types: list[int], special: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids that end a text or a turn, and set the types of those that a converter left as normal tokens."""
    marks = {name for name in _END_MARKS & ids.keys() if name not in _MARKUP or types[ids[name]] != NORMAL}
    for name in marks:
        if types[ids[name]] not in MARKED:
            types[ids[name]] = CONTROL
    ends = dict.fromkeys(
        [*(special[role] for role in _END_ROLES if role in special), *sorted(ids[one] for one in marks)]
    )
    if marks & {"<|call|>", "<|calls|>"} and marks & {"<|return|>", "<|flush|>"}:
        ends.pop(ids.get("<|end|>", -1), None)  # it ends a part of a turn
    if "<|tool_response>" in marks:
        ends.pop(ids.get("</s>", -1), None)
    return tuple(ends)


def suppressed_tokens(header: GgufHeader) -> list[int]:
    """Return the ids of the tokens that are never generated."""
    stored = header.lists.get(SUPPRESSED)
    return [] if stored is None else [int(one) for one in stored.numbers()]


def read_merges(header: GgufHeader) -> list[tuple[str, str]] | None:
    """Return the pairs of tokens that are merged, the first ones first; None if the file has none."""
    key = "tokenizer.ggml.merges"
    if key not in header.lists:
        return None
    merges = []
    for merge in _strings(header, key):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelLoadError(
                f"{str(header.path)!r} cannot be read: {shortened(merge)} of {key} is not two tokens with a space between"
            )
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def read_scores(header: GgufHeader) -> list[float]:
    """Return the score of each token. Raises ModelLoadError if the file has none."""
    key = "tokenizer.ggml.scores"
    if key not in header.lists:
        raise invalid_value(header, key, "a list of numbers, one for each token")
    return [float(score) for score in header.lists[key].numbers()]


def _strings(header: GgufHeader, key: str) -> list[str]:
    try:
        return header.lists[key].strings()
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"{str(header.path)!r} cannot be read: a string of {key} is {shortened(error.object[:40])}, which is not UTF-8"
        ) from None
