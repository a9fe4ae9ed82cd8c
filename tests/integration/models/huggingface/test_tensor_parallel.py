"""Two processes that compute one model together write what one process writes, and end when one of them dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import foresay
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.lengths import broadcast
from foresay.lengths.broadcast import BroadcastLength
from foresay.models.table import TableModel
from helpers import tensor_parallel_run as run
from helpers import tiny
from helpers.forks import run_two
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


@pytest.mark.slow
def test_two_processes_write_what_one_writes(models: tuple[Path, Path], tmp_path: Path) -> None:
    run_two([run.__file__, *map(str, (*models, tmp_path))], tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1], "also what was sampled without a seed"
    unseeded = found[0].pop("unseeded")
    assert len({tuple(one) for one in unseeded}) > 1
    assert found[0] == run.written(*map(str, models))


@pytest.mark.parametrize(
    ("heads", "processes", "messages"),
    [
        (
            (9, 3),
            2,
            ["has 9 attention heads and 3 key-value heads, which 2 processes (WORLD_SIZE)", "start 3 processes"],
        ),
        ((8, 1), 2, ["has 8 attention heads and 1 key-value heads, which 2 processes", "load it without tp_plan"]),
        ((12, 4), 3, ["start 2 or 4 processes"]),
    ],
)
def test_heads_that_do_not_divide_are_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], processes: int, messages: list[str]
) -> None:
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 8 * heads[0]}
    folder = tiny.save(tmp_path / "m", tiny.llama(0, head_dim=8, **changes))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UnsupportedModelError) as caught:
        foresay.load(folder, tp_plan="auto", drafter="suffix")
    assert all(message in str(caught.value) for message in (*messages, str(folder)))


@pytest.mark.long
def test_a_process_that_dies_ends_all(models: tuple[Path, Path], tmp_path: Path) -> None:
    command = [*LAUNCH, *map(str, (*models, tmp_path)), "1"]
    environment = tiny.environment(PYTHONPATH=str(Path(run.__file__).parents[1]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode != 0 and "exitcode" in done.stderr.lower().replace(" ", "")


def play(monkeypatch: pytest.MonkeyPatch, sent: list[list[int]], *, first: bool) -> None:
    """As the first process, which sends what another one receives then."""

    def broadcast_first(values: list[int]) -> list[int]:
        if not first:
            return sent.pop(0)
        sent.append([int(one) for one in values])
        return sent[-1]

    monkeypatch.setattr(broadcast.distributed, "is_first", lambda: first)
    monkeypatch.setattr(broadcast.distributed, "broadcast_first", broadcast_first)


def decisions(inner: Any, masks: list[Any], token_ids: tuple[int, ...] = (1, 2)) -> list[Any]:
    """Decisions of the policy of a process, whose own one is given, and which wrote these tokens."""
    rows, step = Rows([make_row(), make_row()]), SimpleNamespace(token_ids=torch.tensor([1, 2]))
    inner.stopping = lambda rows: By(lambda _: masks.pop(0), rows)
    policy: Any = BroadcastLength(inner)
    kept = [policy.stopping(rows).keep(step) for _ in range(2)]
    found = [policy.budget(rows), policy.num_to_score(rows, [3, 2], [0, 0]), policy.fallback_budget(rows, [3, 2])]
    policy.observe(rows, [SimpleNamespace(request_id=0, token_ids=token_ids, finish_reason=None)])
    return [*found, *(None if one is None else one.tolist() for one in kept)]


def test_the_first_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others call no policy, which learns by a clock; those that wrote other tokens are stopped."""
    numbers = {
        "budget.return_value": [4, 4],
        "num_to_score.return_value": [2, 1],
        "fallback_budget.return_value": [0, 0],
    }
    first, other, sent = Mock(**numbers), Mock(), list[list[int]]()
    play(monkeypatch, sent, first=True)
    wanted = decisions(first, [torch.tensor([True, False]), None])
    assert wanted == [[4, 4], [2, 1], [0, 0], [True, False], None] and first.observe.called
    for token_ids in ((1, 2), (1, 3)):
        play(monkeypatch, list(sent), first=False)
        with nullcontext() if token_ids == (1, 2) else pytest.raises(RuntimeError, match="generated different tokens"):
            assert decisions(other, [], token_ids) == wanted
    assert not other.method_calls


def test_a_shared_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come when they like would come to each process at another step."""
    model = foresay.load(TableModel.random(9, seed=0), drafter="none")
    monkeypatch.setattr(model.target.model, "is_shared", True, raising=False)

    async def ask() -> None:
        async for _ in model.astream([1, 2], max_new_tokens=2):
            pass

    with pytest.raises(ConfigError, match="astream"):
        asyncio.run(ask())
