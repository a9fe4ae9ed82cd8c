"""The kernels compiled for this machine, once, and kept.

Owns finding a compiler, its flags, and where the result is kept. What goes wrong is said once, in a line, and passes are
then made of PyTorch's operations; nothing here is an error.
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
from pathlib import Path

from foresay.files import cache_dir
from foresay.models.huggingface.native import levels
from foresay.models.huggingface.native.structs import declared
from foresay.models.huggingface.native.trust import DamagedError, UntrustedError, make_private, opened, written

logger = logging.getLogger("foresay")

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        "kernels.cpp",
        "attention.h",
        "blocks.h",
        "checks.h",
        "dots.h",
        "layer.h",
        "numbers.h",
        "pool.h",
        "products.h",
    )
)
"""The first is compiled; the others are what it includes."""
COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
_GCC_FLAGS = ("--param", "vect-max-peeling-for-alignment=0", "--param", "avoid-fma-max-bits=0")
"""A sum depends neither on where its numbers lie, nor on which copy of a loop computes it: tuned for some processors (Zen, Alder
Lake), GCC would round between product and sum in one copy and not in the other."""
_TIMEOUT_S = 300.0
SWITCH = "FORESAY_NATIVE"
"""Environment variable: "0" leaves the kernels alone."""


_reasons: list[str] = []


class BuildError(Exception):
    """Why there are no kernels."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none, which is logged the first time."""
    if os.environ.get(SWITCH) == "0":
        _reasons.append(f"{SWITCH}=0 is set")
        return None
    try:
        path = kept()
        make_private(path.parent)
        found = _kept_library(path)
        if found is None:
            if path.parent != _folder():
                raise BuildError(f"{path} is damaged; compile it again, or unset {levels.FOLDER}")
            _compile(path, _native())
            found = declared(opened(path))
        return found
    except UntrustedError as error:
        why = f"{error}; set FORESAY_CACHE to a folder that only you can write to"
    except (BuildError, DamagedError, AttributeError, RuntimeError) as error:
        why = str(error)  # RuntimeError: nobody's home folder; AttributeError: no such function
    except OSError as error:
        why = f"cannot write {str(error.filename or path)!r}: {error.strerror or error}"
    _reasons.append(why)
    logger.warning("passes are made without compiled kernels: %s", why)
    return None


def _kept_library(path: Path) -> ctypes.CDLL | None:
    """The kernels that were compiled before; None where they are to be compiled."""
    try:
        return declared(opened(path))
    except FileNotFoundError:
        return None
    except UntrustedError as error:
        logger.warning("%s; the kernels are compiled again", error)
    except (DamagedError, AttributeError, OSError) as error:
        logger.info("%s is damaged (%s) and compiled again", path, error)
    return None


def is_kept() -> bool:
    """Whether the kernels of this machine are compiled already."""
    try:
        return kept().is_file()
    except (BuildError, OSError, RuntimeError):
        return False


def why_not() -> str:
    """Why there are no kernels, once `library` gave none; "" where it gave some."""
    return _reasons[-1] if _reasons else ""


def kept() -> Path:
    """The file of the compiled kernels: compiled beforehand in $FORESAY_KERNELS, else by this machine's compiler, in the cache.

    Raises BuildError if there are none and no compiler.
    """
    processor = _processor()
    if (found := levels.prepared(_digest(), processor)) is not None:
        return found
    compiler = _compiler()
    return _folder() / f"kernels-{_digest(processor, _version(tuple(compiler)), *compiler)}.so"


def _folder() -> Path:
    return cache_dir() / "native"


def prepare(folder: Path) -> list[Path]:
    """Compile the kernels into a folder for each named instruction set of this kind of machine. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {level: levels.place(folder, level, _digest()) for level in levels.levels()}
    for level, path in made.items():
        _compile(path, f"-march={level}")
    return list(made.values())


def _digest(*more: str) -> str:
    """A digest of the sources, the compiler's arguments and further texts."""
    said = "\n".join([*(one.read_text(encoding="utf-8") for one in SOURCES), *more, *_FLAGS, *_GCC_FLAGS])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _compiler() -> list[str]:
    """A compiler and the arguments that $CXX brings."""
    own = shlex.split(os.environ.get("CXX", ""))
    for name in own[:1] or COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found, *own[1:]]
    raise BuildError(f"no C++ compiler ({own[0] if own else ', '.join(COMPILERS)}) was found")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"]).stdout.partition("\n")[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {_TIMEOUT_S:.0f} s") from None


def _processor() -> str:
    """What tells processors with other instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _native() -> str:
    """The compiler's argument for all instructions of this processor."""
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _compile(path: Path, machine: str) -> None:
    compiler = _compiler()
    more = () if "clang" in _version(tuple(compiler)).lower() else _GCC_FLAGS
    with written(path) as place:
        done = _run([*compiler, *_FLAGS, machine, *more, "-o", str(place), str(SOURCES[0])])
        if done.returncode != 0:
            first = next(iter(done.stderr.strip().splitlines()), "no message")
            raise BuildError(f"{' '.join(compiler)} failed: {first}")
