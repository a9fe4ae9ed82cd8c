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


def described(session: ChatSession) -> dict[str, str]:
    """Every setting as text, by the command that changes it."""
    params, exact, method = session.params, session.generator.rule.exact, session.method
    out = {
        "model": session.generator.target.name,
        "drafter": method["drafter"],
        "length": method["length"],
        "rule": f"{session.rule} ({'exact' if exact else 'lossy: the output may differ from plain decoding'})",
        "temperature": "greedy" if params.greedy else f"{params.temperature:g}",
        "top-k": str(params.top_k or "all"),
        "top-p": f"{params.top_p:g}",
        "min-p": f"{params.min_p:g}",
        "seed": "random" if params.seed is None else str(params.seed),
        "max-new-tokens": str(params.max_new_tokens),
        "template": "on" if session.template else "off",
        "system": "none" if session.system is None else session.system,
        "trace": "on" if session.trace else "off",
    }
    extra = ("min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "ignore_eos")
    for name, value in _params(params).items():
        if name in extra:  # options of the program, shown if they are set
            out[name.replace("_", "-")] = shown(list(value) if isinstance(value, tuple) else value)
    return out


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
