"""Data sets as items: the fields and the prompt template of each format, and balanced subsets.

Owns the formats, the checks of their fields and the choice of items. Does not know how records are read (readers.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from foresay import checks
from foresay.errors import ConfigError, UnknownNameError
from foresay_lab.data.items import PromptItem
from foresay_lab.data.readers import DataRecord, file_records, hub_records, is_file, shown, stem

SHIPPED = "shipped"
"""The name of foresay's own data set: 60 prompts in six categories."""
ROLES = ("system", "user", "assistant", "tool", "developer")
_SHIPPED_FILE = str(Path(__file__).with_name("shipped.jsonl"))
_MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")
_OPTIONS = "ABCD"


def load_items(
    source: str = SHIPPED,
    *,
    format: str | None = None,
    field: str | None = None,
    split: str | None = None,
    category: str | None = None,
    count: int | None = None,
    seed: int = 0,
) -> list[PromptItem]:
    """Load the items of a data set, in order. Raises ConfigError, with the line, for invalid data or options.

    source: "shipped"; a file that ends in .jsonl, .json, .csv (with a header row) or .txt (one prompt per non-empty
    line), each also with .gz; or a data set of the Hugging Face hub: "owner/name", with ":config" if it needs one.
    format: one of FORMATS; by default a record has `prompt`, `messages` or Alpaca's `instruction`, and may have `id`,
    `category`, `raw` and `followups`. field: the field with the text or the messages instead. split: of a data set of the hub;
    by default the first existing one of test, validation and train. category: load only the items of this category. count: load
    only this many items, chosen by `seed` and balanced over the categories (see `subset`).
    """
    if format is not None and format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    if format is not None and field is not None:
        text = f"cannot be combined with format={format!r}, which defines its fields; give one of them"
        raise ConfigError(text, param="field", value=field)
    records = _records(source, format, field, split)
    items = _items(records, format, field, stem(source))
    if not items:
        raise ConfigError("contains no prompts", param="path", value=source)
    if category is not None:
        known = {item.category for item in items} - {""}
        if not known:
            text = f"does not apply: the prompts of {source!r} have no categories; leave it out"
            raise ConfigError(text, param="category", value=category)
        if category not in known:
            raise UnknownNameError("category", category, known)
        items = [item for item in items if item.category == category]
    return items if count is None else subset(items, count, seed)


def subset(items: Sequence[PromptItem], count: int, seed: int = 0) -> list[PromptItem]:
    """Choose `count` items, in order and equal on every machine; the numbers per category differ by at most one.

    All items of a category with fewer than its share are chosen. With the same seed, a smaller subset is part of a larger one.
    Raises ConfigError if there are fewer items.
    """
    checks.check_int("count", count, 1)
    if count > len(items):
        raise ConfigError(f"must be at most {len(items)}, the number of prompts", param="count", value=count)
    ranked = [(rank, _digest(items[i], seed), i) for group in _shuffled(items, seed) for rank, i in enumerate(group)]
    return [items[i] for i in sorted(i for _, _, i in sorted(ranked)[:count])]


def halves(items: Sequence[PromptItem], seed: int = 0) -> tuple[list[PromptItem], list[PromptItem]]:
    """Split items into two disjoint halves, each in order: one for tuning and one for measuring.

    The sizes of the halves differ by at most one item, also within each category. A category is sorted by prompt length, and the
    two items of each consecutive pair go to different halves. Raises ConfigError for fewer than two items.
    """
    if len(items) < 2:
        raise ConfigError(f"must be at least 2 for two halves, not {len(items)}", param="prompts")
    parts: tuple[list[int], list[int]] = ([], [])
    for group in _shuffled(items, seed):
        by_length = sorted(group, key=lambda i: _length(items[i]))
        for begin in range(0, len(group) - 1, 2):
            one, other = sorted(by_length[begin : begin + 2], key=lambda i: _digest(items[i], seed))
            parts[0].append(one)
            parts[1].append(other)
        if len(group) % 2:
            min(parts, key=len).append(by_length[-1])
    return [items[i] for i in sorted(parts[0])], [items[i] for i in sorted(parts[1])]


def _length(item: PromptItem) -> int:
    """Return the number of characters of the prompt."""
    return len(item.prompt) if isinstance(item.prompt, str) else sum(len(str(m["content"])) for m in item.prompt)


def _shuffled(items: Sequence[PromptItem], seed: int) -> list[list[int]]:
    """Return the indices of each category's items, in an order that depends only on the seed and the ids."""
    checks.check_int("seed", seed, 0)
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.category, []).append(i)
    return [sorted(groups[name], key=lambda i: _digest(items[i], seed)) for name in sorted(groups)]


def _digest(item: PromptItem, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{item.id}".encode("utf-8", "surrogatepass")).digest()


def _records(source: str, format: str | None, field: str | None, split: str | None) -> Iterator[DataRecord]:
    """Read the records of a source. Raises ConfigError for options that do not apply to this kind of source."""
    options = {"format": format, "field": field, "split": split}
    given = next(((name, value) for name, value in options.items() if value is not None), None)
    if source == SHIPPED:
        if given:
            raise ConfigError("does not apply to the shipped data set; leave it out", param=given[0], value=given[1])
        return file_records(_SHIPPED_FILE)
    if not is_file(source):
        return hub_records(source, split)
    if split is not None:
        text = f"applies to data sets of the Hugging Face hub, and {source!r} is a file; leave it out"
        raise ConfigError(text, param="split", value=split)
    if given and source.lower().removesuffix(".gz").endswith(".txt"):
        problem = f"does not apply to {source!r}: lines of text have no fields; leave it out"
        raise ConfigError(problem, param=given[0], value=given[1])
    return file_records(source, _MMLU_COLUMNS if format == "mmlu" else ())


def _items(records: Iterable[DataRecord], format: str | None, field: str | None, name: str) -> list[PromptItem]:
    """Convert records to items with unique ids; a missing id is built from the name and the record's number."""
    items: list[PromptItem] = []
    positions: dict[str, str] = {}
    for record in records:
        default_id = f"{format or name}-{record.number}"
        item = _generic(record, default_id, field) if format is None else FORMATS[format](record, default_id)
        if item.id in positions:
            raise ConfigError(f"is already used in {positions[item.id]}", param=f"{record.place}: id", value=item.id)
        positions[item.id] = record.place
        items.append(item)
    return items


def _generic(record: DataRecord, default_id: str, field: str | None) -> PromptItem:
    name = field if field is not None else _prompt_field(record)
    if field is None and name == "instruction":
        prompt: str | tuple[Mapping[str, str], ...] = _instruction(record)
    else:
        prompt = _messages(record, name) if isinstance(record.fields.get(name), list) else record.text(name)
    raw, followups = _raw(record), record.texts("followups") if record.fields.get("followups") else ()
    if raw and (followups or not isinstance(prompt, str)):
        raise record.error("raw applies to a text to be continued, not to messages or followups")
    return PromptItem(record.label("id") or default_id, prompt, record.optional("category"), followups, raw)


def _prompt_field(record: DataRecord) -> str:
    present = [name for name in ("prompt", "messages", "instruction") if record.fields.get(name) is not None]
    if len(present) > 1:
        raise record.error(f"the record has both {present[0]!r} and {present[1]!r}; choose one with field")
    if not present:
        known = f"the record has: {record.names}"
        raise record.error(f"no field 'prompt', 'messages' or 'instruction'; {known}; see field and format")
    return present[0]


def _messages(record: DataRecord, name: str) -> tuple[Mapping[str, str], ...]:
    messages = record.fields[name]
    if not messages:
        raise record.error(f"the field {name!r} is an empty list")
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise record.error(f"{where} must be a message with 'role' and 'content'")
        if message["role"] not in ROLES:
            raise record.error(f"{where} has role={message['role']!r}; known roles: {', '.join(ROLES)}")
        for key, value in message.items():
            record.checked(f"{where}.{key}", value)
    if messages[-1]["role"] == "assistant":
        raise record.error(f"the field {name!r} ends with an assistant message; it must end with another role")
    return tuple(messages)


def _raw(record: DataRecord) -> bool:
    """True if a record's text is to be continued without a chat template; in CSV files the word true or false."""
    value = record.fields.get("raw")
    words = {None: False, "": False, "true": True, "false": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | None) or value not in words:
        raise record.error(f"the field 'raw' must be true or false, not {shown(value)}")
    return words[value]


def _instruction(record: DataRecord) -> str:
    text, context = record.text("instruction"), record.fields.get("input")
    blank = context is None or (isinstance(context, str) and not context.strip())
    return text if blank else f"{text}\n\n{record.text('input')}"


def _mmlu(record: DataRecord, default_id: str) -> PromptItem:
    """Options are in a list as on the hub, or in columns named by letters or numbers."""
    question, subject = record.text("question"), record.optional("subject")
    if "choices" in record.fields:
        texts: Sequence[str] = record.texts("choices")
        if len(texts) != len(_OPTIONS):
            raise record.error(f"the field 'choices' has {len(texts)} options instead of {len(_OPTIONS)}")
    else:
        numbered = "choice0" in record.fields
        texts = [record.text(f"choice{i}" if numbered else letter) for i, letter in enumerate(_OPTIONS)]
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(_OPTIONS, texts, strict=True))
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    task = "Which option is right? Answer with its letter first, and then say why in a sentence or two."
    return PromptItem(default_id, f"A multiple-choice question{about}:\n\n{question}\n\n{options}\n\n{task}", subject)


def _mt_bench(record: DataRecord, default_id: str) -> PromptItem:
    hub = "turns" not in record.fields and "prompt" in record.fields
    turns, number = record.texts("prompt" if hub else "turns"), record.label("prompt_id" if hub else "question_id")
    return PromptItem(f"mt_bench-{number}" if number else default_id, turns[0], record.optional("category"), turns[1:])


_GSM8K_TASK = "Work it out step by step, and end with a line that says only: Answer: <number>"
FORMATS: dict[str, Callable[[DataRecord, str], PromptItem]] = {
    "alpaca": lambda record, id: PromptItem(id, _instruction(record)),
    "gsm8k": lambda record, id: PromptItem(id, f"{record.text('question')}\n\n{_GSM8K_TASK}"),
    "hellaswag": lambda record, id: PromptItem(
        id, record.text("ctx" if "ctx" in record.fields else "prompt"), record.optional("activity_label"), raw=True
    ),
    "humaneval": lambda record, id: PromptItem(record.label("task_id") or id, record.text("prompt"), raw=True),
    "mmlu": _mmlu,
    "mt_bench": _mt_bench,
}
"""Format -> function (record, default id) -> item; the default id is used if the record has none."""
