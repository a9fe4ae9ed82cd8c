"""Lines of code by room. A change that raises a number edits it here, and the body of its commit names what it removed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import foresay

SOURCE = Path(foresay.__file__).parent
TESTS = Path(__file__).parents[1]
MOST = {
    ".": 821,
    "cli": 5934,
    "decoding": 4516,
    "drafters": 4520,
    "engine": 1297,
    "generation": 1618,
    "integrations": 800,
    "lab": 5163,
    "lengths": 1174,
    "models": 734,
    "models/cache": 1216,
    "models/cpu": 1882,
    "models/drafts": 3190,
    "models/gguf": 3112,
    "models/gpu": 2852,
    "models/huggingface": 3904,
    "models/llama_cpp": 459,
    "models/sources": 4372,
    "records": 1094,
    "server": 6119,
    "spec": 1341,
    "text": 5052,
    "training": 3379,
    "workers": 644,
    "kernels in C++": 3873,
    "tests": 72_800,
}
"""Room -> most lines of its Python files; those of C++ and of tests are a room each."""


def room_of(file: Path) -> str:
    """The package of a file, and within models the package there; "." for the top."""
    first, *rest = file.relative_to(SOURCE).parts
    if not rest:
        return "."
    return f"{first}/{rest[0]}" if first == "models" and len(rest) > 1 else first


def lines(file: Path) -> int:
    return file.read_text("utf-8").count("\n")


def sizes() -> Counter[str]:
    found = Counter[str]()
    for file in SOURCE.rglob("*.py"):
        found[room_of(file)] += lines(file)
    for file in SOURCE.rglob("*"):
        found["kernels in C++"] += lines(file) if file.suffix in (".cpp", ".h") else 0
    for file in TESTS.rglob("*.py"):
        found["tests"] += lines(file)
    return found


def test_no_room_has_grown() -> None:
    found = sizes()
    grown = {room: (count, MOST.get(room, 0)) for room, count in found.items() if count > MOST.get(room, 0)}
    assert grown == {}, "room: (lines, most); raise the number here, and name in the commit's body what was removed"
    assert found.keys() == MOST.keys(), "rooms without files"


def test_a_room_below_its_number_lowers_it() -> None:
    """A number that is far above a room's size would let it grow unseen."""
    slack = {room: most - sizes()[room] for room, most in MOST.items() if most - sizes()[room] > 100}
    assert slack == {}, "room: lines to take off its number"
