from __future__ import annotations

from time import sleep
from typing import ClassVar

import pytest
import torch

from foresay.decoding.clock import Clock, one_time

CPU = torch.device("cpu")


def test_parts_follow_one_another() -> None:
    clock = Clock(CPU)
    sleep(0.02)
    clock.mark()
    clock.mark()
    first, second = clock.parts()
    assert first >= 0.02 > second >= 0 and clock.total() >= first


def test_what_happens_once_is_not_counted() -> None:
    clock = Clock(CPU)
    with one_time():
        sleep(0.05)
    clock.mark()
    assert clock.parts()[0] < 0.05 and clock.total() < 0.05


def test_the_time_of_a_failed_capture_is_not_counted_either() -> None:
    clock = Clock(CPU)
    with pytest.raises(ValueError, match="length must be non-negative"), one_time():
        sleep(sleep(0.05) or -1)
    clock.mark()
    assert clock.parts()[0] < 0.05


class _Event:
    """An event of a GPU, whose times are given."""

    made: ClassVar[list[_Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = (0.0, 30.0, 70.0)[len(self.made)]
        self.made.append(self)

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, other: _Event) -> float:
        assert other.reached
        return other.at - self.at


def test_on_a_gpu_parts_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = Clock(torch.device("cuda"))
    clock.mark()
    clock.mark()
    assert clock.parts() == pytest.approx([0.03, 0.04])
