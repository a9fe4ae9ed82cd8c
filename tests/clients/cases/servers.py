"""The servers that cases name: small models made on the spot, each started when a case first needs it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

import foresay
from clients.cases.bodies import KEY, ORIGIN
from clients.cases.case import Case, Request
from clients.cases.replies import Reply, parsed
from helpers import chains, tiny
from helpers.serving import CLIENT, Running
from helpers.tool_chats import TEMPLATE

THINKING = TEMPLATE + "{% if enable_thinking %}{% endif %}{# </think> #}"
"""A template whose model reasons, and which has a switch for it."""
EFFORTS = "{{ reasoning_effort }}{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
SPECIAL = ("<tool_call>", "<think>", "</think>")
THOUGHT = ("<think>", "Let me", " think", "</think>")
ANSWER = ("It is", " 98 degrees", " in", " Dallas", ".")
CALL = (
    *("<tool_call>", '\n{"name": "get_current', '_weather", "arg'),
    *('uments": {"city": "Dal', 'las", "state": "TX"}}\n'),
)
SECOND = (
    *("</tool_call>", "\n<tool_call>\n", '{"name": "get_current_weather",', ' "arguments": '),
    *('{"city": "Orlando", "state":', ' "FL"}', "}\n </tool_call>"),
)
GAP = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
"""Tokens of a model that fills in text between two texts."""
FILLING = ("return", " 0;")
Loader = Callable[[Path], "foresay.Generator"]


def _load(folder: Path, **options: Any) -> foresay.Generator:
    return foresay.load(str(folder), **{"num_draft_tokens": 3, **options})


def _chain(*pieces: str) -> Loader:
    return lambda folder: _load(chains.save(folder, pieces, THINKING, special=SPECIAL))


def _fills(folder: Path) -> foresay.Generator:
    """Return a model that fills in text between two texts."""
    return _load(chains.save(folder, ANSWER, TEMPLATE, special=GAP, others=(GAP[:2], (GAP[2], *FILLING))))


MODELS: dict[str, Loader] = {
    "tiny": lambda folder: _load(tiny.save(folder, chat=True)),
    "undrafted": lambda folder: _load(tiny.save(folder, chat=True), drafter="none", num_draft_tokens=None),
    "small": lambda folder: _load(tiny.save(folder, tiny.llama(context=128), chat=True)),
    "tools": lambda folder: _load(tiny.save(folder, chat=TEMPLATE), drafter="suffix"),
    "efforts": lambda folder: _load(tiny.save(folder, chat=tiny.CHAT_TEMPLATE + EFFORTS)),
    "fills": _fills,
    "thinks": _chain(*THOUGHT, *ANSWER),
    "answers": _chain(*ANSWER),
    "calls": _chain(*THOUGHT, *CALL, "</tool_call>"),
    "calls_twice": _chain(*CALL, *SECOND),
}
"""Name of a server -> its model."""
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys": ("tiny", {"keys": frozenset({KEY})}),
    "origins": ("tiny", {"cors": (ORIGIN,)}),
    "origins_and_keys": ("tiny", {"keys": frozenset({KEY}), "cors": (ORIGIN,)}),
}
"""Name of a server -> the model of another one, and settings."""


class Servers:
    """The running servers of one test session."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self._new_folder = new_folder
        self._generators: dict[str, foresay.Generator] = {}
        self._running: dict[str, Running] = {}

    def url(self, name: str) -> str:
        """Return the address of a server, which is started if it does not run."""
        if name not in self._running:
            model, settings = SETTINGS.get(name, (name, {}))
            if model not in self._generators:
                self._generators[model] = MODELS[model](self._new_folder(model))
            self._running[name] = Running(self._generators[model], **settings)
        return self._running[name].url

    def close(self) -> None:
        for one in self._running.values():
            one.close()

    def replies(self, case: Case) -> list[Reply]:
        """Send the requests of a case."""
        if case.together:
            self.url(case.server)
            with ThreadPoolExecutor(len(case.sent)) as pool:
                return list(pool.map(lambda request: self._send(case, request, request.body), case.sent))
        out: list[Reply] = []
        for request in case.sent:
            out.append(self._send(case, request, request.body_after(out)))
        return out

    def _send(self, case: Case, request: Request, body: Any) -> Reply:
        url = self.url(request.server or case.server) + request.path
        content = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
        try:
            answer = CLIENT.request(
                request.method, url, headers=dict(request.headers), timeout=request.give_up_s or 60, **content
            )
        except httpx.TimeoutException:
            if request.give_up_s is None:
                raise
            return Reply(0, {}, "", None)
        kind = answer.headers.get("content-type", "")
        return Reply(answer.status_code, dict(answer.headers), answer.text, parsed(answer.text, kind))
