"""The tokenizer of a GGUF file, as an object of transformers.

It is built of the file's own values by llama.cpp's rules and then compared with them; transformers' conversion drops or renames
tokens. Reads no weights and no configuration.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from foresay.errors import ModelLoadError
from foresay.json_files import parse_object, read_limited
from foresay.models.families import gemma
from foresay.models.families.stated import shortened
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.keys import check_keys
from foresay.models.gguf.pre_tokenizers import BYTES, PRE_TOKENIZERS, PreTokenizer
from foresay.models.gguf.values import TOKENS, invalid_value
from foresay.models.gguf.vocabulary import (
    MARKED,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_merges,
    read_scores,
    read_vocabulary,
)

logger = logging.getLogger("foresay")

_SPACE = "\u2581"
_SENTENCEPIECE = PreTokenizer((), add_bos=True, spaces_marked=True)
_PIECES = (NORMAL, USER_DEFINED, UNUSED)
"""Types of the tokens that merges of a SentencePiece vocabulary produce."""
_STRIPPED_AFTER = ("phi-3", "phi3")
"""Parts of the names of models whose marks take the white space after them, except those in _NOT_STRIPPED_AFTER."""
_NOT_STRIPPED_AFTER = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(header: GgufHeader) -> Any:
    """Return a transformers tokenizer in which token i is the file's token i.

    It is built of the file's own values. A chat template of a tokenizer_config.json in the file's folder is used if the file has
    none. Raises ModelLoadError for a kind of tokenizer or a value that is not supported, and as `check_tokenizer` does.
    """
    from transformers import PreTrainedTokenizerFast

    check_keys(header, ("tokenizer",))
    vocabulary = read_vocabulary(header)
    if vocabulary is None:
        raise ModelLoadError(f"{str(header.path)!r} has no tokenizer: it lacks {TOKENS}")
    rule = _rule(header, vocabulary)
    flags = {f"add_{role}_token": _is_added(header, vocabulary, role, rule) for role in ("bos", "eos")}
    backend = _backend(header, vocabulary, rule)
    _mark(backend, header, vocabulary)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {
        name: vocabulary.tokens[i]
        for name, role in roles.items()
        if (i := vocabulary.special.get(role)) is not None and vocabulary.types[i] in MARKED
    }  # a padding that is a normal token, such as "!", stays text
    tokenizer: Any = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend  # given as an argument it would be copied, which takes as long as all the rest
    tokenizer.__init__(**named, **flags, chat_template=_chat_template(header), clean_up_tokenization_spaces=False)
    check_tokenizer(tokenizer, vocabulary, str(header.path))
    return tokenizer


def check_tokenizer(tokenizer: Any, vocabulary: Vocabulary, name: str) -> None:
    """Raise ModelLoadError unless each token has the file's id and each marked one is encoded as it, and there are no others."""
    ids, found = vocabulary.ids, tokenizer.get_vocab()
    if found != ids:
        token = next(iter({**ids, **found}.keys() - {one for one, i in ids.items() if found.get(one) == i}))
        raise ModelLoadError(
            f"{name!r} cannot be used: its token {shortened(token)} has id {ids.get(token, 'none')}, "
            f"but {found.get(token, 'none')} in the tokenizer that is built of it"
        )
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in MARKED and (encoded := tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids) != [
            i
        ]:
            raise ModelLoadError(
                f"{name!r} cannot be used: its token {i}, {shortened(token)}, is encoded as {shortened(encoded)}"
            )


def _rule(header: GgufHeader, vocabulary: Vocabulary) -> PreTokenizer:
    """Return how texts are split. Raises ModelLoadError for an unknown kind of tokenizer or of splitting."""
    key = "tokenizer.ggml.pre"
    if vocabulary.model == "llama":
        return _SENTENCEPIECE
    if vocabulary.model not in ("gpt2", "gemma4"):
        raise invalid_value(header, "tokenizer.ggml.model", "one of gpt2, llama, gemma4; other kinds are not supported")
    name = "gemma4" if vocabulary.model == "gemma4" else str(header.values.get(key, "")) or None
    if name is None:
        logger.warning("%s does not state how it splits texts (%s); llama.cpp's default is used", header.path, key)
    rule = PRE_TOKENIZERS.get(name or "default")
    if rule is None:
        raise invalid_value(header, key, "one of llama.cpp's names, such as gpt-2, llama-bpe or qwen2")
    return rule


def _is_added(header: GgufHeader, vocabulary: Vocabulary, role: str, rule: PreTokenizer) -> bool:
    key = f"tokenizer.ggml.add_{role}_token"
    added = bool(header.values.get(key, rule.add_bos and role == "bos"))
    if added and vocabulary.types[vocabulary.special.get(role, 0)] not in MARKED:
        needed = f"tokenizer.ggml.{role}_token_id"
        if role not in vocabulary.special:
            raise invalid_value(header, needed, f"the id of the token that {key} adds")
        raise invalid_value(header, needed, "the id of a control token")
    return added


def _backend(header: GgufHeader, vocabulary: Vocabulary, rule: PreTokenizer) -> Tokenizer:
    """Return the tokenizer without marked tokens. Raises ModelLoadError if the file lacks merges or scores."""
    pieces = vocabulary.model == "llama"
    by_scores = pieces and ("tokenizer.ggml.scores" in header.lists or "tokenizer.ggml.merges" not in header.lists)
    merges = _merges_of_scores(header, vocabulary) if by_scores else read_merges(header)
    if merges is None:
        raise invalid_value(header, "tokenizer.ggml.merges", "a list of pairs of tokens, without which no text has ids")
    options: dict[str, Any] = {"ignore_merges": rule.ignore_merges}
    if rule.spaces_marked:
        options |= {"byte_fallback": True, "fuse_unk": True}
        if "unknown" in vocabulary.special:
            options["unk_token"] = vocabulary.tokens[vocabulary.special["unknown"]]
    for left, right in () if by_scores else merges:
        if not (left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids):
            raise ModelLoadError(
                f"{str(header.path)!r} cannot be read: it merges {shortened(left)} and {shortened(right)}, but these and "
                f"{shortened(left + right)} are not all among its tokens"
            )
    backend = Tokenizer(BPE(vocabulary.ids, merges, **options))
    if not rule.spaces_marked:
        backend.normalizer = normalizers.NFC() if rule.composes else None
        backend.pre_tokenizer = _splitter(rule)
        backend.decoder = decoders.ByteLevel()
        return backend
    prefix = pieces and bool(
        header.values.get("tokenizer.ggml.add_space_prefix", not header.architecture.startswith(gemma.PREFIX))
    )
    backend.normalizer = normalizers.Sequence(
        [*[normalizers.Prepend(_SPACE)] * prefix, normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *[decoders.Strip(" ", left=1, right=0)] * prefix,
        ]
    )
    return backend


def _splitter(rule: PreTokenizer) -> Any:
    steps = rule.patterns if BYTES in rule.patterns else (*rule.patterns, BYTES)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            if step == BYTES
            else pre_tokenizers.Split(Regex(step), "isolated")
            for step in steps
        ]
    )


def _merges_of_scores(header: GgufHeader, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every pair of tokens that join to a token, by the score of that token, the highest first; then by its id."""
    scores = read_scores(header)
    if not all(map(math.isfinite, scores)):
        raise invalid_value(header, "tokenizer.ggml.scores", "a list of finite numbers")
    pieces = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] in _PIECES}
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _mark(backend: Tokenizer, header: GgufHeader, vocabulary: Vocabulary) -> None:
    """Add the tokens that are one token wherever they stand. Those of the user remain in decoded texts."""
    strips = any(part in str(header.values.get("general.name", "")).lower() for part in _STRIPPED_AFTER)
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in MARKED:
            rstrip = strips and token not in _NOT_STRIPPED_AFTER
            added[kind != USER_DEFINED].append(AddedToken(token, normalized=False, rstrip=rstrip))
    backend.add_special_tokens(added[True])
    backend.add_tokens(added[False])


def _chat_template(header: GgufHeader) -> str | dict[str, str] | None:
    """Return the file's chat template, or those by name if it has several; else that of the tokenizer in its folder."""
    key = "tokenizer.chat_template"
    found = header.values.get(key)
    named = {
        name.removeprefix(f"{key}."): str(text) for name, text in header.values.items() if name.startswith(f"{key}.")
    }
    if found is not None and named:
        return {**named, "default": str(found)}
    path = header.path.parent / "tokenizer_config.json"
    if found is None and path.is_file():
        found = parse_object(read_limited(path), str(path)).get("chat_template")
    return found if isinstance(found, str) else None
