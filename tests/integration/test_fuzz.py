"""Mutated files of every format are read or refused in one line, within bounds; `scripts/fuzz` does more of it by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import fuzz_broken
from helpers.fuzzing import formats, fuzz


def test_mutated_files_are_read_or_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = 250 if request.config.getoption("--long") else 25
    tallies = fuzz(list(formats()), 3, count, tmp_path)
    assert [f"{name}, {line}" for name, tally in tallies.items() for line in tally.failures] == []
    assert {tally.cases for tally in tallies.values()} == {count}
    assert all(tally.refused for tally in tallies.values()), "mutated enough to be refused"
    assert all(tally.accepted for tally in tallies.values()), "and more than a first check sees the rest"


def test_what_a_reader_must_not_do_is_a_failure(tmp_path: Path) -> None:
    """Negative controls: one file of four, which is kept; where the process died, another one goes on."""
    tallies = fuzz([f"helpers.fuzz_broken:{name}" for name in fuzz_broken.FORMATS], 0, 4, tmp_path, limit_s=2)
    for name, tally in tallies.items():
        assert (tally.accepted, tally.refused, len(tally.failures)) == (2, 1, 1), name
        assert (tmp_path / f"{name}-0-1").read_bytes() == b"\x01"
