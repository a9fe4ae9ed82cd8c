"""The commands by name, and how a line becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import cleandoc

from rich.text import Text

from foresay.cli.console import conversation, settings
from foresay.cli.console.input import Entry, Words
from foresay.cli.console.session import ChatSession
from foresay.cli.console.settings import Command, nothing
from foresay.cli.methods import catalogue
from foresay.decoding.acceptance import RULES
from foresay.errors import ConfigError
from foresay.lengths import LENGTHS
from foresay.models.sources.packaged import ALIASES
from foresay.spec.recipes import DRAFTERS


def help_(session: ChatSession, argument: str) -> None:
    """/help COMMAND: what a command does; without one, all of them."""
    if argument:
        _help_on(session, resolve(argument.removeprefix("/")))
        return
    session.screen.pairs([_documented(command) for command in COMMANDS.values()])
    session.screen.note("A name may be cut short: /temp 0.7. A message that begins with a slash: //like this.")
    session.screen.note('A line ending in \\ goes on; """ begins and ends a message of many lines.')


def _help_on(session: ChatSession, name: str) -> None:
    usage, purpose = _documented(COMMANDS[name])
    session.screen.line(Text.assemble((usage, "bold"), f": {purpose}"))
    kinds = {"drafter": 0, "rule": 1, "length": 2}
    if name in kinds:
        for signature, what in catalogue()[kinds[name]][2]:
            session.screen.line(f"  {signature}: {what}")


def quit_(session: ChatSession, argument: str) -> None:
    """/quit: leave; so does Ctrl-D."""
    nothing("quit", argument)
    session.running = False


COMMANDS: dict[str, Command] = {
    "drafter": settings.drafter,
    "draft": settings.draft,
    "rule": settings.rule,
    "length": settings.length,
    "gamma": settings.gamma,
    "greedy": settings.greedy,
    "temperature": settings.temperature,
    "top-k": settings.top_k,
    "top-p": settings.top_p,
    "min-p": settings.min_p,
    "seed": settings.seed,
    "max-new-tokens": settings.max_new_tokens,
    "template": settings.template,
    "system": settings.system,
    "trace": settings.trace,
    "store": settings.store,
    "settings": settings.settings,
    "history": conversation.history,
    "clear": conversation.clear,
    "undo": conversation.undo,
    "retry": conversation.retry,
    "compare": conversation.compare,
    "stats": conversation.stats,
    "save": conversation.save,
    "save!": conversation.save_over,
    "help": help_,
    "quit": quit_,
}
SYNONYMS = {"temp": "temperature", "exit": "quit"}
"""Shorter or other names, which no list shows."""


def _documented(command: Command) -> tuple[str, str]:
    """(usage, what it does), from the docstring."""
    usage, _, purpose = cleandoc(command.__doc__ or "").partition(": ")
    return usage, purpose


def resolve(name: str) -> str:
    """The command of this name, or the only one that begins so."""
    name = SYNONYMS.get(name, name)
    if name in COMMANDS:
        return name
    found = [known for known in COMMANDS if name and known.startswith(name) and not known.endswith("!")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"/{name} may be {', '.join('/' + one for one in found[:-1])} or /{found[-1]}")
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean /{near[0]}?" if near else ""
    raise ConfigError(f"unknown command /{name}.{hint} /help lists them; //{name} sends it as text")


def handle(session: ChatSession, entered: Entry) -> None:
    """Do what was entered: a command, or a message to answer. Raises ForesayError when that cannot be done."""
    text = entered.text
    if entered.block or not text.startswith("/"):
        conversation.say(session, text)
    elif text.startswith("//"):
        conversation.say(session, text[1:])
    else:
        name, *argument = text[1:].split(None, 1)[:2] or [""]
        COMMANDS[resolve(name)](session, argument[0].strip() if argument else "")


def words() -> Words:
    """What Tab completes: command names, and what each of them may be given."""
    switch: Callable[[], Iterable[str]] = lambda: ("on", "off")  # noqa: E731
    given: dict[str, Callable[[], Iterable[str]]] = {
        "drafter": lambda: ["auto", *DRAFTERS],
        "draft": lambda: ALIASES,
        "rule": lambda: RULES,
        "length": lambda: LENGTHS,
        "template": switch,
        "trace": switch,
        "seed": lambda: ["random"],
        "store": lambda: ["reset"],
        "system": lambda: ["none"],
        "help": lambda: COMMANDS,
    }
    return {name: given.get(name, list) for name in COMMANDS}
