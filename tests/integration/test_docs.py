"""Documentation is executed: Python blocks, commands and examples run, and generated pages equal what the program prints."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foresay.cli import demo
from foresay.cli.app import _run
from foresay.generation.generator import Generator
from foresay.generation.result import Generation
from foresay.models.sources import packaged
from foresay_lab import tune
from foresay_lab.measure import profile
from foresay_lab.workers import processes
from helpers import tiny
from helpers.in_process import InProcess
from helpers.small_alias import ALIAS, cache_with_small_model

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_cache(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache_with_small_model(tmp_path_factory.mktemp("cache"), smollm2_folder)


@pytest.fixture
def small_alias(small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' model is a small random one, for which no head is packaged: the pages do the same in less time."""
    monkeypatch.setenv("FORESAY_CACHE", str(small_cache))
    monkeypatch.delitem(packaged.DEFAULT_DRAFTERS, ALIAS)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, languages: str) -> list[tuple[str, str]]:
    """Language and content of each block in one of the languages, such as "python|console"."""
    return re.findall(rf"^```({languages})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    lines = [line for _, block in blocks(text, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def run_line(shell: tiny.Shell, line: str) -> tuple[str, str]:
    """Run a command of a page in this process; `printf TEXT | foresay ...` gives it standard input."""
    printed, _, command = line.rpartition(" | ")
    stdin = shlex.split(printed)[1].replace("\\n", "\n") if printed else ""
    code, out, err = shell(*shlex.split(command)[1:], stdin=stdin.encode())
    assert code == 0 and out.strip(), f"{line}: {err}"
    return out, err


def run_page(text: str, page: str, shell: tiny.Shell, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run the blocks from top to bottom: each reads what earlier ones have made. Return everything that was printed."""
    printed, errors, namespace = "", "", dict[str, Any]()
    for language, block in blocks(text, "python|console"):
        if language == "python":
            exec(compile(block, page, "exec"), namespace)
            printed += capsys.readouterr().out
            continue
        for line in commands(f"```console\n{block}```"):
            out, err = run_line(shell, line)
            printed, errors = printed + out, errors + err
    return printed, errors


def test_the_readmes_trace_runs_with_the_real_model(smollm2_folder: Path, shell: tiny.Shell) -> None:
    """With its default drafter, the packaged head, as a new user runs it; the other blocks run with the small model."""
    [command] = [line for line in commands(read("README.md")) if "--trace" in line]
    out, err = run_line(shell, command.replace("-n 64", "-n 16"))
    assert "[draft]" in out and err == ""


PAGES = {
    "README.md": ["[draft]", "plain"],
    "docs/index.md": ["tokens per target pass"],
    "docs/start/install.md": ["foresay 0.", "kernels"],
    "docs/start/your-model.md": ["supported: yes", "target passes", "True\n"],
    "docs/start/does-it-pay.md": ["plain", "max_gram"],
    "docs/how-to/choose-a-drafter.md": [],
    "docs/how-to/train-a-head.md": [
        *("measured on 2,048 tokens", "True\n", "draft tokens were accepted", "tokens per pass", "head(head)"),
        "calibration error",
    ],
    "docs/how-to/ngram-tables.md": ["most frequent: ", "tokens drafted"],
    "docs/how-to/transformers.md": ["tensor("],
    "docs/how-to/own-drafter.md": ["[6, 7, 8, 9]"],
    "docs/how-to/chat.md": [],
    "docs/how-to/check.md": ["6 of 6 are the same", "(+0.0%)"],
    "docs/how-to/memory.md": ["\n"],
    "docs/how-to/kept-prompts.md": ["True\n"],
    "docs/reference/expressions.md": ["False\n"],
    "docs/reference/errors.md": ["Did you mean 'suffix'?"],
}
"""Pages that run from top to bottom, and parts of what they print."""
OTHERS = {
    "docs/start/serve.md": "tests/integration/server/test_api.py",
    "docs/how-to/clients.md": "tests/clients/test_page.py",
    "docs/how-to/tools.md": "tests/integration/server/test_tools.py",
    "docs/how-to/vllm.md": "test_vllms_arguments_are_those_of_the_page",
    "docs/how-to/several-machines.md": "test_the_page_of_workers",
    "docs/how-to/reproduce-a-benchmark.md": "test_the_tour_of_measurements",
}
"""Pages with blocks that are run elsewhere."""


SHORTER = {
    "--minutes 0.2 ": "--minutes 0.02 ",
    "--count 24 -n 32": "--count 10 -n 32",
    "--dtype fp32 --count 6 -n 32": "--dtype fp32 --count 6 -n 8",
    "--count 12 -n 24": "--count 4 -n 8",
    "tune --recording answers.jsonl": "tune --recording answers.jsonl --minutes 0.1",
    "--file Makefile -n 32": "--file Makefile -n 8",
    "--count 6 -n 32": "--count 2 -n 16",
    "--count 6 -n 24": "--count 2 -n 8",
    '." -n 24': '." -n 8',
}
"""Parts of commands, and what takes less time."""


def shortened(page: str) -> str:
    text = read(page)
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def test_every_page_with_blocks_is_run() -> None:
    pages = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    assert {page for page in pages if blocks(read(page), "python|console")} == {*PAGES, *OTHERS} - {"README.md"}


@pytest.mark.usefixtures("small_alias")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(
    page: str, small_cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, with a small model under the alias and under the name of a hub's model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Makefile").write_text(read("Makefile")[:600])
    [small] = (small_cache / "models").iterdir()
    text = shortened(page).replace("Qwen/Qwen2.5-0.5B-Instruct", str(small))
    out, err = run_page(text, page, tiny.Shell(monkeypatch, capsys), capsys)
    assert out.strip() and all(part in out for part in PAGES[page]), out
    assert page != "README.md" or err == ""


def test_the_page_of_workers(
    smollm2_folder: Path, small_cache: Path, shell: tiny.Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that record and replay with the small model; the last with the real one, whose head the workers load.

    Workers as processes are those of foresay_lab/workers.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "Processes", InProcess)
    *lines, last = commands(shortened("docs/how-to/several-machines.md"))
    with monkeypatch.context() as small:
        small.setenv("FORESAY_CACHE", str(small_cache))
        for line in lines:
            run_line(shell, line)
    assert len((tmp_path / "grid.jsonl").read_text().splitlines()) == 5
    run_line(shell, last)


def test_vllms_arguments_are_those_of_the_page(smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [(_, block)] = blocks(read("docs/how-to/vllm.md"), "console")
    command, _, wanted = block.partition("\n")
    assert _run(shlex.split(command.removeprefix("$ "))[1:]) == 0
    assert capsys.readouterr() == (wanted, ""), "vLLM resolves the name of a hub's model"
    assert _run(["vllm-config", "--drafter", "prompt_lookup"]) == 0
    assert str(smollm2_folder) in capsys.readouterr().out, "foresay resolves an alias"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Profiles of few passes and short prompts, which are not kept where real ones are."""
    few = {"columns": [1, 2, 5, 9, 13], "repeats": 2, "fills": (8, 32)}
    whole = profile.measure
    for module in (profile, tune):
        monkeypatch.setattr(module, "measure", lambda target, **settings: whole(target, **{**settings, **few}))
    monkeypatch.setattr(profile, "profile_path", lambda *_: tmp_path / "kept.json")


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("brief", "small_alias")
def test_the_tour_of_measurements(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In order, with fewer tokens, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    printed = dict[str, str]()
    for line in commands(shortened("docs/how-to/reproduce-a-benchmark.md")):
        out, err = run_line(shell, line)
        printed.setdefault(line.split()[1], out)
        assert err == "" or line.startswith(("foresay generate", "foresay tune"))
    assert "2 outputs, 32 tokens" in printed["record"]
    assert "exact: live decoding takes the same steps" in printed["replay"]
    assert "MB of weights" in printed["profile"]
    assert "yes" in printed["bench"] and "DIFFERENT" not in printed["bench"]
    assert "wrote foresay.toml" in printed["tune"]
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("script", "page"), [("cli_help", "cli"), ("published_drafts", "published-drafts"), ("models_page", "models")]
)
def test_a_generated_page_is_the_programs(script: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "TERM", "NO_COLOR"):
        monkeypatch.setenv(name, "")
    program = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))
    written = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
    assert program["page"]() == written, "run scripts/docs"


def test_the_demo_writes_the_same_both_ways_and_shows_a_difference(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real model. Negative control: with plain decoding that writes something else, the demo fails."""
    monkeypatch.setattr(demo, "PROMPTS", demo.PROMPTS[:1])
    assert _run(["demo", "-n", "16"]) == 0
    out = capsys.readouterr().out
    assert "identical output: yes" in out and re.search(r"^foresay +\d+ .*x", out, re.MULTILINE)
    intact = Generator.plain

    def other(generator: Generator) -> Generator:
        plain = intact(generator)
        generate = plain.generate
        plain.generate = lambda request, params: generate(  # type: ignore[method-assign]
            [{"role": "user", "content": request[0]["content"] + " Why?"}], params
        )
        return plain

    monkeypatch.setattr(Generator, "plain", other)
    assert _run(["demo", "-n", "16"]) == 1
    assert re.search(r"identical output: no, at token \d+: plain decoding has", capsys.readouterr().out)


EXAMPLES = ROOT / "examples"


def load(name: str) -> dict[str, Any]:
    """The names of an example."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_own_model(chat_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a chat template, and without one."""
    for path in (chat_folder, folder):
        load("own_model")["main"](str(path), tokens=8)
        out = capsys.readouterr().out
        assert "target passes" in out and "same output without a drafter: True" in out


def test_own_drafter(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("own_drafter")
    example["on_a_table"]()
    assert "of 2 draft tokens accepted" in capsys.readouterr().out
    example["on_a_model"](str(chat_folder), tokens=16)
    out = capsys.readouterr().out
    assert "same output without a drafter: True" in out
    assert "16 tokens in 16 target passes" not in out, "no draft token was accepted"


def test_trl_rollouts() -> None:
    """Without trl: log-probabilities are the policy's, at each step of training, and old ones until the next step."""
    example = load("trl_rollouts")
    policy, tokenizer = example["tiny_policy"]()
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    trainer = SimpleNamespace(model=policy, state=SimpleNamespace(global_step=0))
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer.args = SimpleNamespace(max_completion_length=12, **neutral)
    rollouts = example["Rollouts"](policy, tokenizer, drafter="suffix")

    def is_the_policys(done: dict[str, Any]) -> bool:
        given = zip(done["prompt_ids"], done["completion_ids"], done["logprobs"], strict=True)
        return all(torch.allclose(scored(prompt, written), torch.tensor(found)) for prompt, written, found in given)

    def scored(prompt: list[int], written: list[int]) -> torch.Tensor:
        with torch.no_grad():
            scores = policy.eval()(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return scores[torch.arange(len(written)), torch.tensor(written)]

    for step in (1, 2):
        done = rollouts(["the sea is", "the sea is", "a"], trainer)
        assert done["prompt_ids"] == [tokenizer.encode(text) for text in ("the sea is", "the sea is", "a")]
        assert is_the_policys(done) and done["completion_ids"][0] != done["completion_ids"][1]
        with torch.no_grad():
            policy.lm_head.weight.mul_(3)
        assert not is_the_policys(rollouts(["the sea is"], trainer)), "control"
        trainer.state.global_step = step


def test_server_and_client(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("server_and_client")["main"](str(chat_folder), tokens=8)
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
