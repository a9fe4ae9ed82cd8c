"""Importers of outputs from other projects' logs: token ids alone, without anything on how they were generated.

Owns the two foreign formats. Knows nothing of our own recordings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.models.recording import RecordedText

_TENSOR = re.compile(r"tensor\(\[\[(.*?)\]\]", re.DOTALL)


def read_tensor_log(name: str, prompts: Sequence[Sequence[int]] | None) -> list[RecordedText]:
    """The log of "Decoding Speculative Decoding" (Yan et al. 2024): printed tensors [1, L] of outputs, in prompt order.

    prompts: token ids, in the same order. Raises ConfigError without them, and for a log that cannot be read as such.
    """
    if prompts is None:
        raise ConfigError(f"{name!r} is a log of tensors, which holds outputs alone; give the prompts it was made from")
    text = Path(name).read_text(encoding="utf-8", errors="replace")
    outputs = []
    for found in _TENSOR.finditer(text):
        number = text.count("\n", 0, found.start()) + 1
        outputs.append(_printed(found[1], f"{name}, line {number}"))
    if not outputs:
        raise ConfigError(f"{name!r} holds no outputs: no tensor([[...]])")
    if len(outputs) > len(prompts):
        raise ConfigError(f"{name!r} holds {len(outputs)} outputs, and there are {len(prompts)} prompts")
    return [RecordedText(tuple(map(int, prompt)), output) for prompt, output in zip(prompts, outputs, strict=False)]


def _printed(text: str, place: str) -> tuple[int, ...]:
    """The token ids of one printed tensor. place: file and line, for errors."""
    if "..." in text:
        raise ConfigError(f"{place}: the tensor was printed shortened ('...'); its tokens are lost")
    try:
        tokens = tuple(check_int("token", int(token), 0) for token in text.split(",") if token.strip())
    except ValueError as error:
        raise ConfigError(f"{place}: not a list of token ids ({error})") from None
    if not tokens:
        raise ConfigError(f"{place}: the output is empty")
    return tokens


def read_cs_drafting_cache(name: str) -> list[RecordedText]:
    """CS-Drafting's cache (Chen et al. 2023): prompt ids joined by "_" -> ids joined by "_".

    A decoder-only target's ids begin with the prompt; an encoder-decoder's begin with its decoder start token, and the key is
    its encoder source. Raises ConfigError for a file that is not such a JSON object.
    """
    try:
        with open(name, encoding="utf-8") as file:
            pairs = json.load(file)
    except ValueError as error:
        raise ConfigError(f"{name!r} is not JSON ({error})") from None
    if not isinstance(pairs, dict):
        raise ConfigError(f"{name!r} must be a JSON object of token ids joined by '_'")
    texts = []
    for number, (key, value) in enumerate(pairs.items(), 1):
        try:
            pair = (str(ids).split("_") for ids in (key, value))
            prompt, whole = (tuple(check_int("token", int(token), 0) for token in ids) for ids in pair)
        except ValueError as error:
            raise ConfigError(f"{name}, entry {number}: token ids joined by '_' are needed ({error})") from None
        own = whole[: len(prompt)] == prompt
        start, source = (prompt, None) if own else (whole[:1], prompt)
        if len(whole) <= len(start):
            raise ConfigError(f"{name}, entry {number}: the output is empty")
        texts.append(RecordedText(start, whole[len(start) :], source))
    if not texts:
        raise ConfigError(f"{name!r} holds no outputs")
    if len({text.source is None for text in texts}) > 1:
        raise ConfigError(f"{name!r} mixes outputs that begin with their prompts and such that do not")
    return texts
