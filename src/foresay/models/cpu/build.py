"""Compilation of the kernels for this machine, cached on disk.

Owns the choice of a compiler, its flags, and the path of the result. A failure is logged once, in one line, and forward passes
then run on PyTorch's operations; no failure is an error for the caller.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foresay.files import cache_dir
from foresay.models.cpu import levels
from foresay.models.cpu.library_files import (
    DamagedLibraryError,
    UntrustedLibraryError,
    check_owner,
    make_private,
    open_library,
    write_library,
)

logger = logging.getLogger("foresay")

SOURCES = tuple(sorted(one for one in Path(__file__).parent.iterdir() if one.suffix in (".cpp", ".h")))
"""Source files; those that end in .cpp are compiled side by side, and include the others."""
COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-Wno-psabi"),
)
_GCC_FLAGS = ("--param", "vect-max-peeling-for-alignment=0", "--param", "avoid-fma-max-bits=0")
"""Flags that make sums independent of alignment and of which copy of a loop computes them. Tuning for some processors (Zen, Alder
Lake), GCC would fuse multiply and add in one copy of a loop and round between them in the other."""
TIMEOUT_S = 300.0
"""Seconds that a call of the compiler may take."""
SWITCH = "FORESAY_NATIVE"
"""Environment variable: "0" disables the compiled kernels."""
ISA = "FORESAY_ISA"
"""Environment variable: compile the kernels for an instruction set of levels.py instead of all that this processor has."""

_reasons: list[str] = []


class BuildError(Exception):
    """The kernels cannot be compiled; the message is the reason."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if there are none; the first call compiles them and logs a failure."""
    if os.environ.get(SWITCH) == "0":
        _reasons.append(f"{SWITCH}=0 is set")
        return None
    try:
        path = library_path()
        return _usable(path)
    except UntrustedLibraryError as error:
        reason = f"{error}; set FORESAY_CACHE to a folder that only you can write to"
    except (BuildError, DamagedLibraryError, AttributeError, RuntimeError) as error:
        reason = str(error)  # RuntimeError: no home folder; AttributeError: a function is missing
    except OSError as error:
        reason = f"cannot use {str(error.filename or path)!r}: {error.strerror or error}"
    _reasons.append(reason)
    logger.warning("forward passes run without compiled kernels: %s", reason)
    return None


def _opened(path: Path, *, any_owner: bool = False) -> ctypes.CDLL:
    """Open kernels and declare their functions. Raises as `open_library` and `declare_functions` do."""
    from foresay.models.cpu.structs import declare_functions  # needs PyTorch, which compiling does not

    return declare_functions(open_library(path, any_owner=any_owner))


def _usable(path: Path) -> ctypes.CDLL:
    """Return the kernels at a path. Those in the cache are compiled if they are missing, damaged or not of this user.

    Those of the package are replaced by those of the compiler if they are damaged. Raises BuildError for damaged ones in
    $FORESAY_KERNELS, which is only read.
    """
    packaged, mine = path.parent == levels.PREBUILT, path.parent == _folder()
    if (packaged or mine) and levels.unmatched():
        logger.warning(
            "%s; %s", levels.unmatched(), "they are compiled for it" if mine else "those of the package are used"
        )
    try:
        if mine:
            make_private(path.parent)
        elif not packaged:
            check_owner(path.parent, path.parent.stat())
    except UntrustedLibraryError as error:
        raise error if mine else BuildError(f"{error}; change its owner or mode, or unset {levels.FOLDER}") from None
    try:
        return _opened(path, any_owner=packaged)
    except FileNotFoundError:
        if not mine:
            raise
    except (UntrustedLibraryError, DamagedLibraryError, AttributeError, OSError) as error:
        if packaged:
            logger.warning("the kernels in the package are not used: %s", error)
            return _usable(library_path(prebuilt=False))
        if not mine:
            raise BuildError(f"{path} is damaged ({error}); compile it again, or unset {levels.FOLDER}") from None
        is_foreign = isinstance(error, UntrustedLibraryError)
        logger.log(logging.WARNING if is_foreign else logging.INFO, "%s; the kernels are compiled again", error)
    _compile(path, _native())
    return _opened(path)


def is_compiled() -> bool:
    """True if the kernels for this machine are already compiled."""
    try:
        return library_path().is_file()
    except (BuildError, OSError, RuntimeError):
        return False


def failure_reason() -> str:
    """Return the reason why `library` returned None; "" if it did not."""
    return _reasons[-1] if _reasons else ""


def library_path(*, prebuilt: bool = True) -> Path:
    """Return the path of the kernels: precompiled ones in $FORESAY_KERNELS, else those of this machine's compiler in the cache.

    prebuilt: prefer kernels in the installed package to the compiler's. Raises BuildError if there are none and no compiler.
    """
    processor, isa = processor_flags(), os.environ.get(ISA, "")
    if not isa and (found := levels.precompiled(source_digest(), processor, prebuilt=prebuilt)) is not None:
        return found
    try:
        compiler = _compiler()
    except BuildError as error:
        raise BuildError("; ".join(filter(None, (str(error), levels.unmatched())))) from None
    return _folder() / f"kernels-{source_digest(processor, isa, _version(tuple(compiler)), *compiler)}.so"


def _folder() -> Path:
    return cache_dir() / "native"


def precompile(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Compile the kernels into a folder for these instruction sets of this kind of machine, or for all. Raises BuildError."""
    if not levels.levels():
        raise BuildError(
            f"no instruction sets are named for a {platform.machine()} machine; a compiler makes the kernels there"
        )
    if unknown := sorted(set(names) - set(levels.levels())):
        raise BuildError(f"{', '.join(unknown)}: the instruction sets are {', '.join(levels.levels())}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {level: levels.path_of(folder, level, source_digest()) for level in names or levels.levels()}
    for level, path in paths.items():
        _compile(path, levels.arguments(level))
    return list(paths.values())


def source_digest(*more: str) -> str:
    """Return a digest of the sources of the kernels, of the compiler's arguments and of further strings.

    The layout of packed weights depends on the sources.
    """
    key = "\n".join([*(one.read_text(encoding="utf-8") for one in SOURCES), *more, *_FLAGS, *_GCC_FLAGS])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _compiler() -> list[str]:
    """Return the path of a compiler, followed by the arguments in $CXX."""
    command = shlex.split(os.environ.get("CXX", ""))
    for name in command[:1] or COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path, *command[1:]]
    raise BuildError(f"no C++ compiler ({command[0] if command else ', '.join(COMPILERS)}) was found")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"]).stdout.partition("\n")[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_S:.0f} s") from None


def processor_flags() -> str:
    """Return a description of the processor that differs between instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _native() -> list[str]:
    """The compiler's arguments for the instructions of $FORESAY_ISA, or for all of this processor. Raises BuildError."""
    isa = os.environ.get(ISA, "")
    if not isa:
        return ["-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]
    if isa not in levels.levels():
        raise BuildError(f"{ISA}={isa} must be one of {', '.join(levels.levels()) or 'none'} on this machine")
    if not levels.supported(isa, processor_flags()):
        raise BuildError(f"{ISA}={isa} needs instructions that this processor does not have")
    return levels.arguments(isa)


def instructions() -> str:
    """Return the instructions that the kernels use, such as "AVX-512, VNNI, BF16"; "" without kernels."""
    found = library()
    return "" if found is None else found.foresay_instructions().decode() + (", AMX" if found.foresay_tiles() else "")


def _compile(path: Path, machine: Sequence[str]) -> None:
    """Compile the kernels to a path. machine: the compiler's arguments that select the instruction set."""
    compiler = _compiler()
    more = () if "clang" in _version(tuple(compiler)).lower() else _GCC_FLAGS
    units = [source for source in SOURCES if source.suffix == ".cpp"]
    with write_library(path) as output, ThreadPoolExecutor(len(units)) as pool:
        objects = [output.with_suffix(f".{unit.stem}.o") for unit in units]

        def run(*arguments: str | Path) -> None:
            done = _run([*compiler, *_FLAGS, *machine, *more, "-o", *map(str, arguments)])
            if done.returncode != 0:
                first = next(iter(done.stderr.strip().splitlines()), "no message")
                raise BuildError(f"{' '.join(compiler)} failed: {first}")

        list(pool.map(lambda unit, made: run(made, "-c", unit), units, objects))
        run(output, "-shared", *objects)
