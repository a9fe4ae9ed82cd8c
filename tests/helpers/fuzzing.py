"""Seeded fuzzing of readers: mutated files of each format, read in child processes with bounds on time and memory.

A file is refused by a ForesayError or accepted; anything else is a failure: another exception, a MemoryError under the bound,
a child that dies of a signal, and a case that does not end in time. Failing cases are kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MEMORY_BYTES = 1 << 30
"""Bound on what reading a file of at most a few MB may take beyond what the process had before."""
LIMIT_S = 60.0
"""How long one case may take before it counts as a hang."""
START_S = 300.0
"""How long a child may take before its first case."""


class Format(NamedTuple):
    """A kind of file: what writes a mutated one into an empty folder and returns its path, and what reads and uses it."""

    write: Callable[[Path, random.Random], Path]
    check: Callable[[Path], object]


@dataclass
class Tally:
    """Outcome of the cases of one format."""

    refused: int = 0
    accepted: int = 0
    failures: list[str] = field(default_factory=list)
    """One line each: the case's number, and what happened."""

    @property
    def cases(self) -> int:
        return self.refused + self.accepted + len(self.failures)


def one_file(name: str, made: Callable[[random.Random], bytes]) -> Callable[[Path, random.Random], Path]:
    """Cases that are one file in a folder, which is the case."""

    def write(place: Path, rng: random.Random) -> Path:
        (place / name).write_bytes(made(rng))
        return place

    return write


@contextmanager
def working_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        yield Path(folder)


def formats(where: str = "helpers.fuzz_formats") -> dict[str, Format]:
    found: dict[str, Format] = importlib.import_module(where).FORMATS
    return found


def _format(name: str) -> Format:
    """A format of `formats`, or "module:name" of another module's."""
    where, _, own = name.rpartition(":")
    return (formats(where) if where else formats())[own]


class _Job(NamedTuple):
    """Work of one child, from the case `first` on: case i is case i // formats of format i % formats."""

    formats: tuple[str, ...]
    seed: int
    first: int
    count: int
    work: str
    keep: str
    memory: int
    limit_s: float

    def kept(self, number: int, source: Path) -> str:
        """Copy a case to where failures are kept. Returns its number and path."""
        case = number // len(self.formats)
        target = Path(self.keep) / f"{self.formats[number % len(self.formats)]}-{self.seed}-{case}{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
        return f"case {case} ({target})"


def fuzz(
    chosen: Sequence[str], seed: int, count: int, keep: Path, *, memory: int = MEMORY_BYTES, limit_s: float = LIMIT_S
) -> dict[str, Tally]:
    """Run `count` cases of each format, in turns. keep: folder for cases that fail; a child that dies is followed by another."""
    tallies, first = {name: Tally() for name in chosen}, 0
    keep.mkdir(parents=True, exist_ok=True)
    while first < count * len(chosen):
        with working_folder() as work:
            first = _run(_Job(tuple(chosen), seed, first, count, str(work), str(keep), memory, limit_s), tallies)
    return tallies


def _run(job: _Job, tallies: dict[str, Tally]) -> int:
    """Let one child run cases until all are done or it dies. Return the number of the next case."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "helpers.fuzzing", json.dumps(job)]
    environment = {**os.environ, **quiet, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    number, dead = job.first, None
    for number, outcome in map(json.loads, done.stdout.splitlines()):
        tally, dead = tallies[job.formats[number % len(job.formats)]], None
        match outcome:
            case "refused":
                tally.refused += 1
            case "accepted":
                tally.accepted += 1
            case {"begins": path}:
                dead = path
            case {"failed": problem}:
                tally.failures.append(problem)
    if dead is not None:
        late = "Timeout (" in done.stderr
        why = f"no end within {job.limit_s:g} s" if late else f"the process died with {done.returncode}"
        tally.failures.append(f"{job.kept(number, Path(dead))}: {why}")
    elif done.returncode:
        raise RuntimeError(f"the child of fuzzing failed: {done.stderr}")
    return number + 1


def _child(job: _Job) -> None:
    """Run cases from `first` on; one line on standard output before each and one after."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may come between
    faulthandler.dump_traceback_later(START_S, exit=True)
    warnings.simplefilter("ignore")
    found = [(name, _format(name)) for name in job.formats]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def told(*line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    for number in range(job.first, job.count * len(found)):
        name, form = found[number % len(found)]
        place = Path(job.work) / str(number // len(found))
        place.mkdir()
        path = form.write(place, random.Random(f"{name} {job.seed} {place.name}"))
        if number == job.first:
            _bound(job.memory)
        told(number, {"begins": str(path)})
        faulthandler.dump_traceback_later(job.limit_s, exit=True)
        outcome = outcome_of(form, path)
        known = outcome in ("refused", "accepted")
        told(number, outcome if known else {"failed": f"{job.kept(number, path)}: {outcome}"})
        shutil.rmtree(place)
    faulthandler.cancel_dump_traceback_later()


def _bound(memory: int) -> None:
    """Let this process have so many bytes of memory more than now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))


def outcome_of(form: Format, path: Path) -> str:
    """ "refused", "accepted", or what went wrong."""
    from foresay.errors import ForesayError

    try:
        form.check(path)
    except ForesayError as caught:
        return f"an error of several lines: {str(caught)[:200]!r}" if "\n" in str(caught) else "refused"
    except BaseException as caught:
        place = traceback.extract_tb(caught.__traceback__)[-1]
        return f"{type(caught).__name__}: {str(caught)[:150]!r} at {Path(place.filename).name}:{place.lineno}"
    return "accepted"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of scripts/fuzz: a line for each format, 1 where something failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000, help="cases in all, over the formats (20000)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of every case (0)")
    parser.add_argument("--formats", help="some of the formats, separated by commas (all)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for cases that fail")
    given = parser.parse_args(arguments)
    known = list(formats())
    chosen = given.formats.split(",") if given.formats else known
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"unknown format {unknown[0]!r}; known: {', '.join(known)}")
    failed = False
    print(f"{'format':<18}{'cases':>8}{'refused':>9}{'accepted':>9}{'failures':>9}")
    for i, name in enumerate(chosen):
        count = given.count // len(chosen) + (i < given.count % len(chosen))
        tally = fuzz([name], given.seed, count, given.keep)[name]
        print(f"{name:<18}{tally.cases:>8}{tally.refused:>9}{tally.accepted:>9}{len(tally.failures):>9}", flush=True)
        for line in tally.failures:
            print(f"  {name}, seed {given.seed}, {line}", flush=True)
        failed |= bool(tally.failures)
    return int(failed)


if __name__ == "__main__":
    _formats, *_rest = json.loads(sys.argv[1])
    _child(_Job(tuple(_formats), *_rest))
