"""Mutators of files and requests: JSON by its values, safetensors by its header and tensors, anything by its bytes.

Every choice comes from the `random.Random` that is given, so that a seed and a number name a case.
"""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

_DEEP, _DIGITS = re.compile(r'"@deep (\d+)(.)@"'), re.compile(r'"@digits (\d+)@"')
_SIZES = {"F8_E4M3": 1, "I8": 1, "F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_NAMES = ("", "x", "format", "kind")
_MARKS = (b"[", b"{", b'"', b"]", b"}", b",", b"\0", b"\n", b"\xff\xfe", b"\r", b"\xef\xbb\xbf")
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""name -> (dtype, shape, data)."""


def extreme(rng: random.Random, odd: Sequence[Any] = ()) -> Any:
    """A value that a field does not expect, half of the time one of `odd`; marks in it are replaced by `dump`."""
    if odd and rng.random() < 0.5:
        return rng.choice(odd)
    depth = rng.choice((3, 70, 300, 2000, 100_000))
    return rng.choice(
        (
            *(None, True, False, -1, 0, 1, 2, 3, 1.5, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf),
            *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63, -(2**63), 2**64, 10**400, "@digits 5000@"),
            *("", "x", "7", "nan", "x" * 10_000, "\0", "\ud800", "\u2028", "../../x", "a\nb"),
            *([], {}, [[]], [{}], [0], [None], ["a"], [1] * 5000, {"a": 1}, {"": None}, {"7": 7}),
            *(f"@deep {depth}[@", f"@deep {depth}{{@"),
        )
    )


def dump(value: Any, rng: random.Random | None = None) -> str:
    """JSON text of a value that may hold the marks of `extreme`. rng: now and then repeats the keys of an object."""
    text = json.dumps(value, ensure_ascii=rng is None or rng.random() < 0.8)
    text = _DEEP.sub(lambda m: _nested(int(m[1]), m[2]), text)
    text = _DIGITS.sub(lambda m: "9" * int(m[1]), text)
    if rng is not None and rng.random() < 0.05 and (found := re.findall(r'("[^"\\{}\[\]]*": [^,{}\[\]]+)[,}]', text)):
        text = text.replace("{", "{" + rng.choice(found) + ", ", 1)
    return text


def _nested(depth: int, opening: str) -> str:
    return "[" * depth + "]" * depth if opening == "[" else '{"a":' * depth + "1" + "}" * depth


def mutate_value(value: Any, rng: random.Random, odd: Sequence[Any] = (), names: Sequence[str] = _NAMES) -> Any:
    """A copy of a JSON value with one to three of its parts changed. odd: further values. names: of unknown fields."""
    root = {"": deepcopy(value)}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if places := _places(root):
            _change(*rng.choice(places), rng, odd, names)
    return root.get("")


def _places(root: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every part."""
    out: list[tuple[Any, Any]] = []
    waiting = [root]
    while waiting:
        one = waiting.pop()
        items = list(one.items() if isinstance(one, dict) else enumerate(one))
        out += [(one, key) for key, _ in items]
        waiting += [part for _, part in items if isinstance(part, dict | list)]
    return out


def _change(holder: Any, key: Any, rng: random.Random, odd: Sequence[Any], names: Sequence[str]) -> None:
    was = holder[key]
    match rng.randrange(9):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            name = rng.choice((*names, str(key) + "s"))
            holder[name] = holder.pop(key) if rng.random() < 0.5 else extreme(rng, odd)
        case 2:
            holder[key] = [was] * rng.choice((0, 1, 2, 50))
        case 3 if isinstance(was, list):
            holder[key] = was * rng.choice((0, 2, 30)) + [extreme(rng, odd)] * rng.randrange(2)
        case 3 if isinstance(holder, list):
            holder += [was] * rng.choice((1, 50, 1100))
        case 4 if isinstance(was, int | float) and abs(was) < 1e300:
            holder[key] = rng.choice((was + 1, was - 1, was + 0.5, -was, was * 1000, was / 2, float(was), str(was)))
        case 5:
            holder[key] = deepcopy(rng.choice([h[k] for h, k in _places({"": holder})]))
        case _:
            holder[key] = deepcopy(extreme(rng, odd))


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed where they stand."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 8, 64)) if out else 0):
        out[rng.randrange(len(out))] ^= rng.choice((1 << rng.randrange(8), rng.randrange(1, 256)))
    return bytes(out)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes cut, flipped, repeated, mixed or encoded otherwise."""
    size = len(data)
    at, to = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
    piece = data[at : at + 40] or b"x"
    out = bytearray(data)
    match rng.randrange(10):
        case 0:
            del out[at:]
        case 1:
            return flip_bytes(data, rng)
        case 2:
            del out[at:to]
        case 3:
            out[at:at] = data[at:to]
        case 4:
            out[at:at] = rng.choice(_MARKS)
        case 5:
            out[at:at] = rng.choice((b"[", b"{", b'"', b"\\", b"\n", b'{"a":')) * rng.choice((200, 100_000))
        case 6:
            out[at:at] = piece * (rng.choice((3, 1000, 1_000_000)) // len(piece) + 1)
        case 7:
            return rng.choice((b"", b"\n", b"null", b"[]", b"{}", b"0", b"NaN", b'""', rng.randbytes(64)))
        case 8:
            return rng.choice((data + data, b"\xef\xbb\xbf" + data, data.replace(b'"', b"'", 1)))
        case _:
            return data.decode("latin-1").encode(rng.choice(("utf-16", "utf-8")))
    return bytes(out)


def mutate_json(value: Any, rng: random.Random) -> bytes:
    """A file of one JSON value, its value or its text changed."""
    text = dump(mutate_value(value, rng) if rng.random() < 0.75 else value, rng).encode("utf-8", "surrogatepass")
    return mutate_bytes(text, rng) if rng.random() < 0.3 else text


def mutate_lines(lines: list[Any], rng: random.Random) -> bytes:
    """A file of JSON lines, one of the lines or the text changed."""
    texts = [dump(line) for line in lines]
    which = rng.randrange(len(lines))
    texts[which] = dump(mutate_value(lines[which], rng), rng)
    if rng.random() < 0.1:
        texts.insert(rng.randrange(len(texts) + 1), rng.choice(texts))
    whole = ("\n".join(texts) + "\n" * (rng.random() < 0.9)).encode("utf-8", "surrogatepass")
    return mutate_bytes(whole, rng) if rng.random() < 0.3 else whole


def safetensors(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def joined(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    """The file. length: of the header, as it is written down; None: its own."""
    text = dump(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data


def mutate_tensors(
    tensors: Tensors,
    metadata: Mapping[str, str] | None,
    rng: random.Random,
    facts: Callable[[str, random.Random], str] = lambda text, rng: text + "x",
) -> bytes:
    """A safetensors file: sound with other tensors or metadata, or with a header or bytes that are damaged.

    facts: changes a text of the metadata.
    """
    kind = rng.random()
    if kind < 0.5:
        return joined(*safetensors(_other_tensors(tensors, rng), metadata))
    if kind < 0.65 and metadata:
        name = rng.choice(sorted(metadata))
        return joined(*safetensors(tensors, {**metadata, name: facts(metadata[name], rng)}))
    header, data = safetensors(tensors, metadata)
    if kind < 0.8:
        return joined(mutate_value(header, rng), data)
    if kind < 0.85:
        return joined(header, data, length=rng.choice((0, 1, 2**31, 2**63, 100_000_001, len(data))))
    return mutate_bytes(joined(header, data), rng)


def _other_tensors(tensors: Tensors, rng: random.Random) -> Tensors:
    """Tensors that a file can have, one of them of another shape, dtype, name or value, missing or added."""
    out = dict(tensors)
    name = rng.choice(sorted(out))
    dtype, shape, raw = out[name]
    match rng.randrange(7):
        case 0:
            del out[name]
        case 1:
            out[rng.choice((name + "s", "", "x", "1.weight", "0.linear.weight", "a.b.c"))] = out.pop(name)
        case 2:
            other = rng.choice(sorted(_SIZES))
            out[name] = (other, shape, bytes(math.prod(shape) * _SIZES[other]))
        case 3:
            sizes = list(shape)
            if sizes and rng.random() < 0.7:
                sizes[rng.randrange(len(sizes))] = rng.choice((0, 1, 2, 3, 7, 64, 1000))
            else:
                sizes = rng.choice(([], [0], [1], [1, 1, 1], [0, 2**62], [3, 0, 5], sizes[::-1], [*sizes, 1]))
            out[name] = (dtype, tuple(sizes), bytes(math.prod(sizes) * _SIZES[dtype]))
        case 4 if raw:
            width, changed = _SIZES[dtype], bytearray(raw)
            for _ in range(rng.choice((1, 3, 20))):
                at = rng.randrange(len(raw) // width) * width
                changed[at : at + width] = rng.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * width
            out[name] = (dtype, shape, bytes(changed))
        case 5:
            out[rng.choice(("extra", "level_5.keys", "lm_head.weight", "embed_tokens.weight"))] = out[name]
        case _:
            out = dict(sorted(out.items(), key=lambda _: rng.random()))
    return out
