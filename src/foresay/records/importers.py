"""Importers of outputs from other projects' logs: token ids alone, without the settings that generated them.

Owns the two foreign formats. Knows nothing about our own recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.json_files import Schema, read_limited
from foresay.models.recording import MAX_VOCAB_SIZE, RecordedText

MAX_BYTES = 1 << 30
"""Size limit of a log."""
_BEGIN, _END = "tensor([[", "]]"
_PAIRS: Schema[dict[str, str]] = Schema(dict[str, str], "an object of token ids joined by '_'")


def read_tensor_log(name: str, prompts: Sequence[Sequence[int]] | None) -> list[RecordedText]:
    """Read a log of "Decoding Speculative Decoding" (Yan et al. 2024): printed tensors [1, L] of outputs, in prompt order.

    prompts: token ids, in the same order. Raises ConfigError without them, and for a malformed log.
    """
    if prompts is None:
        raise ConfigError(
            f"{name!r} is a log of tensors, which contains outputs alone; give the prompts that it was made from"
        )
    outputs = list(_tensors(name))
    if not outputs:
        raise ConfigError(f"{name!r} contains no outputs: no tensor([[...]])")
    if len(outputs) > len(prompts):
        raise ConfigError(
            f"{name!r} contains {len(outputs)} outputs for {len(prompts)} prompts; give at least as many prompts"
        )
    return [RecordedText(tuple(map(int, prompt)), output) for prompt, output in zip(prompts, outputs, strict=False)]


def _tensors(name: str) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of each printed tensor, without an incomplete last one."""
    text = read_limited(name, MAX_BYTES).decode("utf-8", errors="replace")
    line, counted, end = 1, 0, 0
    while (begin := text.find(_BEGIN, end)) >= 0 and (end := text.find(_END, begin)) >= 0:
        line, counted = line + text.count("\n", counted, begin), begin
        inner, position = text[begin + len(_BEGIN) : end], f"{name}, line {line}"
        if "..." in inner:
            raise ConfigError(
                f"{position}: the tensor was printed abbreviated ('...'), so tokens are missing; print it whole"
            )
        yield _tokens(filter(str.strip, inner.split(",")), position, "not a list of token ids")


def _tokens(parts: Iterator[str] | list[str], position: str, problem: str) -> tuple[int, ...]:
    """Parse token ids. position: file and line, for errors."""
    try:
        tokens = tuple(check_int("token", int(part), 0, MAX_VOCAB_SIZE - 1) for part in parts)
    except ValueError as error:
        raise ConfigError(f"{position}: {problem} ({error})") from None
    if not tokens:
        raise ConfigError(f"{position}: the output is empty")
    return tokens


def read_cs_drafting_cache(name: str) -> list[RecordedText]:
    """Read a cache of CS-Drafting (Chen et al. 2023): prompt ids joined by "_" -> output ids joined by "_".

    The ids of a decoder-only target begin with the prompt. The ids of an encoder-decoder begin with its decoder start token, and
    the key is its encoder source. Raises ConfigError for a file that is not such a JSON object.
    """
    texts = []
    for number, pair in enumerate(_PAIRS.read(read_limited(name, MAX_BYTES), repr(name)).items(), 1):
        position = f"{name}, entry {number}"
        prompt, whole = (_tokens(ids.split("_"), position, "must be token ids joined by '_'") for ids in pair)
        has_prompt = whole[: len(prompt)] == prompt
        start, source = (prompt, None) if has_prompt else (whole[:1], prompt)
        if len(whole) <= len(start):
            raise ConfigError(f"{position}: the output is empty")
        texts.append(RecordedText(start, whole[len(start) :], source))
    if not texts:
        raise ConfigError(f"{name!r} contains no outputs")
    if len({text.source is None for text in texts}) > 1:
        raise ConfigError(f"{name!r} mixes outputs that begin with their prompts and outputs that do not")
    return texts
