"""Which GPU a process of several takes."""

from __future__ import annotations

import pytest
import torch

from foresay_lab.training.processes import own_device


def test_of_several_processes_each_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, rank, processes, gpus, given in (
        (None, "1", "2", True, "cuda:1"),
        ("cuda", "3", "4", True, "cuda:3"),
        ("cuda:0", "1", "2", True, "cuda:0"),
        ("cpu", "1", "2", True, "cpu"),
        (None, "1", "2", False, None),
        (None, "0", "1", True, None),
        ("cuda", None, None, True, "cuda"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        for name, value in (("LOCAL_RANK", rank), ("WORLD_SIZE", processes)):
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
        assert own_device(asked) == given
