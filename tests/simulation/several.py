"""Simulated runs of a server of two models, one loaded at a time, whose loads may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foresay.generation.generator import Generator
from foresay.generation.session import Session
from foresay.models.sources.wrapping import LoadedModel
from foresay.server.service import Entry, Service
from foresay.server.shared import Kind, is_main
from simulation.client import Call
from simulation.loop import SimulatedThread
from simulation.model import HashModel
from simulation.run import PREFIX_BYTES, ROWS, SETTINGS, WAITING, Simulation, _current

NAMES = ("one", "two")


@dataclass
class SeveralModels(Simulation):
    """A server of two models. A fault "load" is that of loading one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.most_limits = 3
        other = HashModel.__new__(HashModel)
        other.__dict__.update(self.model.__dict__, logits=self.model.logits.roll(1, 0))
        self.models = dict(zip(NAMES, (self.model, other), strict=True))
        self.loads: list[str] = []
        entries = [Entry([name], self._loader(name), ROWS) for name in NAMES]
        self.service = Service(entries, SETTINGS)
        self.service.shared.thread = SimulatedThread(
            self.loop, self._check_turn, self._session, idle_s=0.0, max_sessions=2, is_main=is_main
        )
        self.service.ready = True
        _current.service = self.service

    def _loader(self, name: str) -> Callable[[], Generator]:
        def load() -> Generator:
            if self.model.faults.meets("load"):
                self.fault_times.append(self.loop.time())
                raise RuntimeError("the files are gone")
            self.loads.append(name)
            own = self.generator
            target = LoadedModel(name, self.models[name], own.target.tokenizer, own.target.eos_token_ids)
            return Generator(
                target, own._build_drafter, own.rule, own.policy, max_batch_size=ROWS, drafter=own.drafter_name
            )

        return load

    def _session(self, kind: Kind) -> Session:
        served = next(one for one in self.service.loaded if one.key == kind[0])
        session = served.generator.session(max_waiting=WAITING, prefix_bytes=PREFIX_BYTES)
        session.engine._prefiller._clock = None  # type: ignore[attr-defined]
        self.sessions.append(session)
        return session

    def plan(self, calls: Any = None) -> None:
        super().plan(calls)
        self.model.room = 1 << 62
        if calls is not None:
            return
        # grammars belong to a Served, which does not live as long as the run
        self.calls = [call for call in self.calls if "response_format" not in call.body]
        for call in self.calls:
            call.body = {**call.body, "model": self.dice.choice(NAMES)}
        if self.dice.random() < 0.2:
            self.model.faults.plan(self.dice, "load", 1, 3)

    def _check_turn(self) -> None:
        present = {id(one) for one in self.service.shared.thread._sessions.values()}
        self.sessions = [one for one in self.sessions if id(one) in present]
        super()._check_turn()
        if len(self.service.loaded) > 1 or len({kind[0] for kind in self.service.shared.thread._sessions}) > 1:  # type: ignore[index]
            self.problems.append("two models are loaded")

    def _check_end(self) -> None:
        super()._check_end()
        rule = self.service._residency
        if rule.waiting or any(rule.users.values()) or self.service._change is not None:
            self.problems.append(f"{len(rule.waiting)} requests wait, and {rule.users} are used")

    def _is_explained(self, call: Call, error: str) -> bool:
        if error == "model_not_loaded" or (error == "api_error" and call.path == "/v1/messages"):
            return "load" in self.model.faults.happened
        return super()._is_explained(call, error)


def simulate_several(seed: int) -> tuple[list[str], SeveralModels]:
    """Run a seed; return the violated invariants, and the run."""
    one = SeveralModels(seed)
    one.plan()
    return one.run(), one
