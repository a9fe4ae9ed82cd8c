"""One simulated run of the server: a seed decides the requests, their clients, the pauses and the faults; then the invariants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.session import Session
from foresay.lengths import ConstantLength
from foresay.models.sources.wrapping import LoadedModel
from foresay.server.app import make_app
from foresay.server.guards import App
from foresay.server.service import Service
from foresay.server.settings import ServerSettings
from foresay.server.shared import Kind, is_main
from helpers import tiny
from simulation.bodies import BODIES, error_of, outputs
from simulation.client import Call, Manner
from simulation.loop import SimulatedLoop, SimulatedThread, StuckError
from simulation.model import Faults, FaultyDrafter, HashModel

ROWS, WAITING = 3, 4
PREFIX_BYTES = 600
LIMIT_S = 5.0
"""Time limit of a request, in seconds of the virtual clock."""
FAULTS = ("allocation", "target", "target memory", "drafter raises", "drafter exits", "drafter nonsense", "grammar")
OF_TARGET = frozenset({"allocation", "target", "target memory"})


@cache
def _tokenizer() -> Any:
    return tiny.tokenizer(chat=True)


@cache
def _model() -> HashModel:
    return HashModel(len(_tokenizer()))


class _Current:
    """The service of the present run, for an application that is built once: building it takes as long as a run."""

    service: Service

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


_current = _Current()


@cache
def _application() -> App:
    return make_app(cast(Service, _current))


SETTINGS = ServerSettings(timeout_s=LIMIT_S, max_waiting=WAITING, drain_s=1.0)


class Evens:
    """A grammar of even tokens, which gives up when a fault is due."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def mask_after(self, prompt_length: int) -> Evens:
        return self

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._faults.meets("grammar"):
            raise ConfigError("the output can no longer follow the schema")
        out = scores.clone()
        out[:, 1::2] = -torch.inf
        return out


@dataclass
class Simulation:
    """A server on a simulated loop."""

    seed: int
    problems: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    fault_times: list[float] = field(default_factory=list)
    """When faults of the target happened."""
    most_limits: int = 2
    """Time limits that a request may reach one after the other."""
    turns_left: int | None = None
    """Turns that the session may take until it has no work, once every client has left."""

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.loop = SimulatedLoop(self.dice)
        self.model = HashModel.__new__(HashModel)
        self.model.__dict__.update(_model().__dict__)
        self.model.faults = Faults()
        target = LoadedModel("simulated", self.model, _tokenizer(), frozenset({0}))
        draft = lambda: FaultyDrafter(self.model.faults, self.dice, self.model.vocab_size)  # noqa: E731
        self.generator = Generator(
            target, draft, make_rule("coupled"), ConstantLength(3), max_batch_size=ROWS, drafter="suffix"
        )
        self.service = Service.of(self.generator, SETTINGS, ["simulated"])
        self.service.shared.thread = SimulatedThread(
            self.loop, self._check_turn, self._session, idle_s=0.0, max_sessions=2, is_main=is_main
        )
        (model,) = self.service.loaded
        model.grammar = self._grammar  # type: ignore[method-assign, assignment]
        _current.service = self.service
        self.app = _application()
        self.service.ready = True
        self.sessions: list[Session] = []

    def _session(self, kind: Kind) -> Session:
        session = self.generator.session(max_waiting=WAITING, prefix_bytes=PREFIX_BYTES)
        session.engine._prefiller._clock = None  # type: ignore[attr-defined]
        self.sessions.append(session)
        self.model.taken = lambda: sum(one.engine.cached_bytes + one.engine.prefix_bytes for one in self.sessions)
        return session

    async def _grammar(self, source: Any, **of: Any) -> Any:
        return Evens(self.model.faults)

    def plan(self, calls: Sequence[Call] | None = None) -> None:
        """Draw the requests and faults, unless the requests are given."""
        dice = self.dice
        if calls is not None:
            self.calls = list(calls)
            return
        for _ in range(dice.randrange(1, 8)):
            path, body = dice.choice(BODIES)
            manner = dice.choice((Manner.READS, Manner.READS, Manner.READS, *Manner))
            self.calls.append(Call(path, body, manner, dice.uniform(0, 0.3), dice.expovariate(6)))
        self.loop.turns_per_s = dice.choice((50, 50, 50, 1))
        for name in FAULTS:
            if dice.random() < 0.15:
                self.model.faults.plan(dice, name, dice.choice((1, 1, 2)), 12)
        if dice.random() < 0.2:
            self.model.room = dice.choice((200, 400, 800))
        if dice.random() < 0.1:
            self.loop.call_later(
                dice.uniform(0, 0.4), lambda: asyncio.ensure_future(self.service.drain(), loop=self.loop)
            )

    def run(self) -> list[str]:
        """Run to the end; return the violated invariants."""
        asyncio.set_event_loop(self.loop)
        _current.service = self.service
        try:
            self.loop.run_until_complete(self._all())
            self._check_end()
        except StuckError:
            self.problems.append("the run does not end: " + ", ".join(c.path for c in self.calls if c.ended is None))
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
        return self.problems

    async def _all(self) -> None:
        await asyncio.gather(*(call.run(self.app) for call in self.calls))
        self.turns_left = 3
        await asyncio.sleep(100.0)  # cancelled requests free their rows in the next turn

    def _check_turn(self) -> None:
        """Invariants after each turn of the session thread."""
        happened = sum(name in OF_TARGET for name in self.model.faults.happened)
        while len(self.fault_times) < happened:
            self.fault_times.append(self.loop.time())
        if self.turns_left is not None and any(session.has_work for session in self.sessions):
            self.turns_left -= 1
            if self.turns_left == 0:
                self.problems.append("requests are decoded although their clients have left")
        for session in self.sessions:
            engine = session.engine
            lengths, rows = engine.cache.lengths, engine.rows
            if len(lengths) != len(rows) or len(rows) > ROWS:
                self.problems.append(f"{len(rows)} rows, {len(lengths)} rows of the cache")
            for row, length in zip(rows, lengths, strict=False):
                if length > row.size - 1:
                    self.problems.append(f"a cache row of {length} tokens for a row of {row.size}")
            if engine.prefix_bytes > PREFIX_BYTES:
                self.problems.append(f"{engine.prefix_bytes} bytes of prefixes")
            if self.model.room < 1 << 62 and engine.num_active > 1:
                needed = self.model.cache_bytes([row.limit for row in rows])
                if needed > self.model.room:
                    self.problems.append(f"{needed} bytes of rows in a room of {self.model.room}")

    def _check_end(self) -> None:
        for call in self.calls:
            self._check_call(call)
        self.problems += self.loop.failures
        shared = self.service.shared
        if shared.num_open:
            self.problems.append(
                f"{len(shared._open_limits)} open requests, {shared.queues.before_rows} being prepared"
            )
        thread = shared.thread
        if thread._listeners or thread._calls:
            self.problems.append(f"{len(thread._listeners)} listeners and {len(thread._calls)} calls are left")
        for session in thread._sessions.values():
            engine = session.engine
            if engine.has_work or session._open or engine.cache.lengths or engine.num_waiting:
                self.problems.append(f"work is left: {engine.num_active} rows, {len(session._open)} requests")
        if pending := [task for task in asyncio.all_tasks(self.loop) if not task.done()]:
            self.problems.append(f"tasks are left: {pending}")

    def _check_call(self, call: Call) -> None:
        """A request that its client read has one response: its own output, or an error that a fault explains."""
        name = f"{call.path} {call.body} ({call.manner})"
        if call.failure is not None:
            self.problems.append(f"{name}: raised {call.failure!r}")
        if call.starts > 1 or call.ends > 1:
            self.problems.append(f"{name}: {call.starts} starts, {call.ends} ends")
        assert call.began is not None and call.ended is not None
        if call.ended - call.began > self.most_limits * LIMIT_S:
            self.problems.append(f"{name}: {call.ended - call.began:.1f} s")
        if call.manner is not Manner.READS:
            return
        if not call.is_complete:
            self.problems.append(f"{name}: no complete response")
            return
        error = error_of(call)
        if error is None:
            expected, found = reference(call.path, call.body, type(self)), outputs(call)
            if found != expected:
                self.problems.append(f"{name}: {found} instead of {expected}")
        elif not self._is_explained(call, error):
            self.problems.append(f"{name}: the error {error}, status {call.status}")

    def _is_explained(self, call: Call, error: str) -> bool:
        """True if an error has a cause: a fault of the target while the request was open, a full queue, a limit, the end."""
        assert call.began is not None and call.ended is not None
        if error in ("generation_failed", "internal", "api_error", "out_of_memory") and any(
            call.began <= time <= call.ended for time in self.fault_times
        ):
            return True
        if error == "cannot_go_on":
            return "grammar" in self.model.faults.happened and "response_format" in call.body
        if error == "out_of_memory":
            return self.model.room < 1 << 62
        if error == "shutting_down":
            return self.service.shared.draining
        if error == "queue_full":
            return len(self.calls) > 1
        return error == "timeout" and call.ended - call.began >= LIMIT_S


def plain_text(path: str, body: Mapping[str, Any]) -> str | None:
    """The text of a completion of one prompt of token ids, by plain decoding in the library; None for other requests."""
    simple = {"prompt", "temperature", "max_tokens", "seed", "ignore_eos", "stream", "stream_options"}
    prompt = body.get("prompt")
    if path != "/v1/completions" or body.keys() - simple or not isinstance(prompt, list) or isinstance(prompt[0], list):
        return None
    params = SamplingParams(
        max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body.get("seed"), ignore_eos=True
    )
    one = Simulation(0)
    one.loop.close()
    return str(one.generator.plain().generate(prompt, params).text)


_references: dict[str, Any] = {}


def reference(path: str, body: Mapping[str, Any], kind: type[Simulation] = Simulation) -> Any:
    """The outputs of a request alone, without faults."""
    key = f"{kind.__name__} {path} {sorted(body.items(), key=str)}"
    if key not in _references:
        one, call = kind(0), Call(path, dict(body))
        one.plan([call])
        one._check_call = lambda call: None  # type: ignore[method-assign]
        problems = one.run()
        assert not problems and call.status == 200, (path, body, problems, call.status, call.data[:300])
        _references[key] = outputs(call)
    return _references[key]


def simulate(seed: int) -> list[str]:
    """Run a seed; return the violated invariants."""
    one = Simulation(seed)
    one.plan()
    return one.run()
