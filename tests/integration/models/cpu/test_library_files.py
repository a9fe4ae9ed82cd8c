"""The kept library of kernels: damaged, planted or old files are never opened, and missing kernels are reported."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foresay.models.cpu import build, levels, structs
from helpers import tiny

FUNCTIONS = (
    "message",
    "check",
    "pass",
    "chain",
    "multiply",
    "pack",
    "rows",
    "bf16_dots",
    "tiles",
    "instructions",
    "add_norm",
    "gate",
    "attend",
    "mix",
)
SMALL = '#define FORESAY(name) extern "C" long foresay_##name() { return 0; }\n'
STRANGER = 12345
USABLE = [level for level in levels.levels() if levels.supported(level, build._processor())]
TORN = """
import sys
from pathlib import Path
from foresay.models.cpu import build, levels
build.SOURCES = (Path(sys.argv[1]),)
assert build.library() is not None
whole = build.library_path().read_bytes()
for share in (0.9, 0.5, 0.1, 0.0):
    build.library_path().unlink()  # what is loaded stays as it is
    build.library_path().write_bytes(whole[: int(share * len(whole))])
    build.library.cache_clear()
    assert build.library() is not None, build.failure_reason()
    assert build.library_path().read_bytes() == whole
print("mended")
"""


def source(*names: str, larger: int = 0) -> str:
    """A library that compiles at once, of these functions. larger: bytes that its structs have more than ours."""
    sizes = ", ".join(str(ctypes.sizeof(kind) + larger) for kind in structs.STRUCTS)
    size_of = f'extern "C" long foresay_struct_size(long i) {{ long sizes[] = {{{sizes}}}; return sizes[i]; }}\n'
    return SMALL + size_of + "\n".join(f"FORESAY({name})" for name in names)


def test_structs_of_another_size_are_noticed() -> None:
    build.SOURCES[0].write_text(source(*FUNCTIONS, larger=8))
    assert again() is None and build.failure_reason() == "its struct ProductStruct has another size"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache of the test's own, and kernels that take no time to compile."""
    (tmp_path / "kernels.cpp").write_text(source(*FUNCTIONS))
    monkeypatch.setattr(build, "SOURCES", (tmp_path / "kernels.cpp",))
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def again() -> Any:
    build.library.cache_clear()
    return build.library()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's from now on; where only root may give files away, it looks like that."""
    if os.getuid() == 0:
        os.chown(path, STRANGER, STRANGER)
        return
    given = path.stat().st_ino
    for name in ("stat", "fstat"):
        intact: Any = getattr(os, name)

        def changed(*args: Any, intact: Any = intact, **named: Any) -> os.stat_result:
            found = intact(*args, **named)
            return os.stat_result((*found[:4], STRANGER, *found[5:])) if found.st_ino == given else found

        monkeypatch.setattr(os, name, changed)


def test_a_torn_library_is_compiled_anew(tmp_path: Path) -> None:
    """In a process of its own: what maps a torn file dies of it."""
    command = [sys.executable, "-c", TORN, str(build.SOURCES[0])]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment(), check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "mended"), done.stderr[-500:]


@pytest.mark.parametrize("lost", ["the digest", "a byte of the library", "a byte of the digest"])
def test_a_library_without_its_digest_is_compiled_anew(lost: str) -> None:
    assert build.library() is not None
    kept = build.library_path()
    digest, whole = kept.with_suffix(".sha256"), kept.read_bytes()
    if lost == "the digest":
        digest.unlink()
    elif lost == "a byte of the library":
        kept.unlink()  # what is loaded stays as it is
        kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        digest.write_text("0" + digest.read_text()[1:])
    assert again() is not None
    assert kept.read_bytes() == whole
    assert digest.read_text() == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("lacking", ["gate", "message"])
def test_a_library_that_lacks_a_function_is_compiled_anew(lacking: str, tmp_path: Path) -> None:
    old = tmp_path / "old.cpp"
    old.write_text(source(*(name for name in FUNCTIONS if name != lacking)))
    kept = build.library_path()
    kept.parent.mkdir(mode=0o700, parents=True)
    subprocess.run([*build._compiler(), "-shared", "-fPIC", "-o", str(kept), str(old)], check=True)
    kept.chmod(0o644)
    kept.with_suffix(".sha256").write_text(hashlib.sha256(kept.read_bytes()).hexdigest())
    kept.with_suffix(".sha256").chmod(0o644)
    before = kept.read_bytes()
    found = build.library()
    assert found is not None, build.failure_reason()
    assert getattr(found, f"foresay_{lacking}") is not None
    assert kept.read_bytes() != before


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_library_that_others_may_write_is_named_and_not_opened(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    assert build.library() is not None
    build.library_path().chmod(mode)
    with caplog.at_level(logging.WARNING, "foresay"):
        assert again() is not None
    [said] = caplog.messages
    assert said.startswith(f"{build.library_path()} can be written by other users (mode {mode:o}) and is not used")
    assert stat.S_IMODE(build.library_path().stat().st_mode) == 0o644, "compiled anew"


def test_a_strangers_library_is_named_and_not_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.library() is not None
    planted = build.library_path().stat().st_ino
    give_away(build.library_path(), monkeypatch)
    with caplog.at_level(logging.WARNING, "foresay"):
        assert again() is not None
    [said] = caplog.messages
    assert said.startswith(f"{build.library_path()} belongs to user {STRANGER}")
    assert build.library_path().stat().st_ino != planted, "compiled anew"


def test_a_strangers_folder_is_named_and_nothing_is_read_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.library() is not None
    give_away(build.library_path().parent, monkeypatch)
    with caplog.at_level(logging.WARNING, "foresay"):
        assert again() is None
    [said] = caplog.messages
    assert f"{build.library_path().parent} belongs to user {STRANGER}" in said and "FORESAY_CACHE" in said


def test_our_folder_is_for_us_alone() -> None:
    assert build.library() is not None
    folder = build.library_path().parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert again() is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_is_kept_is_opened_again_under_any_mask(mask: int) -> None:
    usual = os.umask(mask)
    try:
        assert build.library() is not None
        before = build.library_path().stat().st_mtime_ns
        assert again() is not None and build.library_path().stat().st_mtime_ns == before
    finally:
        os.umask(usual)


@pytest.mark.parametrize("planted", ["a link", "a folder", "a pipe"])
def test_what_is_no_file_is_not_opened(planted: str, tmp_path: Path) -> None:
    assert build.library() is not None
    kept = build.library_path()
    kept.rename(tmp_path / "other.so")
    if planted == "a link":
        kept.symlink_to(tmp_path / "other.so")
    elif planted == "a folder":
        kept.mkdir()
    else:
        os.mkfifo(kept)
    assert (again() is None) == (planted == "a folder")
    assert planted == "a folder" or (kept.is_file() and not kept.is_symlink())


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_whoever_has_no_kernels_is_told_once(tmp_path: Path) -> None:
    """By the command line, whose loading of a model keeps everything else off standard error.

    `test_native.py` has the other reasons, as they are logged.
    """
    folder, changes = tiny.save(tmp_path / "model"), {"FORESAY_CACHE": str(tmp_path / "new")}
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo 1\necho "No space left on device" >&2\nexit 1\n')
    compiler.chmod(0o755)
    changes["CXX"] = str(compiler)
    done = tiny.foresay("generate", "--model", str(folder), "--max-new-tokens", "3", "hello", **changes)
    shown = done.stderr.decode().splitlines()
    assert done.returncode == 0, shown
    [line] = [line for line in shown if "compiled kernels" in line]
    assert line.startswith("forward passes run without compiled kernels: ") and "No space left" in line


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "foresay"):
        assert build.library() is None
    [said] = caplog.messages
    assert said.startswith("forward passes run without compiled kernels: cannot use ") and "No space left" in said
    assert not list(build.library_path().parent.iterdir()), "nothing is left"


def test_they_are_compiled_once_or_where_damaged_and_may_be_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    kept = build.library_path()
    kept.parent.mkdir()
    kept.write_bytes(b"\x7fELF and no more")
    assert build.library() is not None
    assert kept.stat().st_size > 1000
    before = kept.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() is not None
    assert kept.stat().st_mtime_ns == before
    build.library.cache_clear()
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.library() is None


# -- compiled in advance ---------------------------------------------------------------------------------------------

ALL = (
    "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16 avx_vnni abm avx avx2 bmi1 bmi2 f16c fma movbe"
)
ALL += " amx_tile amx_int8 amx_bf16 asimd asimddp bf16 i8mm"
PROCESSOR = build._processor()
"""The processor of this machine, whose kernels alone may be opened."""


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The kernels for every named instruction set, the best first, in $FORESAY_KERNELS; no compiler afterwards."""
    made = build.precompile(tmp_path / "prepared")
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "prepared"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_processor", lambda: f"flags : {ALL}")
    assert len(made) == len(levels.levels()) > 0
    return made


def test_kernels_compiled_beforehand_need_no_compiler(
    prepared: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.library_path() == prepared[0] and build.is_compiled()
    monkeypatch.setattr(build, "_processor", lambda: PROCESSOR)
    assert build.library_path() == prepared[levels.levels().index(USABLE[0])] and build.library() is not None
    assert not (tmp_path / "cache").exists()


def test_a_processor_gets_the_best_kernels_that_it_can_run(
    prepared: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build, "_processor", lambda: f"flags : {ALL.replace('avx512', '').replace('vnni', '').replace('dp', '')}"
    )
    assert build.library_path() == prepared[-1]
    monkeypatch.setattr(build, "_processor", lambda: "flags : sse2 fp")
    assert build.library() is None and "no C++ compiler (no-such-compiler)" in build.failure_reason()


def test_an_instruction_set_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If this processor has it; $FORESAY_KERNELS is not read then."""
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "none"))
    monkeypatch.setenv("FORESAY_ISA", "mmx")
    assert again() is None and build.failure_reason().startswith("FORESAY_ISA=mmx must be one of ")
    paths = set()
    for level in levels.levels():
        monkeypatch.setenv("FORESAY_ISA", level)
        if levels.supported(level, build._processor()):
            assert again() is not None, build.failure_reason()
            paths.add(build.library_path())
        else:
            assert again() is None and "needs instructions that this processor does not have" in build.failure_reason()
    assert paths and all(path.is_file() for path in paths)
    monkeypatch.setattr(build, "_processor", lambda: "flags : sse2")
    assert again() is None and "needs instructions" in build.failure_reason()


def test_kernels_of_another_source_are_not_used(prepared: list[Path]) -> None:
    build.SOURCES[0].write_text(source(*FUNCTIONS) + "// changed")
    assert build.library() is None and "no C++ compiler" in build.failure_reason()


@pytest.mark.usefixtures("prepared")
def test_damaged_kernels_compiled_beforehand_are_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler would make them for this processor, and others may have the same file."""
    monkeypatch.delenv("CXX")
    build.library_path().with_suffix(".sha256").write_text("0" * 64)
    before = build.library_path().read_bytes()
    assert build.library() is None and build.failure_reason().startswith(
        f"{build.library_path()} is damaged ({build.library_path()} does not match its digest); compile it again"
    )
    assert build.library_path().read_bytes() == before


def test_the_folder_of_precompiled_kernels_is_only_read(prepared: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be shared; the cache folder's permissions are foresay's own to change."""
    monkeypatch.setattr(build, "_processor", lambda: PROCESSOR)
    folder = prepared[0].parent
    folder.chmod(0o1777)
    assert build.library() is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    folder.chmod(0o777)
    assert again() is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777
    assert f"{folder} can be written by other users" in build.failure_reason()
    assert "unset FORESAY_KERNELS" in build.failure_reason() and "FORESAY_CACHE" not in build.failure_reason()


@pytest.mark.usefixtures("prepared")
def test_precompiled_kernels_that_do_not_match_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt folder; with a compiler a warning, without one the reason."""
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "preparde"))
    assert build.library() is None
    assert f"FORESAY_KERNELS={tmp_path / 'preparde'} has no kernels for this version" in build.failure_reason()
    monkeypatch.delenv("CXX")
    assert again() is not None
    assert "preparde has no kernels for this version of foresay and this processor; they are compiled" in caplog.text


def test_an_unknown_machine_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(build.BuildError, match="no instruction sets are named for a riscv64 machine"):
        build.precompile(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_command_that_compiles_them_names_what_is_missing(tmp_path: Path) -> None:
    """The Dockerfile runs it; `prepared` does the same without compiling the whole source."""
    command = [sys.executable, "-m", "foresay.models.cpu", str(tmp_path / "all")]
    dockerfile = (Path(__file__).parents[4] / "Dockerfile").read_text(encoding="utf-8")
    assert f"RUN python -m {levels.__package__} " in dockerfile
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment(CXX="no-such"), check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "no C++ compiler (no-such) was found")
    done = subprocess.run(command[:-1], capture_output=True, text=True, env=tiny.environment(), check=False)
    assert done.returncode == 1 and "FOLDER" in done.stderr


# -- in the package ------------------------------------------------------------------------------------------------------


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Kernels in the folder of the installed package, for the processor's best instruction set."""
    made = build.precompile(tmp_path / "prebuilt", USABLE[:1])
    monkeypatch.setattr(levels, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_processor", lambda: f"flags : {ALL}")
    return made[0]


def test_kernels_in_the_package_need_no_compiler(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library_path() == packaged and build.library() is not None
    assert not (tmp_path / "cache").exists()


def test_a_chosen_folder_comes_before_the_package(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [own] = build.precompile(tmp_path / "chosen", USABLE[:1])
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "chosen"))
    assert build.library_path() == own != packaged


def test_kernels_in_the_package_may_have_any_mode(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with umask 002 makes them writable for the group, like the Python files of the package."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    for path in (packaged, packaged.with_suffix(".sha256"), packaged.parent):
        path.chmod(path.stat().st_mode | 0o020)
    assert build.library() is not None, build.failure_reason()


def test_a_chosen_folder_that_does_not_match_is_named(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "none"))
    assert build.library() is not None and build.library_path() == packaged
    assert f"FORESAY_KERNELS={tmp_path / 'none'} has no kernels" in caplog.text


def test_damaged_kernels_in_the_package_are_compiled(packaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    packaged.with_suffix(".sha256").write_text("0" * 64)
    assert build.library() is not None and "the kernels in the package are not used" in caplog.text
    assert build.library_path(prebuilt=False).is_file() and build.library_path(prebuilt=False) != packaged


def test_unknown_instruction_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=f"sse9: the instruction sets are {levels.levels()[0]}, "):
        build.precompile(tmp_path, ["sse9"])
