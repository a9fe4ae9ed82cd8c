"""Settings and the conversation of a console as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from foresay.cli.console.session import ChatSession, Exchange
from foresay.cli.methods import shown
from foresay.decoding.sampling_params import SamplingParams
from foresay.files import atomic_write
from foresay.version import __version__

_FURTHER = ("min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "ignore_eos")
"""Options of the program that no command changes."""


def further(session: ChatSession) -> dict[str, str]:
    """Return options of the program that are set, as text."""
    found = {name: value for name, value in _params(session.params).items() if name in _FURTHER}
    return {n.replace("_", "-"): shown(list(v) if isinstance(v, tuple) else v) for n, v in found.items()}


def save(session: ChatSession, path: Path) -> None:
    """Write settings, messages, counts and times as JSON."""
    settings = {
        "model": session.generator.target.name,
        "draft": session.draft,
        **session.method,
        "exact": session.generator.rule.exact,
        "template": session.template,
        "params": _params(session.params),
    }
    record = {
        "foresay": __version__,
        "settings": settings,
        "messages": session.messages(),
        "answers": [_answer(one) for one in session.exchanges],
    }
    with atomic_write(path) as whole:
        whole.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _params(params: SamplingParams) -> dict[str, Any]:
    """Parameters that differ from their defaults, and those that every answer depends on."""
    kept, defaults = ("max_new_tokens", "temperature", "seed"), SamplingParams()
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name != "processors"}
    return {name: value for name, value in values.items() if name in kept or value != getattr(defaults, name)}


def _answer(one: Exchange) -> dict[str, Any]:
    """An exchange without its text, which is among the messages."""
    kept = ("seed", "exact", "ended", "left_out", "draft_error", "seconds")
    values = {name: getattr(one, name) for name in kept}
    figures = {"tokens_per_s": one.rate, "stats": one.stats.as_dict()}
    return {**one.method, "params": _params(one.params), **values, **figures}
