"""Recordings: a target's output to each prompt, in one file of JSON lines (docs/lab.md describes it).

Owns the format and the fields of its header. Runs no model; other projects' logs are read in importers.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foresay.checks import check_int
from foresay.decoding.outcome import FinishReason
from foresay.errors import ConfigError
from foresay.models.recording import RecordedText
from foresay.records.importers import read_cs_drafting_cache, read_tensor_log
from foresay.records.lines import Line, LineWriter, read_lines

FORMAT, VERSION = "foresay-recording", 1


@dataclass(frozen=True, slots=True)
class Record:
    """The output to one prompt."""

    id: str
    prompt: tuple[int, ...]
    """The token ids that the output continues; of an encoder-decoder its decoder start tokens."""
    output: tuple[int, ...]
    finish_reason: str = "length"
    category: str = ""
    source: tuple[int, ...] | None = None
    """The encoder source of an encoder-decoder."""
    seed: int | None = None
    token_probs: tuple[float, ...] | None = None
    """The probability of each token under the law it was drawn from; of sampled outputs."""
    logprobs: tuple[float, ...] | None = None
    """Log-probabilities of the tokens under the raw logits."""
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """(token, log-probability) of the likeliest tokens at each position of the output."""

    def as_line(self) -> Line:
        """The line for the file; fields that are None or empty are left out."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None and value != ""}

    @property
    def text(self) -> RecordedText:
        """The tokens, for a RecordingModel."""
        return RecordedText(self.prompt, self.output, self.source)


@dataclass(frozen=True, slots=True)
class Recording:
    """A target's outputs, and how they were generated as far as known. Raises ConfigError without any output."""

    records: tuple[Record, ...]
    vocab_size: int
    eos: frozenset[int] = frozenset()
    model: str = ""
    tokenizer: str | None = None
    """The tokenizer's fingerprint, where there was one."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that were not at their defaults."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Digest of the prompts, chat template, seed, dtype and context length; for an imported log its kind."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.records:
            raise ConfigError("the recording holds no outputs yet")

    @property
    def greedy(self) -> bool:
        """Whether the outputs were decoded at temperature 0, so that a replay is exact."""
        return not self.params.get("temperature", 0.0)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(record.output) for record in self.records)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, prompts: Sequence[Sequence[int]] | None = None) -> Recording:
        """Read a recording of ours, a log of `tensor([[...]])` lines, or CS-Drafting's cache (a JSON object).

        prompts: token ids, in order, for a log of tensors, which holds outputs alone. Raises ConfigError, with the line, for a
        file that cannot be read, is none of the three or holds no outputs, and for prompts that are missing or not needed.
        """
        name = os.fspath(path)
        try:
            with open(path, "rb") as file:
                head = file.read(4096).lstrip()
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}") from None
        if head.startswith(b"tensor("):
            return _imported(name, read_tensor_log(name, prompts), "tensor log")
        if prompts is not None:
            raise ConfigError(f"{name!r} holds its own prompts; prompts belong to a log of tensors")
        if b'"format"' in head.split(b"\n", 1)[0]:
            return _read_ours(name)
        if head.startswith(b"{"):
            return _imported(name, read_cs_drafting_cache(name), "CS-Drafting cache")
        raise ConfigError(
            f"{name!r} is no recording: neither {FORMAT} (foresay record), nor lines of tensor([[...]]), nor a JSON object "
            "of token ids joined by '_'"
        )


def recording_writer(path: str | os.PathLike[str], header: Mapping[str, Any]) -> LineWriter:
    """A recording to append to.

    header: model, vocab_size, eos, tokenizer, params, settings and provenance. Raises ConfigError as LineWriter does: for a file
    that was begun with another header, and while another process writes it.
    """
    return LineWriter(path, FORMAT, VERSION, header)


def read_record(line: Mapping[str, Any], vocab_size: int) -> Record:
    """The Record of one line of a file.

    Raises ConfigError for unknown or missing fields and for ids outside the vocabulary, ValueError or TypeError for fields of
    another type.
    """
    values = dict(line)
    unknown = set(values) - set(Record.__slots__)
    if unknown or "id" not in values:
        raise ConfigError(f"unknown field {min(unknown)!r}" if unknown else "no id")
    for name in ("prompt", "output", *(["source"] if values.get("source") is not None else [])):
        values[name] = _token_ids(name, values.get(name), vocab_size)
    FinishReason(values.get("finish_reason", "length"))
    for name in ("token_probs", "logprobs"):
        if values.get(name) is not None:
            values[name] = tuple(float(x) for x in values[name])
            if len(values[name]) != len(values["output"]):
                raise ConfigError(f"{len(values[name])} values of {name} for {len(values['output'])} tokens")
    if values.get("top") is not None:
        values["top"] = tuple(tuple((int(i), float(x)) for i, x in place) for place in values["top"])
    return Record(**values)


def _token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(check_int(f"token of {name}", token, 0, vocab_size - 1) for token in value)


def _read_ours(name: str) -> Recording:
    header, lines = read_lines(name, FORMAT, VERSION)
    try:
        vocab_size = check_int("vocab_size", header.get("vocab_size"), 1)
        eos = frozenset(check_int("token of eos", token, 0) for token in header.get("eos", ()))
        for part in ("params", "settings", "provenance"):
            if not isinstance(header.get(part, {}), dict):
                raise ConfigError(f"{part}={header[part]!r} must be an object")
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{name}, line 1: {error}") from None
    records: dict[str, Record] = {}
    for number, line in lines:
        try:
            record = read_record(line, vocab_size)
            if record.id in records:
                raise ConfigError(f"id={record.id!r} is there twice")
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        records[record.id] = record
    return Recording(
        tuple(records.values()),
        vocab_size,
        eos,
        header.get("model", ""),
        header.get("tokenizer"),
        header.get("params", {}),
        header.get("settings", {}),
        header.get("provenance", {}),
    )


def _imported(name: str, texts: Sequence[RecordedText], read_from: str) -> Recording:
    """A Recording from another project's log; its vocab_size is the highest token id plus one."""
    records = []
    for number, text in enumerate(texts, 1):
        source = None if text.source is None else tuple(text.source)
        records.append(Record(str(number), tuple(text.prompt), tuple(text.output), source=source))
    highest = max(max(*text.prompt, *text.output, *(text.source or ())) for text in texts)
    return Recording(tuple(records), 1 + highest, model=name, settings={"read_from": read_from})
