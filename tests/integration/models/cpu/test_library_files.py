"""The kept library of kernels: damaged, planted or old files are never opened, and missing kernels are reported."""

from __future__ import annotations

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

from foresay.models.cpu import build, levels
from helpers import tiny
from helpers.forks import fork
from helpers.small_kernels import FUNCTIONS, source

STRANGER = 12345
USABLE = [level for level in levels.levels() if levels.supported(level, build.processor_flags())]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache of the test's own, and kernels that take no time to compile."""
    (tmp_path / "kernels.cpp").write_text(source(*FUNCTIONS))
    monkeypatch.setattr(build, "SOURCES", (tmp_path / "kernels.cpp",))
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "foresay")
    return caplog


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


def test_structs_of_another_size_are_noticed() -> None:
    build.SOURCES[0].write_text(source(*FUNCTIONS, larger=8))
    assert again() is None and build.failure_reason() == "its struct ProductStruct has another size"


@pytest.mark.parametrize("lost", ["the digest", "a byte of the digest", "half of the library"])
def test_a_library_without_its_digest_is_compiled_anew(lost: str) -> None:
    """Once: a whole one is kept. What maps a torn file dies of it."""
    assert build.library() is not None
    kept = build.library_path()
    digest, whole = kept.with_suffix(".sha256"), kept.read_bytes()
    if lost == "the digest":
        digest.unlink()
    elif lost == "a byte of the digest":
        digest.write_text("0" + digest.read_text()[1:])
    else:
        kept.unlink()  # what is loaded stays as it is
        kept.write_bytes(whole[: len(whole) // 2])
    assert again() is not None
    assert kept.read_bytes() == whole
    assert digest.read_text() == hashlib.sha256(whole).hexdigest()
    before = kept.stat().st_mtime_ns
    assert again() is not None and kept.stat().st_mtime_ns == before


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


@pytest.mark.parametrize("whose", ["group", "all", "stranger"])
def test_a_library_that_others_may_write_is_named_and_not_opened(
    whose: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """It is compiled anew."""
    assert build.library() is not None
    path, planted = build.library_path(), build.library_path().stat().st_ino
    if whose == "stranger":
        give_away(path, monkeypatch)
        reason = f"belongs to user {STRANGER}"
    else:
        path.chmod(mode := {"group": 0o664, "all": 0o646}[whose])
        reason = f"can be written by other users (mode {mode:o}) and is not used"
    assert again() is not None
    [message] = said.messages
    assert message.startswith(f"{path} {reason}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 and path.stat().st_ino != planted


def test_a_strangers_folder_is_named_and_nothing_is_read_from_it(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    assert build.library() is not None
    give_away(build.library_path().parent, monkeypatch)
    assert again() is None
    [message] = said.messages
    assert f"{build.library_path().parent} belongs to user {STRANGER}" in message and "FORESAY_CACHE" in message


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_our_folder_is_for_us_alone_and_opened_again_under_any_mask(mask: int) -> None:
    usual = os.umask(mask)
    try:
        assert build.library() is not None
        folder, before = build.library_path().parent, build.library_path().stat().st_mtime_ns
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)
        assert again() is not None and build.library_path().stat().st_mtime_ns == before
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
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


def compiler(folder: Path, does: str) -> str:
    """A program in place of a compiler, which names its version."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo 1\n{does}\n')
    path.chmod(0o755)
    return str(path)


def test_a_user_without_kernels_gets_one_line(tmp_path: Path) -> None:
    """By the command line, whose loading of a model keeps everything else off standard error."""
    cxx = compiler(tmp_path, 'echo "No space left on device" >&2; exit 1')
    options = ("--model", str(tiny.save(tmp_path / "model")), "--max-new-tokens", "3")
    changes = {"FORESAY_CACHE": str(tmp_path / "new"), "CXX": cxx}
    process = fork(["foresay", "generate", *options, "hello"], tmp_path / "out", **changes)
    process.join(60)
    shown = (tmp_path / "out.err").read_text().splitlines()
    assert process.exitcode == 0, shown
    [line] = [line for line in shown if "compiled kernels" in line]
    assert line.startswith("forward passes run without compiled kernels: ") and "No space left" in line


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("a compiler", "no-such-compiler"),
        ("a folder", "cannot use"),
        ("success", "failed: "),
        ("room on the disk", "No space left"),
        ("time", "took more than"),
        ("an option", "--no-such-option"),
    ],
)
def test_what_is_lacking_is_one_line(
    lacking: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """Logged once; nothing is left on a full disk."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if lacking == "a folder":
        (tmp_path / "cache").write_text("a file where the folder would be")
    elif lacking == "success":
        build.SOURCES[0].write_text("this is no C++")
    elif lacking == "room on the disk":
        monkeypatch.setattr(os, "fsync", full)
    elif lacking == "time":
        monkeypatch.setenv("CXX", compiler(tmp_path, "exec sleep 60"))
        monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    else:
        monkeypatch.setenv("CXX", "no-such-compiler" if lacking == "a compiler" else "g++ --no-such-option")
    assert build.library() is None and build.library() is None
    [message] = said.messages
    assert message.startswith("forward passes run without compiled kernels: ") and reason in message
    if lacking == "room on the disk":
        assert not list(build.library_path().parent.iterdir())
    elif lacking == "an option":
        with_arguments = build.library_path()
        monkeypatch.setenv("CXX", "g++")
        assert build.library_path() != with_arguments


# -- compiled in advance ---------------------------------------------------------------------------------------------

ALL = (
    "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16 avx_vnni abm avx avx2 bmi1 bmi2 f16c fma movbe"
)
ALL += " amx_tile amx_int8 amx_bf16 asimd asimddp bf16 i8mm"
PROCESSOR = build.processor_flags()
"""The processor of this machine, whose kernels alone may be opened."""


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The kernels for every named instruction set, the best first, in $FORESAY_KERNELS; no compiler afterwards."""
    made = build.precompile(tmp_path / "prepared")
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "prepared"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "processor_flags", lambda: f"flags : {ALL}")
    assert len(made) == len(levels.levels()) > 0
    return made


def test_kernels_compiled_beforehand_need_no_compiler(
    prepared: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor gets the best ones that it can run, of the same source."""
    assert build.library_path() == prepared[0] and build.is_compiled()
    monkeypatch.setattr(build, "processor_flags", lambda: PROCESSOR)
    assert build.library_path() == prepared[levels.levels().index(USABLE[0])] and build.library() is not None
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(build, "processor_flags", lambda: f"flags : {ALL}")
    text = build.SOURCES[0].read_text()
    build.SOURCES[0].write_text(f"{text}// changed")
    assert again() is None and "no C++ compiler" in build.failure_reason()
    build.SOURCES[0].write_text(text)
    fewer = ALL.replace("avx512", "").replace("vnni", "").replace("dp", "")
    monkeypatch.setattr(build, "processor_flags", lambda: f"flags : {fewer}")
    assert build.library_path() == prepared[-1]
    monkeypatch.setattr(build, "processor_flags", lambda: "flags : sse2 fp")
    assert again() is None and "no C++ compiler (no-such-compiler)" in build.failure_reason()


def test_an_instruction_set_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If this processor has it; $FORESAY_KERNELS is not read then."""
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "none"))
    monkeypatch.setenv("FORESAY_ISA", "mmx")
    assert again() is None and build.failure_reason().startswith("FORESAY_ISA=mmx must be one of ")
    paths = set()
    for level in levels.levels():
        monkeypatch.setenv("FORESAY_ISA", level)
        if levels.supported(level, build.processor_flags()):
            assert again() is not None, build.failure_reason()
            paths.add(build.library_path())
        else:
            assert again() is None and "needs instructions that this processor does not have" in build.failure_reason()
    assert paths and all(path.is_file() for path in paths)
    monkeypatch.setattr(build, "processor_flags", lambda: "flags : sse2")
    assert again() is None and "needs instructions" in build.failure_reason()


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
    monkeypatch.setattr(build, "processor_flags", lambda: PROCESSOR)
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """A misspelt folder; with a compiler a warning, without one the reason."""
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "preparde"))
    assert build.library() is None
    assert f"FORESAY_KERNELS={tmp_path / 'preparde'} has no kernels for this version" in build.failure_reason()
    monkeypatch.delenv("CXX")
    assert again() is not None
    assert "preparde has no kernels for this version of foresay and this processor; they are compiled" in said.text


def test_unknown_machines_and_instruction_sets_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=f"sse9: the instruction sets are {levels.levels()[0]}, "):
        build.precompile(tmp_path / "none", ["sse9"])
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
    monkeypatch.setattr(build, "processor_flags", lambda: f"flags : {ALL}")
    return made[0]


def test_kernels_in_the_package_need_no_compiler(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mode may be any: an installation with umask 002 makes them writable for the group, like the package's Python files."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library_path() == packaged and build.library() is not None
    for path in (packaged, packaged.with_suffix(".sha256"), packaged.parent):
        path.chmod(path.stat().st_mode | 0o020)
    assert again() is not None, build.failure_reason()
    assert not (tmp_path / "cache").exists()


def test_a_chosen_folder_comes_before_the_package(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """One that does not match is named."""
    monkeypatch.setenv("FORESAY_KERNELS", str(tmp_path / "chosen"))
    assert build.library() is not None and build.library_path() == packaged
    assert f"FORESAY_KERNELS={tmp_path / 'chosen'} has no kernels" in said.text
    [own] = build.precompile(tmp_path / "chosen", USABLE[:1])
    assert build.library_path() == own != packaged


def test_damaged_kernels_in_the_package_are_compiled(packaged: Path, said: pytest.LogCaptureFixture) -> None:
    packaged.with_suffix(".sha256").write_text("0" * 64)
    assert build.library() is not None and "the kernels in the package are not used" in said.text
    assert build.library_path(prebuilt=False).is_file() and build.library_path(prebuilt=False) != packaged
