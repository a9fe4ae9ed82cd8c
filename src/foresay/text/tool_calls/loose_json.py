"""JSON as models write it, in pieces: where it ends, and the same value as valid JSON so far.

Valid JSON passes unchanged. Python's constants, numbers, quotes and tuples, raw line breaks, wrong escapes, trailing commas,
words without quotes, quotes within strings and keyword arguments in parentheses have one reading, which is written as JSON;
other text is a fault. Nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null", "nan": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NO_WORD = frozenset(" \t\r\n,:=()[]{}<>;\"'")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS: Mapping[str, int] = {"x": 2, "u": 4, "U": 8}


class LooseJson:
    """Reader of one value, which writes it as JSON."""

    def __init__(self, opening: str = "{", ends: Collection[str] = (), *, quote: str = "") -> None:
        """opening: characters that may begin the value, "" for any; "(" begins keyword arguments, which become an object.

        ends: texts that end the value if they follow a string. quote: a mark around strings, in which quotes are text.
        """
        self.text = ""
        """The text that was read so far."""
        self.json = ""
        """The same as JSON, without what is not clear yet, such as a key before its value."""
        self.members: dict[str, str] = {}
        """JSON of the values of an object's members, complete or growing."""
        self.complete: set[str] = set()
        """Members whose values have ended."""
        self.done = False
        self.broken = False
        """True if the text is no such value."""
        self._opening, self._ends, self._stack = opening, ends, list[tuple[str, str]]()
        """Closing characters of the open parts: in the text, and in JSON."""
        self._wants = "value"
        """The next part: "value" after a colon, "item" of a list, "key", "colon", or "comma"."""
        self._new, self._length = list[str](), 0
        self._held = ""
        """White space, comma and key that are written with the next value."""
        self._key_start = self._start = 0
        self._name: str | None = None
        """The member of the whole object that is read."""
        self._word = self._quote = self._escape = ""
        self._after = ""
        """The quote that may end a string, and what follows it."""
        self._is_empty = self._is_triple = self._is_raw = False
        self._mark, self._begun, self._is_marked = quote, "", False
        """_begun: the beginning of a mark. _is_marked: True between two of them."""
        self._quotes = 0
        """Quotes in a row that may end a string in triple quotes, or begin one."""

    def push(self, text: str) -> str:
        """Read text up to the end of the value or to a fault; return the rest."""
        rest = ""
        for i, char in enumerate(text):
            if self.done or not (self._read_marked(char) if self._mark else self._read(char)):
                self.broken = not self.done
                rest = self._after + self._word + text[i:]
                break
        self.text = (self.text + text)[: len(self.text) + len(text) - len(rest)]
        self._flush()
        return rest

    def close(self) -> None:
        """End what was begun: the value is complete. A key without a value is left out."""
        if self._quote:
            self._escape = self._after = ""
            self._end_string()
        elif self._word:
            self._end_word()
        while self._stack:
            self._held, self._wants = "", "comma"
            self._write(self._stack.pop()[1])
            self._end_value()
        self._flush()

    def value(self, key: str) -> Any:
        """Return a complete member's value. Raises RecursionError for one that is too deep."""
        return json.loads(self.members[key])

    def _write(self, text: str) -> None:
        if self._wants == "key":
            self._held += text
        else:
            self._new.append(text)
            self._length += len(text)

    def _flush(self) -> None:
        if self._new:
            self.json += "".join(self._new)
            self._new.clear()
        if self._name in self.members:
            self.members[self._name] = self.json[self._start :]

    def _read_marked(self, char: str) -> bool:
        """Read a character of a text whose strings have marks around them."""
        self._begun += char
        if self._begun == self._mark:
            self._begun, self._is_marked = "", not self._is_marked
            return self._read('"')
        while self._begun and not self._mark.startswith(self._begun):
            first, self._begun = self._begun[0], self._begun[1:]
            escaped = ("\\" + first) if self._is_marked and first in '"\\' else first
            if self.done or not all(map(self._read, escaped)):
                return False
        return True

    def _read(self, char: str) -> bool:
        """Read a character. Returns False if it does not belong to the value."""
        if self._quote:
            return self._read_in_string(char)
        if self._word and char not in _NO_WORD:
            self._word += char
            return True
        if self._word in ("r", "u") and char in "'\"" and self._wants != "key":
            self._is_raw, self._word = self._word == "r", ""
        if self._word and (not self._end_word() or self.done):
            return False
        if char.isspace():
            self._held += (char if char in " \t\r\n" else " ") if self._stack else ""
            return True
        return self._read_sign(char)

    def _read_sign(self, char: str) -> bool:
        """Read the first character of a part, or one between parts."""
        is_keyword = len(self._stack) == 1 and self._stack[0][0] == ")" and self._opening == "("
        if self._wants == "comma" and char == ",":
            self._held += char
            self._wants = "key" if self._stack[-1][1] == "}" else "item"
            return True
        if self._wants == "colon":
            self._wants = "value"
            self._held += ":"
            return char == ("=" if is_keyword else ":")
        if char in "]})":
            return self._wants != "value" and self._close(char)
        if self._wants == "comma" or (not self._stack and self._opening and char not in self._opening):
            return False
        is_name = is_keyword and self._wants == "key"
        if char in "'\"" and not is_name:
            self._begin_string(char)
        elif char in _CLOSING and self._wants != "key":
            self._begin_value()
            is_object = char == "{" or (not self._stack and self._opening == "(")
            self._write("{" if is_object else "[")
            self._stack.append((_CLOSING[char], "}" if is_object else "]"))
            self._wants = "key" if is_object else "item"
        elif char not in _NO_WORD and (is_name or self._wants != "key" or self._may_begin_key(char)):
            self._word = char
        else:
            return False
        return True

    def _may_begin_key(self, char: str) -> bool:
        """True if a character may begin a key without quotes; in Python such a key is a variable."""
        return self._opening != "(" and (char.isalpha() or char in "_$")

    def _close(self, char: str) -> bool:
        if not self._stack or char != self._stack[-1][0]:
            return False
        before, self._held, self._wants = self._held.replace(",", ""), "", "comma"
        self._write(before + self._stack.pop()[1])
        self._end_value()
        return True

    def _begin_value(self) -> None:
        before, self._held = self._held, ""
        self._write(before)
        if len(self._stack) == 1 and self._name is not None:
            self.members[self._name], self._start = "", self._length
            self.complete.discard(self._name)  # a repeated key

    def _end_value(self) -> None:
        self._wants, self.done = "comma", not self._stack
        if len(self._stack) == 1 and self._name is not None:
            self._flush()
            self.complete.add(self._name)
            self._name = None

    def _end_key(self) -> None:
        if len(self._stack) == 1:
            self._name = str(json.loads(self._held[self._key_start :]))
        self._wants = "colon"

    def _end_word(self) -> bool:
        """End a word: a name before "=", a number or a constant. Another is a text, except in Python: then returns False."""
        if self._wants == "key":
            self._key_start = len(self._held)
            self._held += json.dumps(self._word, ensure_ascii=False)
            self._end_key()
        else:
            written = _CONSTANTS.get(self._word.lower()) or _number(self._word)
            if written is None and self._opening == "(":
                return False
            self._begin_value()
            self._write(json.dumps(self._word, ensure_ascii=False) if written is None else written)
            self._end_value()
        self._word = ""
        return True

    def _begin_string(self, char: str) -> None:
        if self._wants == "key":
            self._key_start = len(self._held)
        else:
            self._begin_value()
        self._quote, self._is_empty, self._is_triple, self._quotes = char, True, False, 0
        self._write('"')

    def _end_string(self) -> None:
        self._write('"')
        self._quote, self._is_raw = "", False
        if self._wants == "key":
            self._end_key()
        else:
            self._end_value()

    def _read_in_string(self, char: str) -> bool:
        if self._escape:
            return self._read_escape(char)
        if self._after:
            return self._read_after(char)
        if char == self._quote:
            self._quotes += 1
            if self._is_triple or self._is_empty:
                if self._quotes == 3:
                    self._end_string()
                elif self._quotes == 2 and not self._is_triple:
                    self._is_triple, self._is_empty, self._quotes = True, False, 0
            else:
                self._may_end(char)
            return True
        if self._quotes and not self._is_triple:  # the string was empty
            self._is_empty = False
            self._may_end(self._quote)
            return not self.done and self._read(char)
        self._write(('\\"' if self._quote == '"' else "'") * self._quotes)
        self._is_empty, self._quotes = False, 0
        if char == "\\" and not self._is_raw:
            self._escape = char
        else:
            self._write(char if char >= " " and char not in '"\\' else json.dumps(char)[1:-1])
        return True

    def _may_end(self, quote: str) -> None:
        """Read a quote that ends the string, or is a part of it: what follows decides. It ends a key, and a text of Python."""
        self._quotes = 0
        if self._opening == "(" or not self._stack or self._wants == "key":
            self._end_string()
        else:
            self._after = quote

    def _read_after(self, char: str) -> bool:
        """Read what follows a quote in a string: a sign that JSON has after strings, one of `ends`, or more of the string."""
        before, after = self._after, self._after[1:].lstrip() + char
        if after.isspace():
            self._after += char
        elif after in (",", ":", "}", "]") or after == self._stack[-1][0]:
            self._after = ""
            self._end_string()
            return all(map(self._read, before[1:] + char))
        elif after in self._ends:
            self._after = ""
            self._end_string()
            self._after = before[1:].lstrip()
            return False
        elif any(one.startswith(after) for one in self._ends):
            self._after += char
        else:
            self._after = ""
            self._write('\\"' if before[0] == '"' else before[0])
            return all(map(self._read_in_string, before[1:] + char))
        return True

    def _read_escape(self, char: str) -> bool:
        """Read an escape of JSON or Python. A backslash that begins none is text."""
        escape = self._escape + char
        kind, digits = escape[1], _HEX_DIGITS.get(escape[1], 0)
        if digits and len(escape) > 2 and char not in "0123456789abcdefABCDEF":
            return self._read_text("\\\\" + self._escape[1:], char)
        if len(escape) < digits + 2:
            self._escape = escape
            return True
        if kind in _ESCAPES or kind == "u":
            written = escape
        elif digits and int(escape[2:], 16) < 0x110000:
            written = json.dumps(chr(int(escape[2:], 16)))[1:-1]
        elif kind == "'":
            written = kind
        else:
            return self._read_text("\\\\" + escape[1:-1], char)
        self._escape = ""
        self._write(written)
        return True

    def _read_text(self, written: str, char: str) -> bool:
        self._escape = ""
        self._write(written)
        return self._read_in_string(char)


def _number(word: str) -> str | None:
    """Return a number of JSON or Python as JSON, None for another word."""
    if _NUMBER.fullmatch(word):
        return word
    for read in (lambda: int(word, 0), lambda: int(word), lambda: float(word)):
        with suppress(ValueError):
            return json.dumps(read(), allow_nan=False)
    return None


def repaired(text: str) -> str | None:
    """Return an object that is written loosely or was cut as JSON, None for another text. Closing brackets may be too many."""
    found = LooseJson()
    rest = found.push(text)
    if found.broken or rest.strip("}]) \t\r\n") or not found.json:
        return None
    found.close()
    return found.json
