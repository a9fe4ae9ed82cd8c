"""Drafters of other packages: a distribution on sys.path with entry points of the group foresay.drafters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foresay import SamplingParams, TableModel
from foresay.cli.app import _run
from foresay.errors import ConfigError, UnknownNameError
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import resolve
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter, third_party_names
from helpers.refusals import refused
from helpers.support import run

pytestmark = pytest.mark.usefixtures("_installed")
MODULE = '''"""A module of another package."""
import torch
from foresay import ConfigError, Proposal, Stateless


class Repeat(Stateless):
    """Repeats the last token.

    More about it.
    """

    def __init__(self, times: int = 2, *, skip: bool = False) -> None:
        if times < 1:
            raise ConfigError(f"times={times} must be at least 1")
        self.times = times

    def propose(self, rows, budget, policy):
        width = min(self.times, max(budget))
        tokens = [[int(row.tokens[-1])] * width for row in rows]
        return Proposal(torch.tensor(tokens), [min(width, n) for n in budget])


def nothing():
    return 3


def failing():
    raise OSError("no such device")


class Unconfigured(Stateless):
    """The smallest drafter: no constructor, so no settings."""

    built = 0

    def __new__(cls):
        cls.built += 1
        return super().__new__(cls)

    def propose(self, rows, budget, policy):
        return None


def unnamed(**settings):
    return Unconfigured()
'''


def install(folder: Path, package: str, module: str, points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one module, as pip would have installed it."""
    folder.mkdir()
    (folder / f"{package}.py").write_text(module)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[foresay.drafters]\n{points}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, package, raising=False)


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        "repeat = drafts_a:Repeat\nnothing = drafts_a:nothing\nfailing = drafts_a:failing\nbroken = drafts_a:absent\n"
        "unconfigured = drafts_a:Unconfigured\nunnamed = drafts_a:unnamed\n"
    )
    assert third_party_names() == []
    install(tmp_path / "a", "drafts_a", MODULE, points, monkeypatch)


def resources() -> Resources:
    return Resources(resolve(TableModel.random(6, seed=1), LoadOptions(), None))


def test_a_drafter_by_its_name_drafts() -> None:
    recipe = read_drafter("repeat(times=1)")
    assert recipe.samples, "it may sample, so a seed's text must not depend on an adaptive length"
    drafter = recipe.prepare(resources())()
    _, steps, _ = run(
        TableModel.random(6, seed=1), [[1, 2]], SamplingParams(max_new_tokens=6), drafter=drafter, gamma=3
    )
    assert max(step.num_drafted for step in steps) == 1, "times=1 bounds a budget of 3"
    assert read_drafter("cascade(self=1, repeat(3); k=[[1, 2], [0, 1]])").num_draft_tokens > 0


def test_settings_are_those_of_its_parameters() -> None:
    for text, param, value, kind in (
        ("repeat(tims=3)", "setting", "tims", UnknownNameError),
        ("unconfigured(times=1)", "setting", "times", UnknownNameError),
        ("unnamed", "drafter", "unnamed", ConfigError),
    ):
        with refused(param, value, kind):
            read_drafter(text)
    with pytest.raises(ConfigError, match="times=0 must be at least 1"):
        read_drafter("repeat(0)").prepare(resources())
    builder = read_drafter("unconfigured").prepare(resources())
    first, second = builder(), builder()
    assert first is not second
    assert type(first).built == 2, "the instance that was checked is the first engine's"  # type: ignore[attr-defined]


def test_a_module_is_imported_only_for_its_drafter() -> None:
    read_drafter("suffix")
    with refused("drafter", "repaet", UnknownNameError):
        read_drafter("repaet")
    assert "drafts_a" not in sys.modules
    read_drafter("repeat")
    assert "drafts_a" in sys.modules


def test_a_broken_one_is_an_error_that_names_its_package() -> None:
    for name, problem in (
        ("broken", "(drafts_a:absent) cannot be loaded: AttributeError: "),
        ("nothing", "makes a int, which has no propose()"),
        ("failing", "OSError: no such device"),
    ):
        with refused("drafter") as caught:
            read_drafter(name).prepare(resources())
        assert f"'{name}' of drafts_a 1.2" in str(caught.value) and problem in str(caught.value)


def test_a_name_that_two_packages_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "b", "drafts_b", MODULE, "repeat = drafts_b:Repeat\nsuffix = drafts_b:Repeat\n", monkeypatch)
    with refused("drafter", "repeat"):
        read_drafter("repeat")
    assert read_drafter("suffix(scale=2)").num_draft_tokens == 12, "foresay's own name stays its own"


def test_the_list_of_methods_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["info", "--methods"]) == 0
    out = capsys.readouterr().out
    assert "  repeat(times=2, skip=false)\n      Repeats the last token.\n" in out
    assert "  broken\n      Cannot be used: drafter='broken' of drafts_a 1.2" in out
