"""Two processes that compute one model together write what one process writes, and end when one of them dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import DraftStep, Stopping
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.lengths import broadcast
from foresay.lengths.broadcast import BroadcastLength
from foresay.models.table import TableModel
from helpers import tensor_parallel_run as run
from helpers import tiny
from helpers.making import By, make_row

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", run.__file__]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose last layer matters little, so that its first layers draft well, and a draft that is often right too."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = tiny.llama(0), tiny.llama(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model, noise in ((target, 0.0), (draft, 0.1)):
            for name, weight in model.named_parameters():
                if weight.dim() >= 2:
                    weight *= 0.6 if ".layers.2." in name else 1.0
                    weight += torch.randn(weight.shape, generator=generator) * weight.std() * noise
    return tiny.save(folder / "target", target), tiny.save(folder / "draft", draft)


def launched(*arguments: Any, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(Path(run.__file__).parents[1])}
    return subprocess.run(
        [*LAUNCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=tiny.environment(**paths),
        check=False,
    )


@pytest.mark.slow
def test_two_processes_write_what_one_writes(models: tuple[Path, Path], tmp_path: Path) -> None:
    done = launched(*models, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1], "also what was sampled without a seed"
    unseeded = found[0].pop("unseeded")
    assert len({tuple(one) for one in unseeded}) > 1
    assert found[0] == run.written(*map(str, models))


@pytest.mark.parametrize(
    ("heads", "processes", "message"),
    [
        (
            (9, 3),
            2,
            "has 9 attention heads and 3 key-value heads, which 2 processes (WORLD_SIZE) cannot share out evenly",
        ),
        ((9, 3), 2, "start 3 processes"),
        ((8, 1), 2, "has 8 attention heads and 1 key-value heads, which 2 processes"),
        ((8, 1), 2, "load it without tp_plan"),
        ((12, 4), 3, "start 2 or 4 processes"),
    ],
)
def test_heads_that_do_not_divide_are_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], processes: int, message: str
) -> None:
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 8 * heads[0]}
    folder = tiny.save(tmp_path / "m", tiny.llama(0, head_dim=8, **changes))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UnsupportedModelError) as caught:
        foresay.load(folder, tp_plan="auto", drafter="suffix")
    assert message in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.long
def test_a_process_that_dies_ends_all(models: tuple[Path, Path], tmp_path: Path) -> None:
    done = launched(*models, tmp_path, 1, timeout=120)
    assert done.returncode != 0 and "exitcode" in done.stderr.lower().replace(" ", "")


class Others:
    """Processes played by one: what the first sends is a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first: bool, told: list[list[int]]) -> None:
        self.heard: list[list[int]] = []
        self._told = told
        monkeypatch.setattr(broadcast.distributed, "is_first", lambda: first)
        monkeypatch.setattr(broadcast.distributed, "broadcast_first", self.broadcast_first)

    def broadcast_first(self, values: list[int]) -> list[int]:
        self.heard.append([int(one) for one in values])
        return self._told.pop(0) if self._told else self.heard[-1]


class Policy:
    remembers = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def budget(self, rows: Rows) -> list[int]:
        self.asked.append("budget")
        return [4] * len(rows)

    def stopping(self, rows: Rows) -> Stopping:
        return By(self._keep, rows)

    def _keep(self, step: DraftStep) -> torch.Tensor | None:
        self.asked.append("stopping")
        return torch.tensor([True, False])

    def num_to_score(self, rows: Rows, counts: Any, matched: Any) -> Any:
        return [one - 1 for one in counts]

    def fallback_budget(self, rows: Rows, most: Any) -> Any:
        return [0] * len(most)

    def observe(self, rows: Rows, steps: Any) -> None:
        self.asked.append("observe")


def test_the_first_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([make_row(), make_row()])
    step: Any = type("Step", (), {"token_ids": torch.tensor([1, 2])})()
    others, inner = Others(monkeypatch, first=True, told=[]), Policy()
    policy = BroadcastLength(inner)
    assert policy.budget(rows) == [4, 4]
    assert policy.stopping(rows).keep(step).tolist() == [True, False]  # type: ignore[union-attr]
    assert policy.num_to_score(rows, [3, 2], [0, 0]) == [2, 1] and policy.fallback_budget(rows, [3, 2]) == [0, 0]
    policy.observe(rows, [])
    assert inner.asked == ["budget", "stopping", "observe"]
    mark = others.heard[-1][0]

    inner = Policy()
    Others(monkeypatch, first=False, told=[[1, 2], [0, 0, 1], [9, 9], [7, 7], [1, 0, 0], [mark]])
    policy = BroadcastLength(inner)
    assert policy.budget(rows) == [1, 2]
    assert policy.stopping(rows).keep(step).tolist() == [False, True]  # type: ignore[union-attr]
    assert policy.num_to_score(rows, [3, 2], [0, 0]) == [9, 9] and policy.fallback_budget(rows, [3, 2]) == [7, 7]
    assert policy.stopping(rows).keep(step) is None
    policy.observe(rows, [])
    assert inner.asked == [], "one without a call learns nothing, whose clock is another"


def wrote(token_ids: tuple[int, ...]) -> Any:
    return SimpleNamespace(request_id=0, token_ids=token_ids, finish_reason=None)


def test_processes_that_wrote_different_tokens_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(monkeypatch, first=True, told=[])
    BroadcastLength(Policy()).observe(Rows([make_row()]), [wrote((1, 2))])  # type: ignore[arg-type]
    Others(monkeypatch, first=False, told=[others.heard[0]])
    with pytest.raises(RuntimeError, match="generated different tokens"):
        BroadcastLength(Policy()).observe(Rows([make_row()]), [wrote((1, 3))])  # type: ignore[arg-type]


def test_a_shared_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come when they like would come to each process at another step."""
    model = foresay.load(TableModel.random(9, seed=0), drafter="none")
    monkeypatch.setattr(model.target.model, "is_shared", True, raising=False)

    async def ask() -> None:
        async for _ in model.astream([1, 2], max_new_tokens=2):
            pass

    with pytest.raises(ConfigError, match="astream"):
        asyncio.run(ask())
