"""A file system that takes no more: one line that names what could not be written, and nothing half-written is left."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.errors import ConfigError
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.models.drafts.files import read_draft, write_draft
from foresay.records.lines import LineWriter
from foresay_lab.training.checkpoints import State, load_checkpoint, save_checkpoint
from foresay_lab.training.curves import CURVES, draw_curves
from foresay_lab.training.outputs import texts_of
from foresay_lab.training.teacher import CachedPasses, TargetPasses
from helpers import tiny
from helpers.heads import random_head
from helpers.training import full_disk


def refused(write: Callable[[], object], path: Path) -> None:
    """Writing is refused in one line that names the path."""
    with full_disk(1000), pytest.raises(ConfigError, match="File too large") as caught:
        write()
    assert (caught.value.param, str(caught.value.value)) == ("path", str(path))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return foresay.load(str(tiny.save(tmp_path_factory.mktemp("target"))), dtype="fp32").target


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_heads(target: Any, tmp_path: Path) -> None:
    head = random_head(target.model)
    refused(lambda: write_draft(head, tmp_path), tmp_path)
    refused(lambda: AcceptanceHead(64).save(tmp_path), tmp_path)
    assert not names(tmp_path)
    write_draft(head, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    other = random_head(target.model, seed=1)
    refused(lambda: write_draft(other, tmp_path), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    write_draft(other, tmp_path)
    assert names(tmp_path) == ["config.json", "model.safetensors"]
    found = read_draft(tmp_path).module.state_dict()
    assert all(torch.equal(found[name], one) for name, one in other.module.state_dict().items())
    (tmp_path / "plain").touch()
    (tmp_path / "acceptance").mkdir()
    AcceptanceHead(8).save(tmp_path / "acceptance")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()]
    plain = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert modes == [plain] * 5, "the rights that the umask leaves"


def test_checkpoints(tmp_path: Path) -> None:
    model, folder = torch.nn.Linear(40, 40), tmp_path / "checkpoint"
    optimiser, plan = torch.optim.AdamW(model.parameters()), {"processes": 1}
    save_checkpoint(folder, State(step=1), plan, model, [optimiser])
    refused(lambda: save_checkpoint(folder, State(step=2), plan, model, [optimiser]), folder)
    assert names(tmp_path) == ["checkpoint"]
    found = load_checkpoint(folder, plan, model, [optimiser])
    assert found is not None and found.step == 1
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {stat.S_IMODE((folder / "state.json").stat().st_mode)}
    save_checkpoint(folder, State(step=3), plan, model, [optimiser])
    assert names(tmp_path) == ["checkpoint"]


def test_what_a_target_computed_and_curves(target: Any, tmp_path: Path) -> None:
    kept = CachedPasses(tmp_path, TargetPasses(target.model, ()))
    (text,) = texts_of([list(range(5, 60))], 100)
    refused(lambda: kept(text), kept._path(text))
    lines = {n: {"tokens": n, "tokens_per_pass": 1.0, "acceptance_1": 0.5, "loss": 1.0} for n in range(3)}
    refused(lambda: draw_curves(tmp_path, lines), tmp_path / CURVES)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_logs_go_on_where_the_disk_was_full(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LineWriter(path, "a-log", 1, {}) as log:
        log.append({"n": 1})
    with LineWriter(path, "a-log", 1, {}) as log:
        refused(lambda: log.append({"text": "x" * 2000}), path)
    with LineWriter(path, "a-log", 1, {}) as log:
        assert log.lines == [{"n": 1}]
        log.append({"n": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == [{"n": 1}, {"n": 2}]
