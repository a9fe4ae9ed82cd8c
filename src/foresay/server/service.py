"""The models of a server: which of them are loaded, and the requests that wait for one.

Owns loading and unloading, which happen on the thread of the sessions, between two steps. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, time

import torch

from foresay.decoding.devices import is_remote
from foresay.errors import ForesayError, OutOfMemoryError
from foresay.generation.generator import Generator
from foresay.generation.session import Session
from foresay.models.cache.memory import Trimmer, left_bytes, trim
from foresay.server.acceptance import Acceptance
from foresay.server.errors import ApiError
from foresay.server.residency import Action, Residency, Waiting
from foresay.server.served import Served
from foresay.server.settings import ServerSettings
from foresay.server.shared import Shared

logger = logging.getLogger("foresay.server")
TRIM_S = 1.0
"""Time between two measurements of the allocator's slack."""
_LEASES: ContextVar[list[str]] = ContextVar("leases")
"""Models that the current request uses."""


def served_name(name: str) -> str:
    """Return the public name of a model: the last part of a local path, without ".gguf"; any other name unchanged."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.resolve().name.removesuffix(".gguf") or "model"


@dataclass(slots=True)
class Entry:
    """A model of the server, loaded or not."""

    names: list[str]
    """Names in the API, of which responses use the first."""
    load: Callable[[], Generator]
    max_batch_size: int
    num_bytes: int = 0
    """Estimated or measured memory of the weights on the processor."""
    served: Served | None = None
    """None while it is not loaded."""
    length: int | None = None
    """Length of the context; None before it was first loaded."""
    is_too_large: bool = False
    """True if it was loaded alone and exceeds the memory limit."""
    name: str = field(init=False)
    """The first name."""
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    """By drafting method."""

    def __post_init__(self) -> None:
        self.name = self.names[0]


class Service:
    """The models of one server. A single one is loaded at once, several when a request names them."""

    def __init__(self, entries: Sequence[Entry], settings: ServerSettings) -> None:
        """entries: a request that names no model uses the first."""
        self.entries, self.settings, self.ready = list(entries), settings, False
        self.created = int(time())
        """Time from which the models exist for clients, in seconds since 1970."""
        self.shared = Shared(settings, max(one.max_batch_size for one in entries))
        self.metrics = self.shared.metrics
        self._residency = Residency(settings.max_loaded)
        self._by_name = {one.name: one for one in entries}
        self._change: asyncio.Task[None] | None = None
        """The model that is being loaded or unloaded."""
        if len(self.entries) == 1:
            self._add(self.entries[0], self.entries[0].load())

    @classmethod
    def of(cls, generator: Generator, settings: ServerSettings, names: Sequence[str]) -> Service:
        """Return the service of one model that is loaded."""
        return cls([Entry(list(names), lambda: generator, generator.max_batch_size)], settings)

    @property
    def loaded(self) -> list[Served]:
        """The loaded models."""
        return [one.served for one in self.entries if one.served is not None]

    def entry(self, name: str | None) -> Entry:
        """Return a model by one of its names, the first model without one. Raises ApiError for one that is not served here."""
        found = next((one for one in self.entries if name is None or name in one.names), None)
        if found is None:
            names = ", ".join(repr(one.names[0]) for one in self.entries)
            text = f"the model {name!r} is not served here; this server serves {names}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return found

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the models that a request uses loaded until it has ended."""
        leases: list[str] = []
        before = _LEASES.set(leases)
        try:
            yield
        finally:
            _LEASES.reset(before)
            for name in leases:
                self._residency.release(name)
            if leases and len(self.entries) > 1:
                self._advance()

    def take(self, name: str | None) -> Served | None:
        """Return a model for the current request; None if the request has to wait. Raises ApiError as `entry` does."""
        entry = self.entry(name)
        if not self._residency.take(entry.name):
            return None
        _LEASES.get().append(entry.name)
        return entry.served

    async def wait(self, name: str | None) -> Served:
        """Return a model for the current request once it is loaded and earlier requests for others had their turn.

        Raises QueueFullError if too many requests wait, and ApiError after the time limit, at the server's shutdown, and if it
        cannot be loaded; OutOfMemoryError if its loading passes the memory limit.
        """
        entry, leases, ready = self.entry(name), _LEASES.get(), asyncio.get_running_loop().create_future()
        if entry.is_too_large:
            raise _too_large(entry)

        def admitted() -> None:
            leases.append(entry.name)
            if not ready.done():
                ready.set_result(None)

        waiting = Waiting(entry.name, admitted, lambda error: None if ready.done() else ready.set_exception(error))
        why = f": the model {entry.name!r} had to wait for requests of others"
        with self.shared.queues.models.slot(), self.shared.time_limit(why) as limit:
            self._residency.waiting.append(waiting)
            self._advance()
            try:
                await limit.wait(ready)
            finally:
                self._residency.leave(waiting)
                self._advance()
        assert entry.served is not None
        return entry.served

    def _advance(self) -> None:
        """Do what the waiting requests need next, if it can be done now."""
        while self._change is None and (due := self._residency.next(self._fits)) is not None:
            action, name = due
            if action is Action.ADMIT:
                self._residency.admit(name)
            else:
                change = self._load if action is Action.LOAD else self._unload
                self._change = asyncio.ensure_future(self._changed(change(self._by_name[name])))

    async def _changed(self, change: Coroutine[None, None, None]) -> None:
        try:
            await change
        finally:
            self._change = None
            self._advance()

    def _fits(self, name: str) -> bool:
        left = left_bytes()
        return left is None or self._by_name[name].num_bytes < left

    def _add(self, entry: Entry, generator: Generator) -> None:
        entry.served = Served(generator, entry.names, self.shared, entry.acceptance)
        entry.length = generator.target.model.max_length
        if not is_remote(generator.target.model.device):
            entry.num_bytes = max(entry.num_bytes, entry.served.weight_bytes)
        self._residency.loaded(entry.name)
        self._count_weights()

    def _count_weights(self) -> None:
        self.metrics.weight_bytes.set(sum(one.weight_bytes for one in self.loaded))

    async def _load(self, entry: Entry) -> None:
        began = perf_counter()
        try:
            self._add(entry, await asyncio.wrap_future(self.shared.thread.call(entry.load)))
            logger.info("loaded %s in %.1f s", entry.name, perf_counter() - began)
        except Exception as error:
            logger.error("the model %s cannot be loaded", entry.name, exc_info=error)
            self._residency.refuse(entry.name, _load_error(entry, error))
        if entry.served is None:  # after the block, in which the error keeps its parts alive
            await asyncio.wrap_future(self.shared.thread.call(_free_memory))
            return
        if (left := left_bytes()) is not None and left <= 0:
            await self._undo(entry)

    async def _undo(self, entry: Entry) -> None:
        """Unload a model that exceeds the memory limit; it is loaded again once it is alone, if it was not."""
        entry.num_bytes = 1 << 62
        await self._unload(entry)
        if not self._residency.users:
            entry.is_too_large = True
            self._residency.refuse(entry.name, _too_large(entry))

    async def _unload(self, entry: Entry) -> None:
        served, entry.served = entry.served, None
        assert served is not None
        self._residency.unloaded(entry.name)  # first: from here on, requests for it wait
        try:
            await asyncio.to_thread(served.closing())
            await asyncio.wrap_future(self.shared.thread.call(served.end_sessions))
        except Exception:
            logger.exception("the model %s was not unloaded cleanly", entry.name)
        del served
        self._count_weights()
        await asyncio.wrap_future(self.shared.thread.call(_free_memory))
        logger.info("unloaded %s", entry.name)

    async def sessions(self) -> list[Session]:
        """Return the open sessions."""
        if self._change is not None:  # the thread may be loading a model
            return self.shared.thread.present()
        return await asyncio.wrap_future(self.shared.thread.sessions())

    async def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        prefixes = {one.name: f"{one.name}: " if len(self.entries) > 1 else "" for one in self.entries}
        acceptance = {
            prefixes[one.name] + method: found for one in self.entries for method, found in one.acceptance.items()
        }
        memories = [memory for one in self.loaded for memory in one.memories]
        return self.metrics.text(await self.sessions(), memories, acceptance, self.shared.queues.before_rows)

    async def warm(self) -> None:
        """Load the first model, if it is not, and decode a few tokens with it. One that cannot be loaded is in the log."""
        with self.request(), suppress(ApiError, ForesayError):
            served = self.take(None) or await self.wait(None)
            await served.warm()

    @property
    def not_ready(self) -> str:
        """Why later requests should go to another server; empty if they need not."""
        if self.shared.draining or not self.ready:
            return "the server is shutting down" if self.shared.draining else "the server has not started"
        return self.shared.queues.problem

    async def watch(self) -> None:
        """Return freed memory to the system, and log a thread that is stuck, for as long as the server runs."""
        trimmer, logged = Trimmer(), ""
        while True:
            await asyncio.sleep(TRIM_S)
            await asyncio.to_thread(trimmer.check, idle=not self.shared.num_open)
            problem, before = self.shared.queues.problem, logged
            if problem != before:
                logged = problem
                logger.error("%s", problem or f"over: {before}")

    async def drain(self) -> None:
        """Accept no more requests; wait for the open ones up to the drain limit, then end them."""
        self.shared.draining = True
        for one in self.loaded:
            one.stop_compiling()
        await self.shared.end_requests()
        for one in self.loaded:
            if one.memories:
                await asyncio.to_thread(one.flush)


def _load_error(entry: Entry, error: Exception) -> Exception:
    if isinstance(error, OutOfMemoryError):
        return OutOfMemoryError(f"the model {entry.name!r}: {error}")
    text = f"the model {entry.name!r} cannot be loaded; the server's log has the details"
    return ApiError(500, text, param="model", code="model_not_loaded")


def _too_large(entry: Entry) -> ApiError:
    text = f"the model {entry.name!r} does not fit into the memory limit of this server, even alone"
    return ApiError(503, text, param="model", code="out_of_memory")


def _free_memory() -> None:
    """Return the memory of an unloaded model to the system."""
    gc.collect()
    trim()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
