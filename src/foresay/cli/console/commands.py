"""The console's commands by name, and how a line becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import cleandoc

from rich.text import Text

from foresay.cli.console import conversation, settings
from foresay.cli.console.input import Entry, Words
from foresay.cli.console.session import ChatSession
from foresay.cli.console.settings import Command, no_argument
from foresay.cli.methods import catalogue
from foresay.decoding.acceptance import RULES
from foresay.errors import ConfigError
from foresay.lengths import LENGTHS
from foresay.models.sources.packaged import ALIASES
from foresay.spec.recipes import DRAFTERS, third_party_names


def help_(session: ChatSession, argument: str) -> None:
    """/help COMMAND: describe a command; without one, list all."""
    if argument:
        _help_on(session, resolve(argument.removeprefix("/")))
        return
    session.screen.pairs([_documented(command) for command in COMMANDS.values()])
    session.screen.note("Names may be abbreviated: /temp 0.7. To send a message that begins with a slash: //like this.")
    session.screen.note('A line ending in \\ continues on the next; """ begins and ends a message of many lines.')


def _help_on(session: ChatSession, name: str) -> None:
    usage, purpose = _documented(COMMANDS[name])
    session.screen.line(Text.assemble((usage, "bold"), f": {purpose}"))
    kinds = {"drafter": 0, "rule": 1, "length": 2}
    if name in kinds:
        for signature, summary in catalogue()[kinds[name]][2]:
            session.screen.line(f"  {signature}: {summary}")


def quit_(session: ChatSession, argument: str) -> None:
    """/quit: leave, as Ctrl-D does."""
    no_argument("quit", argument)
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
"""Other names, which no list shows."""
FLAGS = {name.replace("-", "_"): f"/{name}" for name in COMMANDS} | {"num_draft_tokens": "/gamma"}
"""Names of Python arguments, and the commands that set them, for errors."""


def _documented(command: Command) -> tuple[str, str]:
    """(usage, description), from the docstring."""
    usage, _, purpose = cleandoc(command.__doc__ or "").partition(": ")
    return usage, purpose


def resolve(name: str) -> str:
    """Return the full name of a command. Raises ConfigError for a name that is unknown or an ambiguous abbreviation."""
    name = SYNONYMS.get(name, name)
    if name in COMMANDS:
        return name
    found = [known for known in COMMANDS if name and known.startswith(name) and not known.endswith("!")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"/{name} is ambiguous: {', '.join('/' + one for one in found[:-1])} or /{found[-1]}")
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean /{near[0]}?" if near else ""
    raise ConfigError(f"unknown command /{name}.{hint} /help lists the commands; //{name} sends it as text")


def handle(session: ChatSession, entered: Entry) -> None:
    """Run a command, or answer a message. Raises ForesayError if that fails."""
    text = entered.text
    if entered.block or not text.startswith("/"):
        conversation.answer(session, text)
    elif text.startswith("//"):
        conversation.answer(session, text[1:])
    else:
        name, *argument = text[1:].split(None, 1)[:2] or [""]
        COMMANDS[resolve(name)](session, argument[0].strip() if argument else "")


def words() -> Words:
    """Completions for Tab: command names, and the values of each."""
    switch: Callable[[], Iterable[str]] = lambda: ("on", "off")  # noqa: E731
    given: dict[str, Callable[[], Iterable[str]]] = {
        "drafter": lambda: ["auto", *DRAFTERS, *third_party_names()],
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
