"""The examples run on a tiny model."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foresay.generation.result import Generation
from helpers import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def load(name: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_model(chat_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a chat template, and without one."""
    for path in (chat_folder, folder):
        load("own_model").main(str(path), tokens=8)
        out = capsys.readouterr().out
        assert "target passes" in out and "same output without a drafter: True" in out


def test_own_drafter(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("own_drafter")
    example.on_a_table()
    assert "of 2 draft tokens accepted" in capsys.readouterr().out
    example.on_a_model(str(chat_folder), tokens=16)
    out = capsys.readouterr().out
    assert "same output without a drafter: True" in out
    assert "16 tokens in 16 target passes" not in out, "no draft token was accepted"


def test_server_and_client(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("server_and_client").main(str(chat_folder), tokens=8)
    drafted, plain = capsys.readouterr().out.strip("\n").split("\n")
    assert drafted and drafted == plain


def test_train_head(chat_folder: Path, tmp_path: Path, shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script, on a few prompts of few tokens: the commands that it calls run in this process."""
    program = tmp_path / "bin" / "foresay"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" END\n')
    program.chmod(0o755)
    size = {"COUNT": "12", "TOKENS": "16", "MINUTES": "0.03", "BENCH_COUNT": "1"}
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = tiny.environment(PATH=path, MODEL=str(chat_folder), **size)
    called = subprocess.run(
        [str(EXAMPLES / "train_head.sh"), "head"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    monkeypatch.chdir(tmp_path)
    commands = called.stdout.split("\nEND\n")[:-1]
    printed = [shell(*command.split("\n")) for command in commands]
    assert [code for code, _, _ in printed] == [0, 0, 0], printed
    assert (tmp_path / "head" / "model.safetensors").is_file()
    assert "hybrid(suffix, head=head)" in printed[-1][1]


def test_the_notebook(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells run in order, and those that end with a Generation show it coloured."""
    cells = json.loads((EXAMPLES / "traces.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {}
    shown = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        code = "".join(cell["source"]).replace('"smollm2-135m"', repr(str(chat_folder))).replace("self(28)", "self(1)")
        tree = ast.parse(code)
        last = tree.body[-1]
        if isinstance(last, ast.Expr):  # keep the value, which a notebook shows
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("shown_value", ast.Store())], last.value), last)
        exec(compile(ast.fix_missing_locations(tree), "traces.ipynb", "exec"), namespace)
        value = namespace.pop("shown_value", None)
        if isinstance(value, Generation):
            shown += 1
            [output] = cell["outputs"]  # the stored one is coloured too
            assert all('<span title="' in html for html in (value._repr_html_(), "".join(output["data"]["text/html"])))
    assert shown == 3
    assert "tokens per target pass" in capsys.readouterr().out
