"""Lines of code by room. A change that raises a number edits it here, and the body of its commit names what it removed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import foresay

SOURCE = Path(foresay.__file__).parents[1]
TESTS = Path(__file__).parents[1]
MOST = {
    ".": 752,
    "cli": 3616,
    "decoding": 4815,
    "drafters": 4538,
    "engine": 1343,
    "foresay_lab": 626,
    "foresay_lab/bench": 621,
    "foresay_lab/check": 365,
    "foresay_lab/commands": 2410,
    "foresay_lab/data": 635,
    "foresay_lab/measure": 385,
    "foresay_lab/replay": 1499,
    "foresay_lab/report": 766,
    "foresay_lab/training": 3145,
    "foresay_lab/workers": 505,
    "generation": 1959,
    "integrations": 790,
    "lengths": 1197,
    "models": 985,
    "models/cache": 1312,
    "models/cpu": 1981,
    "models/drafts": 3528,
    "models/families": 1179,
    "models/gguf": 2439,
    "models/gpu": 3085,
    "models/huggingface": 3597,
    "models/llama_cpp": 458,
    "models/sources": 4678,
    "records": 1085,
    "server": 6027,
    "spec": 1325,
    "text": 4951,
    "kernels in C++": 4286,
    "tests": 61089,
}
"""Room -> most lines of its Python files; those of C++ and of tests are a room each."""


def room_of(file: Path) -> str:
    """The package of a file inside foresay, and within models the package there; foresay_lab's with its name; "." for the top."""
    package, *folders = file.relative_to(SOURCE).parts[:-1]
    if package == "foresay_lab":
        return "/".join([package, *folders[:1]])
    return "/".join(folders[: 2 if folders[:1] == ["models"] else 1]) or "."


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
