"""Training texts: outputs of the target, each with the index at which the generated tokens start.

Owns the conversion of recordings and plain text to token ids, the held-out split and token frequencies. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from foresay.decoding.rows import IntArray
from foresay.drafters.memory.memory import Memory
from foresay.errors import ConfigError
from foresay.records.recording import Recording


@dataclass(frozen=True, slots=True)
class Text:
    """tokens: [S] int64. start: index of the first token that is trained on (generated ones); earlier tokens are context."""

    tokens: IntArray
    start: int

    @property
    def size(self) -> int:
        """Number of tokens that are trained on."""
        return len(self.tokens) - self.start


def read_outputs(path: str, vocab_size: int, tokenizer: str | None, length: int) -> list[Text]:
    """Return the texts of a recording, or of the folder in which a server keeps texts, of at most `length` tokens each.

    Long prompts of a recording lose their start, long outputs their end. tokenizer: fingerprint of the target's. Raises
    ConfigError for texts of another vocabulary or tokenizer.
    """
    if Path(path).is_dir():
        return _kept(Path(path), vocab_size, tokenizer, length)
    recording = Recording.load(path)
    if recording.vocab_size > vocab_size:
        text = f"was recorded with {recording.vocab_size} tokens, and the target has {vocab_size}"
        raise ConfigError(text, param="path", value=path)
    if None not in (recording.tokenizer, tokenizer) and recording.tokenizer != tokenizer:
        raise ConfigError("was recorded with a tokenizer that differs from the target's", param="path", value=path)
    out = []
    for record in recording.records:
        if record.source is not None:
            text = "was recorded with an encoder-decoder; drafts are trained for decoder-only models"
            raise ConfigError(text, param="path", value=path)
        prompt = record.prompt[-max(1, length - len(record.output)) :]
        tokens = np.array([*prompt, *record.output][:length], dtype=np.int64)
        if len(tokens) > len(prompt):
            out.append(Text(tokens, len(prompt)))
    return out


def _kept(folder: Path, vocab_size: int, tokenizer: str | None, length: int) -> list[Text]:
    """Return the texts of all owners of a memory; see `read_outputs`."""
    memory = Memory(folder, fingerprint=tokenizer or f"{vocab_size} tokens", reads_only=True)
    try:
        texts = [one.astype(np.int64) for owned in memory.owners().values() for one in owned]
    finally:
        memory.close()
    if any(int(one.max(initial=0)) >= vocab_size for one in texts):
        raise ConfigError(f"has tokens outside the target's vocabulary of {vocab_size}", param="folder", value=folder)
    return texts_of(texts, length)


def texts_of(token_ids: Iterable[Sequence[int] | IntArray], length: int) -> list[Text]:
    """Split documents into texts of `length` tokens, which are trained on from the second token."""
    out = []
    for document in token_ids:
        for start in range(0, len(document), length):
            piece = np.array(document[start : start + length], dtype=np.int64)
            if len(piece) > 1:
                out.append(Text(piece, 1))
    return out


def split(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """Return (training, held out). A hash of its tokens determines whether a text is held out, independent of other texts.

    A draft that is trained further, with more texts or another seed, is therefore never evaluated on a text that it was trained
    on. Each side has at least one text. Raises ConfigError for fewer than two different texts.
    """
    keyed = {sha256(b"0" + text.tokens.tobytes()).digest(): text for text in texts}
    if len(keyed) < 2:
        raise ConfigError("have fewer than two different texts; record more", param="outputs")
    order = sorted(keyed)
    num_below = sum(int.from_bytes(key[:8], "big") < share * 2**64 for key in order)
    count = min(max(1, num_below), len(order) - 1)
    return [keyed[key] for key in order[count:]], [keyed[key] for key in order[:count]]


def digest(texts: Iterable[Text]) -> str:
    """Return an identifier of the texts."""
    hasher = sha256()
    for text in texts:
        hasher.update(text.start.to_bytes(4, "little") + text.tokens.tobytes())
    return hasher.hexdigest()[:16]


def coverage(texts: Sequence[Text], token_ids: torch.Tensor) -> float:
    """Return the share of the tokens that the target generated that are among `token_ids`, [K] int64."""
    generated = np.concatenate([text.tokens[text.start :] for text in texts])
    return float(np.isin(generated, token_ids.numpy()).mean())


def frequent_tokens(texts: Sequence[Text], size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """Return the `size` tokens that the target generated most often, ascending [size] int64, including `always`.

    If it generated fewer, the most frequent context tokens and then the first ids are added.
    """
    order = dict.fromkeys(int(token) for token in always)
    for parts in ([text.tokens[text.start :] for text in texts], [text.tokens[: text.start] for text in texts]):
        counts = np.bincount(np.concatenate(parts))
        order |= dict.fromkeys(int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0)
    order |= dict.fromkeys(range(size))
    return torch.tensor(sorted(list(order)[:size]), dtype=torch.int64)
