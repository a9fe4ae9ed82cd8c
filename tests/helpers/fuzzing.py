"""Seeded fuzzing of readers: mutated files of each format, read in child processes with bounds on time and memory.

A file is refused by a ForesayError or accepted; anything else is a failure: another exception, a MemoryError under the bound,
a child that dies of a signal, and a case that does not end in time. Failing cases are kept. A format is two functions:
`cases(seed, count, folder)` yields paths, each made when it is requested, and `check(path)` reads one and uses what it read.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import resource
import select
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
from typing import IO, Any, NamedTuple

HELPERS = Path(__file__).parent
MODULES = {"gguf": "helpers.fuzz_gguf", "requests": "helpers.fuzz_server"}
"""Formats with a module of their own, which has `cases` and `check`."""
MANY = "helpers.fuzz_formats"
"""The module that has the other formats, in `FORMATS`; those of another one are called "module:name"."""
MEMORY_BYTES = 1 << 30
"""Bound on what reading a file of at most a few MB may take beyond what the process had before."""
LIMIT_S = 60.0
"""How long one case may take before it counts as a hang."""
START_S = 300.0
"""How long a child may take before its first case."""


class Format(NamedTuple):
    """A kind of file: where its mutated files come from, and how one is read."""

    cases: Callable[[int, int, Path], Iterator[Path]]
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


def files(write: Callable[[Path, random.Random], Path]) -> Callable[[int, int, Path], Iterator[Path]]:
    """Cases that `write` makes in a folder of each."""

    def cases(seed: int, count: int, folder: Path) -> Iterator[Path]:
        for number in range(count):
            place = folder / str(number)
            place.mkdir(parents=True, exist_ok=True)
            yield write(place, random.Random(f"{seed} {number}"))

    return cases


def one_file(name: str, made: Callable[[random.Random], bytes]) -> Callable[[int, int, Path], Iterator[Path]]:
    """Cases that are one file in a folder, which is the case."""

    def write(place: Path, rng: random.Random) -> Path:
        (place / name).write_bytes(made(rng))
        return place

    return files(write)


@contextmanager
def working_folder() -> Iterator[Path]:
    """A folder that is there for a while."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def names() -> list[str]:
    """The formats that there are modules for."""
    known = sorted(importlib.import_module(MANY).FORMATS)
    return known + [name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None]


def fuzz(
    chosen: Sequence[str], seed: int, count: int, keep: Path, *, memory: int = MEMORY_BYTES, limit_s: float = LIMIT_S
) -> dict[str, Tally]:
    """Run `count` cases of each format, in turns. keep: folder for cases that fail; a child that dies is followed by another."""
    tallies, first = {name: Tally() for name in chosen}, 0
    keep.mkdir(parents=True, exist_ok=True)
    while first < count * len(chosen):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
            job = _Job(tuple(chosen), seed, first, count, work, str(keep.absolute()), memory)
            first = _run(job, limit_s, tallies)
    return tallies


class _Job(NamedTuple):
    """Work of one child: case i is case i // formats of format i % formats."""

    formats: tuple[str, ...]
    seed: int
    first: int
    count: int
    work: str
    keep: str
    memory: int

    def name(self, number: int) -> str:
        return self.formats[number % len(self.formats)]

    def case(self, number: int) -> int:
        return number // len(self.formats)

    def kept(self, number: int) -> Path:
        """Copy a case to where failures are kept; its path stands in the file `now`, since the child may be dead."""
        source = Path((Path(self.work) / "now").read_text())
        target = Path(self.keep) / f"{self.name(number)}-{self.seed}-{self.case(number)}{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy2(source, target)
        return target


def _run(job: _Job, limit_s: float, tallies: dict[str, Tally]) -> int:
    """Let one child run cases until all are done or it dies. Return the number of the next case."""
    path = os.pathsep.join([str(HELPERS.parent), *sys.path])
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "helpers.fuzzing", json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **quiet, "PYTHONPATH": path},
        )
        assert child.stdout is not None
        current, why = None, ""
        try:
            for told in _told(child.stdout, limit_s):
                if told is None:
                    why = f"no end within {limit_s:g} s"
                    break
                current = told["number"] if "error" not in told else None
                if current is None:
                    _count(tallies[job.name(told["number"])], job, told)
        except BaseException:
            why = "interrupted"
            raise
        finally:
            if why:
                child.kill()
            code = child.wait()
            child.stdout.close()
        if current is None and (why or code):
            errors.seek(0)
            raise RuntimeError(f"the child of fuzzing failed: {why or errors.read().decode(errors='replace')}")
    if current is None:
        return job.count * len(job.formats)
    what = f"case {job.case(current)} ({job.kept(current)}): {why or f'the process died with {code}'}"
    tallies[job.name(current)].failures.append(what)
    return int(current) + 1


def _told(pipe: IO[bytes], limit_s: float) -> Iterator[dict[str, Any] | None]:
    """The child's lines; None when it was silent for too long."""
    rest, patience = b"", max(limit_s, START_S)
    while True:
        if not select.select([pipe], [], [], patience)[0]:
            yield None
            return
        raw = os.read(pipe.fileno(), 1 << 16)
        if not raw:
            return
        *lines, rest = (rest + raw).split(b"\n")
        patience = limit_s
        yield from map(json.loads, lines)


def _count(tally: Tally, job: _Job, told: dict[str, Any]) -> None:
    if told["error"] is not None:
        tally.failures.append(f"case {job.case(told['number'])} ({told['kept']}): {told['error']}")
    elif told["refused"]:
        tally.refused += 1
    else:
        tally.accepted += 1


def _format(name: str) -> Format:
    if name in MODULES:
        module = importlib.import_module(MODULES[name])
        read = getattr(module, "read", None) or module.check
        return Format(lambda *which: (one[1] if isinstance(one, tuple) else one for one in module.cases(*which)), read)
    where, _, own = name.rpartition(":")
    found: Format = importlib.import_module(where or MANY).FORMATS[own]
    return found


def _child(job: _Job) -> None:
    """Run cases from `first` on; one line on standard output before each and one after."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may come between
    warnings.simplefilter("ignore")
    formats = {name: _format(name) for name in job.formats}
    for name in formats:
        (Path(job.work) / name).mkdir(parents=True, exist_ok=True)
    cases = {name: form.cases(job.seed, job.count, Path(job.work) / name) for name, form in formats.items()}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(job.count * len(job.formats)):
        name = job.name(number)
        path = next(cases[name])
        if number >= job.first:
            if number == job.first:
                _bound(job.memory)
            (Path(job.work) / "now").write_text(str(path))
            print(json.dumps({"number": number}), file=out, flush=True)
            error, refused = _checked(formats[name], path)
            kept = None if error is None else str(job.kept(number))
            told = {"number": number, "refused": refused, "error": error, "kept": kept}
            print(json.dumps(told), file=out, flush=True)
        _removed(path)


def _bound(memory: int) -> None:
    """Let this process have so many bytes of memory more than now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))


def _checked(form: Format, path: Path) -> tuple[str | None, bool]:
    """(what went wrong, whether the file was refused)."""
    from foresay.errors import ForesayError

    try:
        form.check(path)
    except ForesayError as caught:
        return (f"an error of several lines: {str(caught)[:200]!r}" if "\n" in str(caught) else None), True
    except BaseException as caught:
        place = traceback.extract_tb(caught.__traceback__)[-1]
        text = f"{type(caught).__name__}: {str(caught)[:150]!r} at {Path(place.filename).name}:{place.lineno}"
        return text, False
    return None, False


def _removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of scripts/fuzz: a line for each format, 1 where something failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000, help="cases in all, over the formats (20000)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of every case (0)")
    parser.add_argument("--formats", help="some of the formats, separated by commas (all)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for cases that fail")
    given = parser.parse_args(arguments)
    known = names()
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
