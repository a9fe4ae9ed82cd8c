"""The documents do what they say: Python blocks run, commands run, and the help page is the program's."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from foresay.cli.app import _run
from foresay.lab import tune
from foresay.lab.measure import profile
from foresay.models.sources import packaged
from helpers import tiny
from helpers.small_alias import ALIAS, cache_with_small_model

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_cache(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache_with_small_model(tmp_path_factory.mktemp("cache"), smollm2_folder)


@pytest.fixture
def small_alias(small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' model is a small random one, which no head is packaged for: what the pages do is the same, in less time."""
    monkeypatch.setenv("FORESAY_CACHE", str(small_cache))
    monkeypatch.delitem(packaged.DEFAULT_DRAFTERS, ALIAS)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_readmes_python_blocks_run(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real model, as a new user runs them."""
    run_python_blocks("README.md", capsys, tmp_path, monkeypatch)


@pytest.mark.usefixtures("small_alias")
@pytest.mark.parametrize("page", ["docs/extending.md", "docs/drafters.md", "docs/engines.md"])
def test_python_blocks_run(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_python_blocks(page, capsys, tmp_path, monkeypatch)


def run_python_blocks(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    found = blocks(page, "python")
    assert found
    namespace: dict[str, Any] = {}
    for block in found:
        exec(compile(block, page, "exec"), namespace)
    assert capsys.readouterr().out.strip()


def _commands() -> list[str]:
    lines = [line for block in blocks("README.md", "console") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ foresay")]


@pytest.mark.parametrize("command", _commands())
def test_commands_run(
    command: str,
    smollm2_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The one that shows a trace with the real model and what drafts for it by default, the others with the small one."""
    if "--trace" not in command:
        request.getfixturevalue("small_alias")
    monkeypatch.chdir(ROOT)
    assert _run(shlex.split(command)[1:]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert err == ""


def test_the_page_of_workers(
    smollm2_folder: Path,
    small_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its commands as written; those that record and replay with the small model."""
    monkeypatch.chdir(tmp_path)
    shell = tiny.Shell(monkeypatch, capsys)
    [block] = blocks("docs/machines.md", "console")
    *lines, last = [line.removeprefix("$ ") for line in block.splitlines()]
    with monkeypatch.context() as small:
        small.setenv("FORESAY_CACHE", str(small_cache))
        for line in lines:
            code, out, err = shell(*shlex.split(line)[1:])
            assert code == 0 and out.strip(), f"{line}: {err}"
    assert len((tmp_path / "grid.jsonl").read_text().splitlines()) == 5
    printed, command = last.removeprefix("printf ").split(" | ")
    code, out, err = shell(*shlex.split(command)[1:], stdin=shlex.split(printed)[0].replace("\\n", "\n").encode())
    assert code == 0 and out.strip(), f"{last}: {err}"


def test_vllms_arguments_are_those_of_the_page(smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in blocks("docs/engines.md", "console") if "vllm-config" in block]
    command, _, wanted = block.partition("\n")
    assert _run(shlex.split(command.removeprefix("$ "))[1:]) == 0
    assert capsys.readouterr() == (wanted, ""), "a hub's name is vLLM's to look up"
    assert _run(["vllm-config", "--drafter", "max_gram"]) == 0
    assert str(smollm2_folder) in capsys.readouterr().out, "an alias is ours"


@pytest.mark.usefixtures("small_alias")
@pytest.mark.parametrize(
    ("page", "languages", "said"),
    [
        ("docs/ngrams.md", ["python", "console", "python"], ["most frequent: ", "tokens are 90% of the corpus"]),
        (
            "docs/training.md",
            ["console", "python", "console", "console", "python", "console", "python"],
            [
                "measured on 2,048 tokens",
                "True\n",
                "draft's tokens were accepted",
                "tokens per pass",
                "head(head)",
                "calibration error",
            ],
        ),
    ],
)
def test_pages_run_from_top_to_bottom(
    page: str,
    languages: list[str],
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Blocks in order, in a folder of their own: each reads what those before it wrote."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("--minutes 0.2 ", "--minutes 0.04 ")
    assert ("--minutes 0.04 " in text) == (page == "docs/training.md")
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"^```(python|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in found] == languages
    for language, block in found:
        if language == "python":
            exec(compile(block, page, "exec"), {})
            continue
        for line in block.splitlines():
            assert _run(shlex.split(line.removeprefix("$ "))[1:]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(one in out for one in said), out


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Profiles of few passes and short prompts, which are not kept where real ones are."""
    whole = profile.measure

    def measure(target: Any, **settings: Any) -> Any:
        few = {"columns": [1, 2, 5, 9, 13], "repeats": 2, "fills": (8, 32)}
        return whole(target, **{**settings, **few})

    monkeypatch.setattr(profile, "measure", measure)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "_ROUNDS", 1)
    monkeypatch.setattr(profile, "profile_path", lambda *_: tmp_path / "kept.json")


SHORTER = {"--count 6 -n 32": "--count 2 -n 16", "--count 6 -n 24": "--count 2 -n 8", '." -n 24': '." -n 8'}


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("brief", "small_alias")
def test_the_page_on_the_lab_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tour in order but with fewer tokens, in a folder of its own; then the blocks of Python, which read what it wrote."""
    monkeypatch.chdir(tmp_path)
    [tour] = blocks("docs/lab.md", "console")
    for long, short in SHORTER.items():
        assert tour.count(long) == 1, long
        tour = tour.replace(long, short)
    said = {}
    for line in tour.splitlines():
        assert _run(shlex.split(line.removeprefix("$ "))[1:]) == 0, line
        said[line.split()[2]], err = capsys.readouterr()
        assert err == "" or line.startswith(("$ foresay generate", "$ foresay tune"))
    assert "2 outputs, 32 tokens" in said["record"]
    assert "exact: live decoding takes the same steps" in said["replay"]
    assert "MB of weights" in said["profile"]
    assert "yes" in said["bench"] and "DIFFERENT" not in said["bench"]
    assert "wrote foresay.toml" in said["tune"]
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    for block in blocks("docs/lab.md", "python"):
        exec(compile(block, "docs/lab.md", "exec"), {})
    assert "tokens per pass" in capsys.readouterr().out


def test_there_are_commands_to_run() -> None:
    assert len(_commands()) >= 3


def test_the_help_page_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("cli_help", ROOT / "scripts" / "cli_help.py")
    assert spec is not None
    assert spec.loader is not None
    for name in ("COLUMNS", "TERM", "NO_COLOR"):
        monkeypatch.setenv(name, "")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), "run scripts/docs"


def test_the_demo_writes_the_same_both_ways(smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["demo", "-n", "16"]) == 0
    out = capsys.readouterr().out
    assert "identical output: yes" in out
    assert re.search(r"^foresay +\d+ .*x", out, re.MULTILINE)


def test_the_demo_shows_a_difference_and_fails(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with plain decoding that writes something else, the demo must notice."""
    from foresay.cli import demo

    intact = demo._plain
    monkeypatch.setattr(demo, "_plain", lambda generator, prompt, new: intact(generator, prompt + " Why?", new))
    assert _run(["demo", "-n", "24"]) == 1
    assert re.search(r"identical output: no, at token \d+: plain decoding has", capsys.readouterr().out)
