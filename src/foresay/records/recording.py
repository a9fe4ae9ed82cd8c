"""Recordings: a target's output for each prompt, in one file of JSON lines (described in docs/reference/file-formats.md).

Owns the format and the fields of its header. Runs no model; importers.py reads the logs of other projects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from foresay.decoding.outcome import FinishReason
from foresay.decoding.sampling_params import MAX_SEED, SamplingParams
from foresay.errors import ConfigError
from foresay.files import unreadable
from foresay.json_files import Schema
from foresay.models.recording import MAX_VOCAB_SIZE, RecordedText
from foresay.records.document import Stored
from foresay.records.importers import read_cs_drafting_cache, read_tensor_log
from foresay.records.lines import Line, LineWriter, read_lines

FORMAT, VERSION = "foresay-recording", 1

TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]


def _finish_reason(value: str) -> str:
    return FinishReason(value).value


@dataclass(frozen=True, slots=True)
class Record(Stored):
    """The output for one prompt."""

    id: str
    prompt: TokenIds
    """Token ids that the output continues; for an encoder-decoder, its decoder start tokens."""
    output: TokenIds
    finish_reason: Annotated[str, AfterValidator(_finish_reason)] = "length"
    category: str = ""
    index: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Index of the prompt in the data set. Lines are written as outputs end and sorted by this index when read."""
    source: TokenIds | None = None
    """Token ids of an encoder-decoder's encoder source."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    token_probs: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = None
    """For sampled outputs: the probability of each token under the distribution that it was drawn from."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each token under the raw logits."""
    top: tuple[tuple[tuple[TokenId, float], ...], ...] | None = None
    """(token, log-probability) of the most probable tokens at each output position."""

    def as_line(self) -> Line:
        """Return the line for the file, without fields that are None or empty."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None and value != ""}

    @property
    def text(self) -> RecordedText:
        """The tokens in the form that a RecordingModel takes."""
        return RecordedText(self.prompt, self.output, self.source)


@dataclass(frozen=True, slots=True)
class Recording:
    """The outputs of a target and the known settings that generated them. Raises ConfigError if there are no outputs."""

    records: tuple[Record, ...]
    """In prompt order, with the turns of a conversation together; without an index (older files), in order of completion."""
    vocab_size: int
    eos: frozenset[int] = frozenset()
    model: str = ""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer, if there was one."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that differ from their defaults."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Digest of the prompts, chat template, seed, dtype and context length. For an imported log: its kind, and a warning if its
    prompts may not match its outputs."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.records:
            raise ConfigError("contains no outputs yet", param="recording")

    @property
    def greedy(self) -> bool:
        """True if the outputs were decoded at temperature 0, so that a replay is exact."""
        return not self.params.get("temperature", 0.0)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(record.output) for record in self.records)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, prompts: Sequence[Sequence[int]] | None = None) -> Recording:
        """Read a foresay recording, a log of `tensor([[...]])` lines, or a cache of CS-Drafting (a JSON object).

        prompts: token ids, in order, for a log of tensors, which contains outputs alone. Raises ConfigError, with the line, for a
        file that cannot be read, has none of the three formats or contains no outputs, and for missing or unneeded prompts.
        """
        name = os.fspath(path)
        try:
            with open(path, "rb") as file:
                head = file.read(4096).lstrip()
        except OSError as error:
            raise unreadable(path, error) from None
        if head.startswith(b"tensor("):
            return _imported(name, read_tensor_log(name, prompts), "tensor log")
        if prompts is not None:
            raise ConfigError("has its own prompts; give prompts for a log of tensors only", param="path", value=path)
        if b'"format"' in head.split(b"\n", 1)[0]:
            return _read_foresay(name)
        if head.startswith(b"{"):
            try:
                return _imported(name, read_cs_drafting_cache(name), "CS-Drafting cache")
            except ConfigError as error:
                raise ConfigError(f"{_OTHER_FILE} ({error})", param="path", value=path) from None
        raise ConfigError(_OTHER_FILE, param="path", value=path)


_OTHER_FILE = (
    f"is not a recording: neither {FORMAT} (foresay record), nor lines of tensor([[...]]), nor a JSON object of token ids "
    "joined by '_'"
)


def recording_writer(path: str | os.PathLike[str], header: Mapping[str, Any]) -> LineWriter:
    """Open a recording for appending.

    header: model, vocab_size, eos, tokenizer, params, settings and provenance. Raises ConfigError as LineWriter does: for a file
    that was started with a different header, and while another process writes it.
    """
    return LineWriter(path, FORMAT, VERSION, header, _RECORD)


def read_params(values: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Return the sampling parameters of a header with some of them changed. Raises ConfigError for an invalid name or value."""
    if "processors" in values:
        text = "cannot be stored in a recording; record without them"
        raise ConfigError(text, param="processors", value=values["processors"])
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if isinstance(bias := values.get("logit_bias", ()), tuple):
        if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in bias):
            raise ConfigError("must be pairs of a token id and a number", param="logit_bias", value=bias)
        values["logit_bias"] = dict(bias)
    elif isinstance(bias, dict):
        values["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    return SamplingParams.of(**values | changes)


class _Header(BaseModel):
    """The first line of a recording. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    eos: frozenset[TokenId] = frozenset()
    model: str = ""
    tokenizer: str | None = None
    params: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


_HEADER: Schema[_Header] = Schema(_Header, "a header of a recording")
_RECORD: Schema[Record] = Schema(Record, "an output")


def _check_record(record: Record, vocab_size: int) -> None:
    """Raise ConfigError for ids outside the vocabulary and for fields without exactly one value per token."""
    for name in ("prompt", "output", "source"):
        if (highest := max(getattr(record, name) or (0,))) >= vocab_size:
            raise ConfigError(f": token {highest} must be in [0, {vocab_size - 1}]", param=name, value=highest)
    for name in ("token_probs", "logprobs", "top"):
        values = getattr(record, name)
        if values is not None and len(values) != len(record.output):
            text = f"has {len(values)} values for {len(record.output)} tokens; one per token is needed"
            raise ConfigError(text, param=name)


def _read_foresay(name: str) -> Recording:
    records: dict[str, Record] = {}
    with read_lines(name, FORMAT, VERSION, _RECORD) as (values, lines):
        header = _HEADER.of(values, f"{name}, line 1")
        try:
            read_params(header.params)
        except ConfigError as error:
            raise error.about(f"{name}, line 1: params") from None
        for number, record in lines:
            try:
                _check_record(record, header.vocab_size)
                if record.id in records:
                    raise ConfigError("is not unique", param="id", value=record.id)
            except ConfigError as error:
                raise error.about(f"{name}, line {number}") from None
            records[record.id] = record
    ordered = sorted(records.values(), key=lambda one: len(records) if one.index is None else one.index)
    return Recording(
        tuple(ordered),
        header.vocab_size,
        header.eos,
        header.model,
        header.tokenizer,
        header.params,
        header.settings,
        header.provenance,
    )


def _imported(name: str, texts: Sequence[RecordedText], read_from: str) -> Recording:
    """Return a Recording of another project's log; its vocab_size is the highest token id plus one."""
    records = []
    for number, text in enumerate(texts, 1):
        source = None if text.source is None else tuple(text.source)
        records.append(Record(str(number), tuple(text.prompt), tuple(text.output), source=source))
    highest = max(max(*text.prompt, *text.output, *(text.source or ())) for text in texts)
    return Recording(tuple(records), 1 + highest, model=name, settings={"read_from": read_from})
