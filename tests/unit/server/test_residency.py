"""Which models are loaded: the least recently requested idle one makes room, and every waiting request gets its turn."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from foresay.server.residency import Action, Residency, Waiting


class Host:
    """Carries out what the rule returns, and notes it."""

    def __init__(self, most: int = 1, rule: type[Residency] = Residency) -> None:
        self.rule, self.log = rule(most), list[str]()
        self.admitted: list[str] = []
        self.failed: list[str] = []

    def request(self, name: str) -> Waiting | None:
        """A request; what waits, or None if it was admitted at once."""
        if self.rule.take(name):
            self.admitted.append(name)
            return None
        waiting = Waiting(name, lambda: self.admitted.append(name), lambda error: self.failed.append(str(error)))
        self.rule.waiting.append(waiting)
        self.settle()
        return waiting

    def end(self, name: str) -> None:
        self.rule.release(name)
        self.settle()

    def settle(self, fits: Callable[[str], bool] = lambda name: True) -> None:
        while (due := self.rule.next(fits)) is not None:
            action, name = due
            if action is Action.ADMIT:
                self.rule.admit(name)
                continue
            self.log.append(f"{'+' if action is Action.LOAD else '-'}{name}")
            self.rule.loaded(name) if action is Action.LOAD else self.rule.unloaded(name)
            assert len(self.rule.users) <= self.rule.most


def test_the_least_recently_requested_idle_model_goes_first() -> None:
    host = Host(2)
    for name in "ab":
        host.request(name)
        host.end(name)
    assert host.request("a") is None
    host.end("a")
    host.request("c")
    assert host.log == ["+a", "+b", "-b", "+c"] and list(host.rule.users) == ["a", "c"]


def test_a_model_in_use_stays() -> None:
    host = Host(2)
    for name in "ab":
        host.request(name)
    host.request("c")
    assert host.admitted == ["a", "b"] and host.log == ["+a", "+b"]
    host.end("b")
    assert host.admitted == ["a", "b", "c"] and host.log[2:] == ["-b", "+c"], "a was used earlier, but is in use"
    with pytest.raises(AssertionError, match="requests use the model"):
        host.rule.unloaded("a")


def test_a_turn_takes_all_requests_for_a_model_and_then_the_next_has_its_own() -> None:
    host = Host()
    for name in "abab":
        host.request(name)
    assert host.admitted == ["a"], "requests for a loaded model wait after earlier ones for another"
    host.end("a")
    assert host.admitted == ["a", "b", "b"]
    for name in "bb":
        host.end(name)
    assert host.admitted == ["a", "b", "b", "a"] and host.log == ["+a", "-a", "+b", "-b", "+a"]


class Greedy(Residency):
    """Admits requests for a loaded model although others wait."""

    def take(self, name: str) -> bool:
        if name in self.users:
            self._use(name)
            return True
        return False


@pytest.mark.parametrize("rule", [Residency, Greedy])
def test_no_stream_of_requests_for_one_model_keeps_another_waiting(rule: type[Residency]) -> None:
    """With the negative control that admits every request for the loaded model."""
    host = Host(rule=rule)
    host.request("a")
    host.request("b")
    for _ in range(50):  # there is always one in use
        host.request("a")
        if host.rule.users.get("a"):
            host.end("a")
    assert ("b" in host.admitted) == (rule is Residency)


def test_a_request_that_gave_up_blocks_no_other() -> None:
    host = Host()
    host.request("a")
    waiting = host.request("b")
    host.request("a")
    assert waiting is not None and host.admitted == ["a"]
    host.rule.leave(waiting)
    host.settle()
    host.rule.leave(waiting)
    assert host.admitted == ["a", "a"] and host.log == ["+a"]


def test_a_model_that_does_not_fit_next_to_others_is_loaded_alone() -> None:
    host = Host(3)
    for name in "ab":
        host.request(name)
    host.rule.waiting.append(Waiting("c", lambda: host.admitted.append("c"), lambda error: None))
    host.settle(lambda name: False)
    assert host.log == ["+a", "+b"] and host.admitted == ["a", "b"]
    for name in "ba":
        host.rule.release(name)
        host.settle(lambda name: False)
    assert host.log == ["+a", "+b", "-b", "-a", "+c"] and host.admitted[-1] == "c"


def test_a_model_that_cannot_be_loaded_ends_its_requests_alone() -> None:
    host = Host()
    host.request("a")
    for name in "bcb":
        host.request(name)
    host.rule.refuse("b", ValueError("broken"))
    host.settle()
    host.end("a")
    assert host.failed == ["broken", "broken"] and host.admitted == ["a", "c"]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_every_request_is_admitted_once_whatever_the_order(most: int) -> None:
    dice = random.Random(most)
    for _ in range(200):
        host, open_, asked = Host(most), list[str](), 0
        while asked < 20 or host.rule.waiting or any(host.rule.users.values()):
            open_ = [name for name, count in host.rule.users.items() for _ in range(count)]
            if asked < 20 and (not open_ or dice.random() < 0.6):
                host.request(dice.choice("abcd"))
                asked += 1
            else:
                assert open_, "requests wait, and nothing is to be done"
                host.end(dice.choice(open_))
        assert len(host.admitted) == 20
