"""The console's commands, as a table from names to what they do, and how a line becomes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.text import Text

from foresay.cli.colours import legend
from foresay.cli.commands import feature
from foresay.cli.common import idle, model_expression
from foresay.cli.console import saving
from foresay.cli.console.answer import generate
from foresay.cli.console.input import Entry, Words
from foresay.cli.console.screen import unechoed
from foresay.cli.console.session import INTERRUPTED, ChatSession
from foresay.cli.methods import catalogue
from foresay.cli.progress import advancing, loading
from foresay.decoding.acceptance import RULES
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.lengths import LENGTHS
from foresay.models.sources.packaged import ALIASES
from foresay.spec.recipes import DRAFTERS, third_party_names
from foresay.text.formatting import percent, yes_no

Action = Callable[[ChatSession, str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its value as help shows it ("" if it takes none), what it does, and the values that Tab completes."""

    value: str
    purpose: str
    run: Action
    """Called only with a value for a setting."""
    words: Callable[[], Iterable[str]] = list
    show: Callable[[ChatSession], str] | None = None
    """The present value of a setting."""


# -- settings


def _show(session: ChatSession, *names: str) -> None:
    """Print the settings of these names, a line each."""
    for name in names:
        if (show := COMMANDS[name].show) is not None:
            session.screen.line(f"{name}: {show(session)}")


def _settings(session: ChatSession, value: str) -> None:
    session.screen.line(f"model: {session.generator.target.name}")
    _show(session, *COMMANDS)
    for name, text in saving.further(session).items():
        session.screen.line(f"{name}: {text}")


def _method(parameter: str, words: Callable[[], Iterable[str]], purpose: str) -> Command:
    def run(session: ChatSession, value: str) -> None:
        with loading(f"Changing the {parameter}"):
            session.change(**{parameter: value})

    def show(session: ChatSession) -> str:
        exact = "exact" if session.generator.rule.exact else "lossy: the output may differ from plain decoding"
        return session.method[parameter] + (f" ({exact})" if parameter == "rule" else "")

    return Command("EXPRESSION", purpose, run, words, show)


def _draft(session: ChatSession, value: str) -> None:
    if value:
        COMMANDS["drafter"].run(session, model_expression(value))
        _show(session, "drafter", "length")
    else:
        session.screen.line(f"draft: {session.draft or 'none'}")


def _sampling(name: str, kind: type, purpose: str, show: Callable[[Any], str], *words: str) -> Command:
    """Return the setting of a sampling parameter. show: returns its value as text."""
    parameter = name.replace("-", "_")

    def run(session: ChatSession, value: str) -> None:
        session.set(**{parameter: None if value in words else _number(name, value, kind)})

    return Command(
        "N" if kind is int else "X", purpose, run, lambda: words, lambda one: show(getattr(one.params, parameter))
    )


def _number(name: str, text: str, kind: type) -> Any:
    """Return the value as an int or a float; its range is checked where it is used."""
    try:
        value = kind(text)
    except ValueError:
        allowed = ("an integer" if kind is int else "a number") + " or random" * (name == "seed")
        raise ConfigError(f"must be {allowed}", param=name, value=text) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError("must be a finite number", param=name, value=text)
    return value


def _switch(name: str, purpose: str) -> Command:
    def run(session: ChatSession, value: str) -> None:
        if value not in ("on", "off"):
            raise ConfigError("must be on or off", param=name, value=value)
        if (name, value) == ("template", "on") and not session.has_template:
            raise ConfigError("does not apply: this model has no chat template", param=name, value=value)
        setattr(session, name, value == "on")

    return Command("on|off", purpose, run, lambda: ("on", "off"), lambda one: "on" if getattr(one, name) else "off")


def _system(session: ChatSession, value: str) -> None:
    session.system = None if value == "none" else value


def _forget(session: ChatSession, value: str) -> None:
    session.generator.forget()
    session.screen.line("forgotten")


# -- the conversation


def answer(session: ChatSession, text: str) -> None:
    """Answer a message; append both to the conversation."""
    if text.strip() and (one := generate(session, text, session.exchanges)):
        session.exchanges.append(one)


def _retry(session: ChatSession, value: str) -> None:
    if one := generate(session, session.last().user, session.exchanges[:-1]):
        session.exchanges[-1] = one


def _undo(session: ChatSession, value: str) -> None:
    line = " ".join(session.last().user.split())
    session.exchanges.pop()
    session.screen.line(f"removed: {line if len(line) <= 60 else line[:59] + '…'}")


def _clear(session: ChatSession, value: str) -> None:
    session.exchanges.clear()
    session.screen.line("a new conversation")


def _history(session: ChatSession, value: str) -> None:
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


def _stats(session: ChatSession, value: str) -> None:
    last, (counts, seconds), number = session.last(), session.totals(), len(session.exchanges)
    exact = all(one.exact for one in session.exchanges)
    session.screen.line(f"last answer: {_figures(last.stats, last.seconds, last.exact)}")
    answers = f"{number} answer{'s' * (number > 1)}"
    session.screen.line(f"conversation: {answers}, {_figures(counts, seconds, exact)}")


def _figures(counts: Stats, seconds: float, exact: bool) -> str:
    share = counts.draft_s / counts.total_s if counts.total_s else None
    return (
        f"{counts.num_tokens} tokens in {seconds:.2f} s, {counts.num_tokens / seconds if seconds else 0:.1f} tokens/s, "
        f"{counts.block_efficiency or 0:.2f} tokens/pass, accepted {percent(counts.acceptance_rate)}, "
        f"drafting {percent(share)} of the time, exact {yes_no(exact)}"
    )


def _compare(session: ChatSession, value: str) -> None:
    user, before = (value, session.exchanges) if value else (session.last().user, session.exchanges[:-1])
    prompt: Any = session.fitted(before, user)[0]
    raw, table = isinstance(prompt, str), feature("compare")
    with unechoed(session.interactive), advancing("Comparing") as advance:
        methods = table.methods(session.generator, session.draft, session.length)
        given = (methods, session.draft, session.params, 1)
        rows = table.compare(session.generator, prompt if raw else tuple(prompt), *given, advance, raw=raw)
    table.show(rows, session.generator, session.loading)


def _save(*, replace: bool) -> Action:
    def run(session: ChatSession, value: str) -> None:
        if not value:
            raise ConfigError("needs a file name", param="save")
        path = Path(value).expanduser()
        if path.exists() and not replace:
            raise ConfigError(f"exists; /save! {value} replaces it", param="save", value=path)
        saving.save(session, path)
        session.screen.line(f"saved to {path}")

    return run


def _help(session: ChatSession, value: str) -> None:
    screen = session.screen
    if value:
        name = resolve(value.removeprefix("/"))
        screen.line(Text.assemble((_usage(name), "bold"), f": {COMMANDS[name].purpose}"))
        for _, option, entries in catalogue():
            for signature, summary in entries if option == f"--{name}" else ():
                screen.line(f"  {signature}: {summary}")
        return
    screen.pairs([(_usage(name), one.purpose) for name, one in COMMANDS.items()])
    screen.note("Names may be abbreviated: /temp 0.7. To send a message that begins with a slash: //like this.")
    screen.note('A line ending in \\ continues on the next; """ begins and ends a message of many lines.')


def _quit(session: ChatSession, value: str) -> None:
    session.running = False


# -- the table

# fmt: off
COMMANDS: dict[str, Command] = {
    "drafter": _method("drafter", lambda: ["auto", *DRAFTERS, *third_party_names()],
        "use another drafter, such as suffix(scale=3), at its own length; none is plain decoding, auto the default."),
    "draft": Command("MODEL", "use a draft model: an alias, hub id, folder or GGUF file.", _draft, lambda: ALIASES),
    "rule": _method("rule", lambda: RULES, "use another acceptance rule; lenience(2) and typical are lossy."),
    "length": _method("length", lambda: LENGTHS,
        "set the draft length: a number, heuristic, confidence(0.4), entropy, throughput; 0 is plain decoding."),
    "temperature": _sampling("temperature", float,
        "sample, from a distribution sharper below 1 and flatter above; 0 is greedy.", lambda x: f"{x:g}" if x else "greedy"),
    "top-k": _sampling("top-k", int, "sample from the N most likely tokens; 0 is all.", lambda n: str(n or "all")),
    "top-p": _sampling("top-p", float,
        "sample from the most likely tokens of this total probability, up to 1.", lambda x: f"{x:g}"),
    "min-p": _sampling("min-p", float,
        "sample from tokens at least this fraction as likely as the most likely.", lambda x: f"{x:g}"),
    "seed": _sampling("seed", int, "sample every answer from this seed; random draws one for each.",
        lambda n: "random" if n is None else str(n), "random"),
    "max-new-tokens": _sampling("max-new-tokens", int, "end an answer after N tokens.", str),
    "template": _switch("template", "use the model's chat template, or continue the conversation as one text."),
    "system": Command("TEXT", "the system message, for past answers too; none removes it.", _system, lambda: ["none"],
        lambda one: "none" if one.system is None else one.system),
    "trace": _switch("trace", "colour each token by its origin."),
    "forget": Command("", "let drafters forget what they learned from earlier answers.", _forget),
    "settings": Command("", "show every setting.", _settings),
    "history": Command("", "show the conversation.", _history),
    "clear": Command("", "start a new conversation; settings and system message stay.", _clear),
    "undo": Command("", "remove the last message and its answer.", _undo),
    "retry": Command("", "generate the last answer again, with the present settings.", _retry),
    "compare": Command("PROMPT",
        "decode it without speculation and with each method; without PROMPT, the last message.", _compare),
    "stats": Command("", "counts and times of the last answer and of the conversation.", _stats),
    "save": Command("FILE", "write settings, messages, counts and times as JSON.", _save(replace=False)),
    "save!": Command("FILE", "as /save, replacing an existing file.", _save(replace=True)),
    "help": Command("COMMAND", "describe a command; without one, list all.", _help, lambda: COMMANDS),
    "quit": Command("", "leave, as Ctrl-D does.", _quit),
}
# fmt: on
SYNONYMS = {"temp": "temperature", "gamma": "length", "exit": "quit"}
"""Other names, which no list shows."""
FLAGS = {name.replace("-", "_"): f"/{name}" for name in COMMANDS}
"""Names of Python arguments, and the commands that set them, for errors."""


def _usage(name: str) -> str:
    return f"/{name} {COMMANDS[name].value}".rstrip()


def resolve(name: str) -> str:
    """Return the full name of a command. Raises ConfigError for a name that is unknown or an ambiguous abbreviation."""
    name = SYNONYMS.get(name, name)
    if name in COMMANDS:
        return name
    found = [known for known in COMMANDS if name and known.startswith(name) and not known.endswith("!")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"is ambiguous: {', '.join(f'/{one}' for one in found)}", param=f"/{name}")
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean /{near[0]}?" if near else ""
    raise ConfigError(f"is unknown.{hint} /help lists the commands; //{name} sends it as text", param=f"/{name}")


def handle(session: ChatSession, entered: Entry) -> None:
    """Run a command, or answer a message. Raises ForesayError if that fails."""
    text = entered.text
    if entered.block or not text.startswith("/") or text.startswith("//"):
        answer(session, text.removeprefix("/") if text.startswith("//") and not entered.block else text)
        return
    word, _, value = text[1:].partition(" ")
    name, value = resolve(word.strip()), value.strip()
    if value and not COMMANDS[name].value:
        raise ConfigError(f"takes no value; drop {value!r}", param=name)
    if value or COMMANDS[name].show is None:
        COMMANDS[name].run(session, value)
    _show(session, name, *(["length"] if name == "drafter" else []))
    if value and session.params.greedy and idle(session.params).get(name):
        session.screen.note("(has no effect while decoding is greedy; /temperature 0.7 samples)")
    if name == "trace" and session.trace:
        session.screen.line(legend(session.screen.out))


def words() -> Words:
    """Completions for Tab: command names, and the values of each."""
    return {name: one.words for name, one in COMMANDS.items()}
