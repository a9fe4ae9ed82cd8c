"""Which models are loaded: the least recently requested idle one makes room, and every waiting request gets its turn."""

from __future__ import annotations

import random

import pytest

from foresay.server.residency import Action, Residency, Waiting


class Host:
    """Carries out what the rule returns, and notes it. The model "z" fits next to no other."""

    def __init__(self, most: int = 1, rule: type[Residency] = Residency) -> None:
        self.rule, self.log = rule(most), ""
        self.admitted = self.failed = ""

    def request(self, name: str) -> None:
        if self.rule.take(name):
            self._admit(name)
        else:
            self.rule.waiting.append(Waiting(name, lambda: self._admit(name), lambda _: self._fail(name)))
            self.settle()

    def _admit(self, name: str) -> None:
        self.admitted += name

    def _fail(self, name: str) -> None:
        self.failed += name

    def end(self, name: str) -> None:
        self.rule.release(name)
        self.settle()

    def gives_up(self, name: str) -> None:
        waiting = next(one for one in self.rule.waiting if one.name == name)
        for _ in range(2):  # the second time it does not wait any more
            self.rule.leave(waiting)
            self.settle()

    def cannot_be_loaded(self, name: str) -> None:
        self.rule.refuse(name, ValueError("broken"))
        self.settle()

    def settle(self) -> None:
        while (due := self.rule.next(lambda name: name != "z")) is not None:
            action, name = due
            if action is Action.ADMIT:
                self.rule.admit(name)
                continue
            self.log += f"{'+' if action is Action.LOAD else '-'}{name}"
            self.rule.loaded(name) if action is Action.LOAD else self.rule.unloaded(name)
            assert len(self.rule.users) <= self.rule.most


STEPS = {"-": Host.end, "?": Host.gives_up, "!": Host.cannot_be_loaded}
TURNS = {
    "the least recently requested idle model goes first": (2, "a -a b -b a -a c", "abac", "", "+a+b-b+c"),
    "a model in use stays": (2, "a b c", "ab", "", "+a+b"),
    "though it was used earlier": (2, "a b c -b", "abc", "", "+a+b-b+c"),
    "requests for a loaded model wait after others": (1, "a b a b", "a", "", "+a"),
    "a turn takes all requests for a model": (1, "a b a b -a", "abb", "", "+a-a+b"),
    "then the next model has its own": (1, "a b a b -a -b -b", "abba", "", "+a-a+b-b+a"),
    "a request that gave up blocks no other": (1, "a b a ?b", "aa", "", "+a"),
    "a model that fits next to none waits": (3, "a b z", "ab", "", "+a+b"),
    "until it is alone": (3, "a b z -b -a", "abz", "", "+a+b-b-a+z"),
    "a model that cannot be loaded ends its requests alone": (1, "a b c b !b -a", "ac", "bb", "+a-a+c"),
}
"""Case -> most models, requests, ends (-), clients that leave (?) and errors (!), and those admitted, failed, and the loads."""


@pytest.mark.parametrize("case", TURNS)
def test_turns(case: str) -> None:
    most, steps, *expected = TURNS[case]
    host = Host(most)
    for step in steps.split():
        STEPS.get(step[0], Host.request)(host, step[-1])
    assert [host.admitted, host.failed, host.log] == expected


def test_a_used_model_cannot_be_unloaded() -> None:
    host = Host()
    host.request("a")
    with pytest.raises(AssertionError, match="requests use the model"):
        host.rule.unloaded("a")


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


@pytest.mark.parametrize("most", [1, 2, 3])
def test_every_request_is_admitted_once_whatever_the_order(most: int) -> None:
    dice = random.Random(most)
    for _ in range(60):
        host, asked = Host(most), 0
        while asked < 20 or host.rule.waiting or any(host.rule.users.values()):
            open_ = [name for name, count in host.rule.users.items() for _ in range(count)]
            if asked < 20 and (not open_ or dice.random() < 0.6):
                host.request(dice.choice("abcd"))
                asked += 1
            else:
                assert open_, "requests wait, and nothing is to be done"
                host.end(dice.choice(open_))
        assert len(host.admitted) == 20
