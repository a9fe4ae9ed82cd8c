"""Data sets as items: what the fields of each format mean, its prompt template, and subsets that are balanced.

Owns the formats, the checks of their fields and the choice of items. Does not know how records are read (readers.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foresay import checks
from foresay.errors import ConfigError, UnknownNameError
from foresay.lab.data.items import PromptItem
from foresay.lab.data.readers import DataRecord, file_records, hub_records, is_file, stem
from foresay.text.text_files import check_encodable

SHIPPED = "shipped"
"""The name of foresay's own set: 60 prompts in six categories."""
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
    """The items of a data set, in its order. Raises ConfigError, with the line, for whatever cannot be honoured.

    source: "shipped"; a file that ends in .jsonl, .json, .csv (with a header row) or .txt (a prompt per line that is not
    empty), each also with .gz; or a set of the Hugging Face hub: "owner/name", with ":config" where it needs one.
    format: one of FORMATS; without it a record has `prompt`, `messages` or Alpaca's `instruction`, and may have `id`,
    `category`, `raw` and `followups`. field: where the text or the messages are instead. split: of a set of the hub; test,
    validation or train without it. category: only the items of this one. count: so many of them, chosen by `seed` and
    balanced over the categories (see `subset`).
    """
    if format is not None and format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    if format is not None and field is not None:
        raise ConfigError(f"field={field!r} does not go with format={format!r}, which knows its fields")
    records = _records(source, format, field, split)
    items = _items(records, format, field, stem(source))
    if not items:
        raise ConfigError(f"{source!r} holds no prompts")
    if category is not None:
        items = _of_category(items, category, source)
    return items if count is None else subset(items, count, seed)


def subset(items: Sequence[PromptItem], count: int, seed: int = 0) -> list[PromptItem]:
    """`count` of the items in their order, the same ones on every machine; their categories differ by one at most.

    A category that has fewer than its share gives all it has. A smaller subset of the same seed lies in a larger one.
    Raises ConfigError where there are fewer items.
    """
    checks.check_int("count", count, 1)
    if count > len(items):
        raise ConfigError(f"count={count}, and there are {len(items)} prompts to choose from")
    ranked = [(rank, _digest(items[i], seed), i) for group in _shuffled(items, seed) for rank, i in enumerate(group)]
    return [items[i] for i in sorted(i for _, _, i in sorted(ranked)[:count])]


def halves(items: Sequence[PromptItem], seed: int = 0) -> tuple[list[PromptItem], list[PromptItem]]:
    """Two disjoint halves, each in the order of the items: one to tune on and one to measure on.

    The halves differ in size by one item at most, within each category too. A category is sorted by prompt length and split
    in pairs of neighbours, one of each pair to each half. Raises ConfigError for fewer than two items.
    """
    if len(items) < 2:
        raise ConfigError(f"two halves need at least 2 prompts, not {len(items)}")
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
    """Characters of the prompt."""
    return len(item.prompt) if isinstance(item.prompt, str) else sum(len(str(m["content"])) for m in item.prompt)


def _shuffled(items: Sequence[PromptItem], seed: int) -> list[list[int]]:
    """The positions of the items of each category, in an order that depends on the seed and the ids alone."""
    checks.check_int("seed", seed, 0)
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.category, []).append(i)
    return [sorted(groups[name], key=lambda i: _digest(items[i], seed)) for name in sorted(groups)]


def _digest(item: PromptItem, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{item.id}".encode("utf-8", "surrogatepass")).digest()


def _of_category(items: Sequence[PromptItem], category: str, source: str) -> list[PromptItem]:
    known = {item.category for item in items} - {""}
    if not known:
        raise ConfigError(f"category={category!r}, and the prompts of {source!r} have no categories")
    if category not in known:
        raise UnknownNameError("category", category, known)
    return [item for item in items if item.category == category]


def _records(source: str, format: str | None, field: str | None, split: str | None) -> Iterator[DataRecord]:
    """The source's records. Raises ConfigError for options that do not apply to this kind of source."""
    options = {"format": format, "field": field, "split": split}
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if source == SHIPPED:
        if given:
            raise ConfigError(f"{given[0]} does not go with the shipped set")
        return file_records(_SHIPPED_FILE)
    if not is_file(source):
        return hub_records(source, split)
    if split is not None:
        raise ConfigError(f"split={split!r} belongs to a set of the Hugging Face hub, and {source!r} is a file")
    if given and source.lower().removesuffix(".gz").endswith(".txt"):
        raise ConfigError(f"{given[0]} does not go with {source!r}: lines of text have no fields")
    return file_records(source, _MMLU_COLUMNS if format == "mmlu" else ())


def _items(records: Iterable[DataRecord], format: str | None, field: str | None, name: str) -> list[PromptItem]:
    """The records as items whose ids differ; an id that is not given is made of the name and the record's number."""
    items: list[PromptItem] = []
    places: dict[str, str] = {}
    for record in records:
        own = f"{format or name}-{record.number}"
        item = _generic(record, own, field) if format is None else FORMATS[format](record, own)
        if item.id in places:
            raise ConfigError(f"{record.place}: the id {item.id!r} is taken by {places[item.id]}")
        places[item.id] = record.place
        items.append(item)
    return items


def _generic(record: DataRecord, own: str, field: str | None) -> PromptItem:
    fields = record.fields
    name = field if field is not None else _prompt_field(record)
    if field is None and name == "instruction":
        prompt: str | tuple[Mapping[str, str], ...] = _instruction(record)
    elif isinstance(fields.get(name), list):
        prompt = _messages(record, name)
    else:
        prompt = _text(record, name)
    raw, followups = _raw(record), _texts(record, "followups") if fields.get("followups") else ()
    if raw and (followups or not isinstance(prompt, str)):
        raise ConfigError(f"{record.place}: raw is for a text to be continued, not for messages or followups")
    return PromptItem(_id(record, "id") or own, prompt, _category(record, "category"), followups, raw)


def _prompt_field(record: DataRecord) -> str:
    there = [name for name in ("prompt", "messages", "instruction") if record.fields.get(name) is not None]
    if len(there) > 1:
        raise ConfigError(f"{record.place}: both {there[0]!r} and {there[1]!r} are there; say which one with field")
    if not there:
        known = f"the record has: {_names(record)}"
        raise ConfigError(
            f"{record.place}: no field 'prompt', 'messages' or 'instruction'; {known}; see field and format"
        )
    return there[0]


def _gsm8k(record: DataRecord, own: str) -> PromptItem:
    task = "Work it out step by step, and end with a line that says only: Answer: <number>"
    return PromptItem(own, f"{_text(record, 'question')}\n\n{task}")


def _mmlu(record: DataRecord, own: str) -> PromptItem:
    question, subject = _text(record, "question"), _category(record, "subject")
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(_OPTIONS, _choices(record), strict=True))
    about = (
        f"A multiple-choice question about {subject.replace('_', ' ')}:" if subject else "A multiple-choice question:"
    )
    task = "Which option is right? Answer with its letter first, and then say why in a sentence or two."
    return PromptItem(own, f"{about}\n\n{question}\n\n{options}\n\n{task}", subject)


def _choices(record: DataRecord) -> Sequence[str]:
    """The four options: a list as on the hub, or columns named by letters or by numbers."""
    if "choices" in record.fields:
        options = _texts(record, "choices")
        if len(options) != len(_OPTIONS):
            raise ConfigError(
                f"{record.place}: the field 'choices' has {len(options)} options instead of {len(_OPTIONS)}"
            )
        return options
    numbered = "choice0" in record.fields
    return [_text(record, f"choice{i}" if numbered else letter) for i, letter in enumerate(_OPTIONS)]


def _humaneval(record: DataRecord, own: str) -> PromptItem:
    return PromptItem(_id(record, "task_id") or own, _text(record, "prompt"), raw=True)


def _mt_bench(record: DataRecord, own: str) -> PromptItem:
    hub = "turns" not in record.fields and "prompt" in record.fields
    turns = _texts(record, "prompt" if hub else "turns")
    number = _id(record, "prompt_id" if hub else "question_id")
    return PromptItem(f"mt_bench-{number}" if number else own, turns[0], _category(record, "category"), turns[1:])


def _hellaswag(record: DataRecord, own: str) -> PromptItem:
    name = "ctx" if "ctx" in record.fields else "prompt"
    return PromptItem(own, _text(record, name), _category(record, "activity_label"), raw=True)


def _alpaca(record: DataRecord, own: str) -> PromptItem:
    return PromptItem(own, _instruction(record))


FORMATS: dict[str, Callable[[DataRecord, str], PromptItem]] = {
    "alpaca": _alpaca,
    "gsm8k": _gsm8k,
    "hellaswag": _hellaswag,
    "humaneval": _humaneval,
    "mmlu": _mmlu,
    "mt_bench": _mt_bench,
}
"""What makes a record of each format an item; the second argument is the id of an item whose record has none."""


def _instruction(record: DataRecord) -> str:
    text = _text(record, "instruction")
    material = record.fields.get("input")
    blank = material is None or (isinstance(material, str) and not material.strip())
    return text if blank else f"{text}\n\n{_text(record, 'input')}"


def _text(record: DataRecord, name: str) -> str:
    """The text of a field that must be there and not be empty."""
    if name not in record.fields:
        raise ConfigError(f"{record.place}: no field {name!r}; the record has: {_names(record)}")
    return _sound(record, name, record.fields[name])


def _texts(record: DataRecord, name: str) -> tuple[str, ...]:
    """The texts of a field that must be a list of at least one."""
    values = record.fields.get(name)
    if name not in record.fields:
        raise ConfigError(f"{record.place}: no field {name!r}; the record has: {_names(record)}")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{record.place}: the field {name!r} must be a list of texts, not {_shown(values)}")
    return tuple(_sound(record, f"{name}[{i}]", value) for i, value in enumerate(values))


def _messages(record: DataRecord, name: str) -> tuple[Mapping[str, str], ...]:
    messages = record.fields[name]
    if not messages:
        raise ConfigError(f"{record.place}: the field {name!r} is an empty list")
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise ConfigError(f"{record.place}: {where} must be a message with 'role' and 'content'")
        if message["role"] not in ROLES:
            raise ConfigError(f"{record.place}: {where} has role={message['role']!r}; known roles: {', '.join(ROLES)}")
        for key, value in message.items():
            _sound(record, f"{where}.{key}", value)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{record.place}: the field {name!r} ends with the assistant's answer; nothing is asked")
    return tuple(messages)


def _sound(record: DataRecord, name: str, value: Any) -> str:
    """`value` if it is a text with something in it that UTF-8 can hold."""
    if not isinstance(value, str):
        raise ConfigError(f"{record.place}: the field {name!r} must be a text, not {_shown(value)}")
    if not value.strip():
        raise ConfigError(f"{record.place}: the field {name!r} is empty")
    check_encodable(value, record.place, name)
    return value


def _category(record: DataRecord, name: str) -> str:
    value = record.fields.get(name)
    return "" if value in (None, "") else _sound(record, name, value)


def _id(record: DataRecord, name: str) -> str:
    """A text or a whole number as a text; empty where there is none."""
    value = record.fields.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return "" if value in (None, "") else _sound(record, name, value)


def _raw(record: DataRecord) -> bool:
    """Whether a record's text is to be continued as it is; in CSV files that is the word true or false."""
    value = record.fields.get("raw")
    words = {None: False, "": False, "true": True, "false": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | None) or value not in words:
        raise ConfigError(f"{record.place}: the field 'raw' must be true or false, not {_shown(value)}")
    return words[value]


def _names(record: DataRecord) -> str:
    return ", ".join(map(str, record.fields)) or "no fields"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text
