"""Commands that show, change, measure and save the conversation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from foresay import __version__
from foresay.cli.common import model_expression
from foresay.cli.console import table
from foresay.cli.console.answer import generate
from foresay.cli.console.screen import unechoed
from foresay.cli.console.session import INTERRUPTED, ChatSession, Exchange
from foresay.cli.console.settings import no_argument
from foresay.cli.progress import loading
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.files import atomic_write
from foresay.generation.method import Method
from foresay.lab.data.items import PromptItem
from foresay.lab.tune import DRAFTERS
from foresay.lengths import LENGTHS
from foresay.spec.expressions import parse, to_expression
from foresay.text.formatting import percent, yes_no


def answer(session: ChatSession, text: str) -> None:
    """Answer a message; append both to the conversation."""
    if not text.strip():
        return
    one = generate(session, text, session.exchanges)
    if one is not None:
        session.exchanges.append(one)


def retry(session: ChatSession, argument: str) -> None:
    """/retry: generate the last answer again, with the present settings."""
    no_argument("retry", argument)
    one = generate(session, session.last().user, session.exchanges[:-1])
    if one is not None:
        session.exchanges[-1] = one


def undo(session: ChatSession, argument: str) -> None:
    """/undo: remove the last message and its answer."""
    no_argument("undo", argument)
    removed = session.last()
    session.exchanges.pop()
    session.screen.line(f"removed: {_short(removed.user)}")


def clear(session: ChatSession, argument: str) -> None:
    """/clear: start a new conversation; settings and system message stay."""
    no_argument("clear", argument)
    session.exchanges.clear()
    session.screen.line("a new conversation")


def history(session: ChatSession, argument: str) -> None:
    """/history: show the conversation."""
    no_argument("history", argument)
    if session.system is not None:
        session.screen.line(f"system: {session.system}")
    left_out = session.exchanges[-1].left_out if session.exchanges else 0
    for i, one in enumerate(session.exchanges):
        if i == left_out and left_out:
            session.screen.note("(the model no longer sees the lines above)")
        session.screen.line(f"you: {one.user}")
        session.screen.line(f"answer{f' ({INTERRUPTED})' if one.ended == INTERRUPTED else ''}: {one.answer}")
    if not session.exchanges:
        session.screen.line("no messages yet")


def stats(session: ChatSession, argument: str) -> None:
    """/stats: counts and times of the last answer and of the conversation."""
    no_argument("stats", argument)
    last = session.last()
    session.screen.line(f"last answer: {_figures(last.stats, last.seconds)}, exact {yes_no(last.exact)}")
    exact = all(one.exact for one in session.exchanges)
    counts, seconds = session.totals()
    count = f"{len(session.exchanges)} answer{'s' if len(session.exchanges) > 1 else ''}"
    session.screen.line(f"conversation: {count}, {_figures(counts, seconds)}, exact {yes_no(exact)}")


def _figures(counts: Stats, seconds: float) -> str:
    share = counts.draft_s / counts.total_s if counts.total_s else None
    return (
        f"{counts.num_tokens} tokens in {seconds:.2f} s, {counts.num_tokens / seconds if seconds else 0:.1f} tokens/s, "
        f"{counts.block_efficiency or 0:.2f} tokens/pass, accepted {percent(counts.acceptance_rate)}, "
        f"drafting {percent(share)} of the time"
    )


def compare(session: ChatSession, argument: str) -> None:
    """/compare PROMPT: decode it without speculation and with each method; without PROMPT, the last message."""
    user, before = (argument, session.exchanges) if argument else (session.last().user, session.exchanges[:-1])
    prompt: Any = session.fitted(before, user)[0]
    raw = isinstance(prompt, str)
    item = PromptItem("", prompt if raw else tuple(prompt), raw=raw)
    with unechoed(session.interactive), loading("Preparing the drafters") as progress:
        rows = table.compare(session.generator, item, _methods(session), session.draft, session.params, 1, progress)
    session.screen.line(table.table(rows, session.screen.out))
    for line in table.differences(rows, session.generator.tokenizer):
        session.screen.line(line)
    if not session.generator.rule.exact:
        session.screen.note(f"(the rule {session.generator.rule.name} is lossy: its output may differ)")


def _methods(session: ChatSession) -> list[Method]:
    """The n-gram drafters, the draft model, and the drafter in use at its present length; the others at their own length."""
    own = session.generator.drafter_name
    known = [*DRAFTERS, *([] if session.draft is None else [model_expression(session.draft)])]
    named = [Method(name) for name in known if parse(name) != parse(own)]
    length = session.length or to_expression(session.generator.policy, LENGTHS)
    return named if own == "none" else [*named, Method(own, length)]


def save(session: ChatSession, argument: str) -> None:
    """/save FILE: write settings, messages, counts and times as JSON; /save! FILE replaces a file."""
    _save(session, argument, replace=False)


def save_over(session: ChatSession, argument: str) -> None:
    """/save! FILE: as /save, replacing an existing file."""
    _save(session, argument, replace=True)


def _save(session: ChatSession, argument: str, *, replace: bool) -> None:
    if not argument:
        raise ConfigError("/save needs a file name")
    path = Path(argument).expanduser()
    text = json.dumps(record(session), ensure_ascii=False, indent=2) + "\n"
    if path.exists() and not replace:
        raise ConfigError(f"{str(path)!r} exists; /save! {argument} replaces it")
    with atomic_write(path) as whole:
        whole.write_text(text, encoding="utf-8")
    session.screen.line(f"saved to {path}")


def record(session: ChatSession) -> dict[str, Any]:
    """Content of the file that /save writes."""
    generator = session.generator
    settings = {
        "model": generator.target.name,
        "draft": session.draft,
        **session.method,
        "exact": generator.rule.exact,
        "template": session.template,
        "params": _params(session.params),
    }
    return {
        "foresay": __version__,
        "settings": settings,
        "messages": session.messages(),
        "answers": [_answer(one) for one in session.exchanges],
    }


def _params(params: SamplingParams) -> dict[str, Any]:
    """Parameters that differ from their defaults, and those that every answer depends on."""
    kept = ("max_new_tokens", "temperature", "seed")
    fields = [f for f in dataclasses.fields(params) if f.name != "processors"]
    differ = {f.name for f in fields if getattr(params, f.name) != getattr(SamplingParams(), f.name)}
    return {f.name: getattr(params, f.name) for f in fields if f.name in kept or f.name in differ}


def _answer(one: Exchange) -> dict[str, Any]:
    """An exchange without its text, which is among the messages."""
    return {
        **one.method,
        "params": _params(one.params),
        "seed": one.seed,
        "exact": one.exact,
        "ended": one.ended,
        "left_out": one.left_out,
        "draft_error": one.draft_error,
        "seconds": one.seconds,
        "tokens_per_s": one.rate,
        "stats": one.stats.as_dict(),
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
