"""Importers of outputs from other projects' logs: token ids alone, without the settings that generated them.

Owns the two foreign formats. Knows nothing about our own recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.json_files import parse_json, read_limited
from foresay.models.recording import MAX_VOCAB_SIZE, RecordedText

MAX_BYTES = 1 << 30
"""Size limit of a log."""
_BEGIN, _END = "tensor([[", "]]"


def read_tensor_log(name: str, prompts: Sequence[Sequence[int]] | None) -> list[RecordedText]:
    """Read a log of "Decoding Speculative Decoding" (Yan et al. 2024): printed tensors [1, L] of outputs, in prompt order.

    prompts: token ids, in the same order. Raises ConfigError without them, and for a malformed log.
    """
    if prompts is None:
        raise ConfigError(
            f"{name!r} is a log of tensors, which contains outputs alone; give the prompts that it was made from"
        )
    text = read_limited(name, MAX_BYTES).decode("utf-8", errors="replace")
    outputs = [_printed(inner, f"{name}, line {number}") for number, inner in _tensors(text)]
    if not outputs:
        raise ConfigError(f"{name!r} contains no outputs: no tensor([[...]])")
    if len(outputs) > len(prompts):
        raise ConfigError(
            f"{name!r} contains {len(outputs)} outputs for {len(prompts)} prompts; give at least as many prompts"
        )
    return [RecordedText(tuple(map(int, prompt)), output) for prompt, output in zip(prompts, outputs, strict=False)]


def _tensors(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text between the brackets) of each printed tensor, without an incomplete last one."""
    number, counted, end = 1, 0, 0
    while (begin := text.find(_BEGIN, end)) >= 0 and (end := text.find(_END, begin)) >= 0:
        number, counted = number + text.count("\n", counted, begin), begin
        yield number, text[begin + len(_BEGIN) : end]


def _printed(text: str, position: str) -> tuple[int, ...]:
    """Parse the token ids of one printed tensor. position: file and line, for error messages."""
    if "..." in text:
        raise ConfigError(
            f"{position}: the tensor was printed abbreviated ('...'), so tokens are missing; print it whole"
        )
    try:
        tokens = tuple(map(_token, filter(str.strip, text.split(","))))
    except ValueError as error:
        raise ConfigError(f"{position}: not a list of token ids ({error})") from None
    if not tokens:
        raise ConfigError(f"{position}: the output is empty")
    return tokens


def _token(text: str) -> int:
    return check_int("token", int(text), 0, MAX_VOCAB_SIZE - 1)


def read_cs_drafting_cache(name: str) -> list[RecordedText]:
    """Read a cache of CS-Drafting (Chen et al. 2023): prompt ids joined by "_" -> output ids joined by "_".

    The ids of a decoder-only target begin with the prompt. The ids of an encoder-decoder begin with its decoder start token, and
    the key is its encoder source. Raises ConfigError for a file that is not such a JSON object.
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
            raise ConfigError(f"{name}, entry {number}: must be token ids joined by '_' ({error})") from None
        has_prompt = whole[: len(prompt)] == prompt
        start, source = (prompt, None) if has_prompt else (whole[:1], prompt)
        if len(whole) <= len(start):
            raise ConfigError(f"{name}, entry {number}: the output is empty")
        texts.append(RecordedText(start, whole[len(start) :], source))
    if not texts:
        raise ConfigError(f"{name!r} contains no outputs")
    if len({text.source is None for text in texts}) > 1:
        raise ConfigError(f"{name!r} mixes outputs that begin with their prompts and outputs that do not")
    return texts
