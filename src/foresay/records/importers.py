"""Importers of outputs from other projects' logs: token ids alone, without anything on how they were generated.

Owns the two foreign formats. Knows nothing of our own recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.json_files import parse_json, read_limited
from foresay.models.recording import MAX_VOCAB_SIZE, RecordedText

MAX_BYTES = 1 << 30
"""The largest log that is read."""
_BEGIN, _END = "tensor([[", "]]"


def read_tensor_log(name: str, prompts: Sequence[Sequence[int]] | None) -> list[RecordedText]:
    """The log of "Decoding Speculative Decoding" (Yan et al. 2024): printed tensors [1, L] of outputs, in prompt order.

    prompts: token ids, in the same order. Raises ConfigError without them, and for a log that cannot be read as such.
    """
    if prompts is None:
        raise ConfigError(f"{name!r} is a log of tensors, which holds outputs alone; give the prompts it was made from")
    text = read_limited(name, MAX_BYTES).decode("utf-8", errors="replace")
    outputs = [_printed(inner, f"{name}, line {number}") for number, inner in _tensors(text)]
    if not outputs:
        raise ConfigError(f"{name!r} holds no outputs: no tensor([[...]])")
    if len(outputs) > len(prompts):
        raise ConfigError(f"{name!r} holds {len(outputs)} outputs, and there are {len(prompts)} prompts")
    return [RecordedText(tuple(map(int, prompt)), output) for prompt, output in zip(prompts, outputs, strict=False)]


def _tensors(text: str) -> Iterator[tuple[int, str]]:
    """(line number, text between the brackets) of each printed tensor; a last one without its end is left out."""
    number, counted, end = 1, 0, 0
    while (begin := text.find(_BEGIN, end)) >= 0 and (end := text.find(_END, begin)) >= 0:
        number, counted = number + text.count("\n", counted, begin), begin
        yield number, text[begin + len(_BEGIN) : end]


def _printed(text: str, place: str) -> tuple[int, ...]:
    """The token ids of one printed tensor. place: file and line, for errors."""
    if "..." in text:
        raise ConfigError(f"{place}: the tensor was printed shortened ('...'); its tokens are lost")
    try:
        tokens = tuple(map(_token, filter(str.strip, text.split(","))))
    except ValueError as error:
        raise ConfigError(f"{place}: not a list of token ids ({error})") from None
    if not tokens:
        raise ConfigError(f"{place}: the output is empty")
    return tokens


def _token(text: str) -> int:
    return check_int("token", int(text), 0, MAX_VOCAB_SIZE - 1)


def read_cs_drafting_cache(name: str) -> list[RecordedText]:
    """CS-Drafting's cache (Chen et al. 2023): prompt ids joined by "_" -> ids joined by "_".

    A decoder-only target's ids begin with the prompt; an encoder-decoder's begin with its decoder start token, and the key is
    its encoder source. Raises ConfigError for a file that is not such a JSON object.
    """
    pairs = parse_json(read_limited(name, MAX_BYTES), name)
    if not isinstance(pairs, dict):
        raise ConfigError(f"{name!r} must be a JSON object of token ids joined by '_'")
    texts = []
    for number, (key, value) in enumerate(pairs.items(), 1):
        try:
            pair = (str(ids).split("_") for ids in (key, value))
            prompt, whole = (tuple(map(_token, ids)) for ids in pair)
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
