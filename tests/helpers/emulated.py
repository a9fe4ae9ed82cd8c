"""A pytest plugin: the compiled kernels of another kind of processor, in an emulator that pages this process's memory.

FORESAY_EMULATED names an instruction set of levels.py for "aarch64". See emulated_driver.cpp.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from foresay.models.cpu import build, levels, structs

PAGE = 4096
NAMES = ("check", "pass", "multiply", "pack", "rows", "add_norm", "gate", "attend", "bf16_dots", "struct_size")
NAMES += ("instructions", "message", "tiles", "chain", "tree")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "-cpu", "max")


class Processor:
    """The emulated processor. Attributes `foresay_*` are its functions, as those of a ctypes library."""

    def __init__(self, level: str) -> None:
        self.calls = dict.fromkeys(NAMES, 0)
        self._lock = threading.RLock()
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        folder = Path(tempfile.mkdtemp(prefix="foresay-emulated-"))
        arguments = levels._LEVELS["aarch64"][level][0].split()
        flags = [flag for flag in build._FLAGS if flag != "-fPIC"]
        driver = Path(__file__).with_name("emulated_driver.cpp")
        output = ["-static", "-o", str(folder / "driver")]
        subprocess.run(
            [COMPILER, *flags, *arguments, *build._GCC_FLAGS, *output, f"-I{build.SOURCES[0].parent}", str(driver)],
            check=True,
        )
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*EMULATOR, str(folder / "driver")], stdin=pipe, stdout=pipe)

    def __getattr__(self, name: str) -> Any:
        function = Function(self, NAMES.index(name.removeprefix("foresay_")))
        setattr(self, name, function)
        return function

    def call(self, index: int, numbers: list[int]) -> int | bytes:
        with self._lock:
            self.calls[NAMES[index]] += 1
            self._send(struct.pack("<q16q", index, *numbers, *[0] * (16 - len(numbers))))
            while True:
                kind = self._receive(1)
                if kind == b"T":
                    return self._receive(*struct.unpack("<Q", self._receive(8)))
                if kind == b"D":
                    break
                assert kind == b"F", kind
                [address] = struct.unpack("<Q", self._receive(8))
                try:
                    page = os.pread(self._memory, PAGE, address)
                except OSError:
                    self._send(b"N")
                    raise AssertionError(f"a kernel touched {address:#x}, which is not mapped") from None
                self._send(b"P" + page)
            result, changed = struct.unpack("<qQ", self._receive(16))
            for address, word in struct.iter_unpack("<Q8s", self._receive(16 * changed)):
                os.pwrite(self._memory, word, address)
            assert isinstance(result, int)
            return result

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _receive(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        assert len(data) == count, f"the emulator ended with {self._process.wait()}"
        return data


class Function:
    """A function of the emulated processor."""

    argtypes: list[Any]
    restype: Any
    errcheck: Any = None

    def __init__(self, processor: Processor, index: int) -> None:
        self._processor, self._index = processor, index

    def __call__(self, *arguments: Any) -> Any:
        numbers = [_number(kind, one) for kind, one in zip(self.argtypes, arguments, strict=True)]
        result = self._processor.call(self._index, numbers)
        if self.errcheck is not None:
            self.errcheck(result, self, arguments)
        return result


def _number(kind: Any, value: Any) -> int:
    if kind is ctypes.c_float:
        [number] = struct.unpack("<i", struct.pack("<f", value))
        return int(number)
    if value is None:
        return 0
    return int(value) if isinstance(value, int) else int(ctypes.cast(value, ctypes.c_void_p).value or 0)


def pytest_configure(config: pytest.Config) -> None:
    processor: Any = Processor(os.environ["FORESAY_EMULATED"])
    library = structs.declare_functions(processor)
    build.library.cache_clear()
    build._opened = lambda path, **_: library  # type: ignore[assignment]
    config._foresay_processor = processor  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    processor = config._foresay_processor  # type: ignore[attr-defined]
    found = processor.foresay_instructions().decode()
    counts = ", ".join(f"{name} {count}" for name, count in processor.calls.items() if count)
    terminalreporter.write_line(f"emulated kernels with {found}: {counts}")
