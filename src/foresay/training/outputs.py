"""What drafts are trained on: texts of the target, each with the place where its own words begin.

Owns reading recordings and plain text into token ids, which of them are held out, and which tokens are frequent. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from foresay.decoding.rows import IntArray
from foresay.errors import ConfigError
from foresay.records.recording import Recording


@dataclass(frozen=True, slots=True)
class Text:
    """tokens: [S] int64. start: the first token that the target wrote, or that counts; what lies before is read only."""

    tokens: IntArray
    start: int
    greedy: bool = False
    """Whether each of its own tokens is the target's likeliest."""

    @property
    def size(self) -> int:
        """Tokens that count."""
        return len(self.tokens) - self.start


def read_outputs(path: str, vocab_size: int, tokenizer: str | None, length: int) -> list[Text]:
    """The texts of a recording, of at most `length` tokens each: long prompts lose their beginning, long outputs their end.

    tokenizer: the fingerprint of the target's. Raises ConfigError for a recording of another vocabulary or tokenizer.
    """
    recording = Recording.load(path)
    if recording.vocab_size > vocab_size:
        raise ConfigError(f"{path!r} was recorded with {recording.vocab_size} tokens, and the target has {vocab_size}")
    if None not in (recording.tokenizer, tokenizer) and recording.tokenizer != tokenizer:
        raise ConfigError(f"{path!r} was recorded with another tokenizer than the target's")
    out = []
    for record in recording.records:
        if record.source is not None:
            raise ConfigError(f"{path!r} was recorded with an encoder-decoder, for which no draft is trained here")
        prompt = record.prompt[-max(1, length - len(record.output)) :]
        tokens = np.array([*prompt, *record.output][:length], dtype=np.int64)
        if len(tokens) > len(prompt):
            out.append(Text(tokens, len(prompt), recording.greedy))
    return out


def texts_of(token_ids: Iterable[Sequence[int]], length: int) -> list[Text]:
    """Documents as texts of `length` tokens, all of which count but the first."""
    out = []
    for document in token_ids:
        for start in range(0, len(document), length):
            piece = np.array(document[start : start + length], dtype=np.int64)
            if len(piece) > 1:
                out.append(Text(piece, 1))
    return out


def split(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """(to learn from, to evaluate on): a text is held out or not whatever else there is, by what it holds.

    So a draft that is trained on, with more texts or another seed, is evaluated on none that it has learned. At least one text is
    on either side. Raises ConfigError for fewer than two different ones.
    """
    keyed = {sha256(b"0" + text.tokens.tobytes()).digest(): text for text in texts}
    if len(keyed) < 2:
        raise ConfigError("there are fewer than two different texts; record more outputs")
    order = sorted(keyed)
    below = sum(int.from_bytes(key[:8], "big") < share * 2**64 for key in order)
    count = min(max(1, below), len(order) - 1)
    return [keyed[key] for key in order[count:]], [keyed[key] for key in order[:count]]


def digest(texts: Iterable[Text]) -> str:
    """What tells texts apart from others."""
    said = sha256()
    for text in texts:
        said.update(text.start.to_bytes(4, "little") + text.tokens.tobytes())
    return said.hexdigest()[:16]


def frequent_tokens(texts: Sequence[Text], size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The `size` tokens that the target wrote most often, ascending [size] int64; `always` are among them.

    Where it wrote fewer, tokens that it read and then the first ids fill up.
    """
    order = dict.fromkeys(int(one) for one in always)
    for parts in ([text.tokens[text.start :] for text in texts], [text.tokens[: text.start] for text in texts]):
        counts = np.bincount(np.concatenate(parts))
        order |= dict.fromkeys(int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0)
    order |= dict.fromkeys(range(size))
    return torch.tensor(sorted(list(order)[:size]), dtype=torch.int64)
