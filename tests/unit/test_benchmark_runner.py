"""The runner of the benchmark scripts: figures are published with what they were measured on, or not at all."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import foresay
from foresay_lab.bench.runners import PromptBlock
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.live_run import Outcome

ROOT = Path(foresay.__file__).parents[2]
LEGEND = {"gain": ("fast / slow", ">= 1.2")}


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_common", ROOT / "benchmarks" / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(module, "commit", lambda: "0123456789")
    module.RESULTS.write_text("# Results\n\n## Question\n\n<!-- a -->\nold\n<!-- /a -->\n\nend\n", encoding="utf-8")
    return module


def parsed(common: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    return common.parsed(common.arguments("First line.\nSecond.", parts=["one"], repeats=3))


def test_instruction_sets(common: ModuleType) -> None:
    for cpuinfo, expected in (
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16\n", ["AVX2", "AVX-512", "VNNI", "BF16"]),
        ("flags : fpu avx2 avx_vnni amx_tile", ["AVX2", "AVX-VNNI", "AMX"]),
        ("Features\t: fp asimd asimddp i8mm bf16", ["dotprod", "i8mm", "BF16"]),
        ("", []),
    ):
        assert common.instruction_sets(cpuinfo) == expected


def test_a_published_table_names_what_it_was_measured_on(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "instruction_sets", lambda: ["AVX2", "BF16"])
    args = parsed(common, monkeypatch, "--write")
    figures = {"gain": 1.23456, "count": 7}
    assert common.publish("a", figures, args, legend=LEGEND, model="a model in bf16", text=["More."]) == 0
    text = common.RESULTS.read_text(encoding="utf-8")
    assert re.search(
        r"\(AVX2, BF16\), \d+ threads; torch \S+; a model in bf16; 20\d\d-\d\d-\d\d; commit 0123456789\.", text
    )
    assert "| fast / slow (`gain`) | 1.235 | >= 1.2 |\n| `count` | 7 |  |\n\nMore.\n<!-- /a -->\n\nend\n" in text
    assert "old" not in text
    assert unnamed(text) == []
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"gain": 1.2346, "count": 7}


def test_a_section_is_written_on_request_and_a_new_one_is_added_at_the_end(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = common.RESULTS.read_text(encoding="utf-8")
    common.publish("a", {"gain": 1.0}, parsed(common, monkeypatch), legend=LEGEND)
    assert common.RESULTS.read_text(encoding="utf-8") == before
    common.publish("a", {"gain": 1.0}, parsed(common, monkeypatch, "--write", "--section", "b"), legend=LEGEND)
    text = common.RESULTS.read_text(encoding="utf-8")
    assert "<!-- a -->\nold\n<!-- /a -->" in text
    assert text.index("<!-- b -->\n### benchmarks/a.py") > text.index("end")


def test_write_is_refused(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for commit, more, error in ((None, [], "git checkout"), ("0123456789", ["--quick"], "--quick")):
        monkeypatch.setattr(common, "commit", lambda commit=commit: commit)
        with pytest.raises(SystemExit) as raised:
            parsed(common, monkeypatch, "--write", *more)
        assert raised.value.code == 2 and error in capsys.readouterr().err


def test_figures_before_a_failing_part_are_published(common: ModuleType) -> None:
    published = []

    def fail() -> Any:
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        common.measured({"one": lambda: {"gain": 2.0}, "two": fail}, None, published.append)
    assert published == [{"gain": 2.0}]


class Fake:
    """A runner whose runs take the given seconds in turn, the warm-up not counted."""

    exact, shares_noise = True, False

    def __init__(self, name: str, *seconds: float) -> None:
        self.name, self._seconds = name, iter([1.0, *seconds])

    def prepare(self, block: PromptBlock) -> None: ...

    def run(self, block: PromptBlock, asks: Sequence[PromptRequest]) -> Outcome:
        return Outcome(next(self._seconds), [[7] * 4 for _ in asks])


def test_ratios_are_to_the_neighbours_in_time(common: ModuleType) -> None:
    asks = [PromptRequest("p", "", (1, 2), PromptItem("p", "text"))]
    block = PromptBlock("set", asks, 1, foresay.SamplingParams(max_new_tokens=4))
    plain, fast = Fake("plain", 2.0, 4.0, 8.0), Fake("fast", 1.0, 3.0)
    found = common.compared(plain, [fast, Fake("broken")], block, 1, between=1)
    assert list(found) == ["plain", "fast"]
    assert found["fast"].gains == pytest.approx([3.0])
    assert str(found["fast"]) == "3.00x (3.00 to 3.00)"
    assert found["plain"].rate == pytest.approx(1.0)
    assert common.spread([1.0, 1.0, 1.1]) == pytest.approx(0.1)


def test_an_engine_in_its_own_interpreter(common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama-cpp-python simulated by a module: the worker generates the exact number of tokens, and errors come back."""
    fake = """
import sys, types
class Llama:
    def __init__(self, path, **more): print("noise")
    def token_eos(self): return 9
    def reset(self): pass
    def generate(self, ids, **more):
        for i in range(1000): yield ids[-1] + 1 + i
sys.modules[__name__ + ".llama_speculative"] = speculative = types.ModuleType("speculative")
speculative.LlamaDraftModel = object
llama_speculative = speculative
"""
    (tmp_path / "llama_cpp.py").write_text(fake)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    asks = [PromptRequest(str(n), "", (1, n), PromptItem(str(n), "text")) for n in (5, 20)]
    with ExitStack() as stack:
        engine = common.Engine(stack, str(python), "llama.cpp", model="m")
        for ignore, outputs in (
            (True, [[6, 7, 8, 9, 10], [21, 22, 23, 24, 25]]),
            (False, [[6, 7, 8, 9], [21, 22, 23, 24, 25]]),
        ):
            block = PromptBlock("set", asks, 1, foresay.SamplingParams(max_new_tokens=5, ignore_eos=ignore))
            assert common.EngineRunner("llama.cpp", engine).run(block, asks).outputs == outputs
        with pytest.raises(RuntimeError, match="AttributeError"):
            engine("nothing")


def unnamed(text: str) -> list[str]:
    """Headers of tables before which, since the table or heading before, processor, date or commit are missing."""
    out, seen, lines = [], "", text.splitlines()
    for line, before in zip(lines, ["", *lines], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            named = re.search(r"20\d\d-\d\d-\d\d.*commits? [0-9a-f]{7}", seen) and re.search(r"\([^)]*AVX|NVIDIA", seen)
            out += [] if named else [line]
        seen = "" if line.startswith(("|", "#")) else f"{seen} {line}"
    return out


def test_every_published_table_names_processor_date_and_commit() -> None:
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert text.count("|---|") >= 12 and unnamed(text) == []
    assert unnamed("## A\n\nAMD EPYC (AVX2); 2026-11-24.\n\n| a | b |\n|---|---|\n") == ["| a | b |"], "control"
    named = "AMD EPYC (AVX2); 2026-11-24;\ncommit dfa266a.\n\n| a | b |\n|---|---|\n"
    assert unnamed(named) == [] and unnamed(f"{named}\nMore.\n\n| c |\n|---|\n") == ["| c |"]
