"""Commands that show and change the settings of the console.

A command is a function of the session and of the text after its name. Its docstring is its help: "/usage: description."
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from foresay.cli.colours import legend
from foresay.cli.common import model_expression
from foresay.cli.console.session import ChatSession
from foresay.cli.methods import shown, signature
from foresay.cli.options import idle
from foresay.cli.progress import loading
from foresay.errors import ConfigError
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import DRAFTERS

Command = Callable[[ChatSession, str], None]


def show(session: ChatSession, *names: str) -> None:
    """Print the settings of these names, or all settings, a line each."""
    settings = described(session)
    for name in names or settings:
        session.screen.line(f"{name}: {settings[name]}")


def described(session: ChatSession) -> dict[str, str]:
    """Every setting as text, by the command that changes it."""
    params, exact = session.params, session.generator.rule.exact
    method = session.method
    sampling = "greedy" if params.greedy else f"{params.temperature:g}"
    out = {
        "model": session.generator.target.name,
        "drafter": method["drafter"],
        "length": method["length"],
        "rule": f"{session.rule} ({'exact' if exact else 'lossy: the output may differ from plain decoding'})",
        "temperature": sampling,
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
    for name in extra:  # options of the program, shown if they are set
        value, default = getattr(params, name), type(params).__dataclass_fields__[name].default
        if value != default:
            out[name.replace("_", "-")] = shown(list(value) if isinstance(value, tuple) else value)
    return out


def settings(session: ChatSession, argument: str) -> None:
    """/settings: show every setting."""
    no_argument("settings", argument)
    show(session)


def drafter(session: ChatSession, argument: str) -> None:
    """/drafter EXPRESSION: use another drafter, such as suffix(scale=3), at its own length.

    none is plain decoding, model(NAME) a draft model, auto the default.
    """
    if argument:
        with loading("Preparing the drafter"):
            session.change(drafter=argument)
    show(session, "drafter", "length")


def draft(session: ChatSession, argument: str) -> None:
    """/draft MODEL: use a draft model: an alias, hub id, folder or GGUF file."""
    if argument:
        drafter(session, model_expression(argument))
    else:
        session.screen.line(f"draft: {session.draft or 'none'}")


def rule(session: ChatSession, argument: str) -> None:
    """/rule EXPRESSION: use another acceptance rule; lenience(2) and typical are lossy."""
    if argument:
        session.change(rule=argument)
    show(session, "rule")


def length(session: ChatSession, argument: str) -> None:
    """/length EXPRESSION: set the draft length: a number, heuristic, confidence(0.4), entropy, throughput."""
    if argument:
        session.change(length=argument)
    show(session, "length")


def gamma(session: ChatSession, argument: str) -> None:
    """/gamma N: draft N tokens per pass; 0 is plain decoding."""
    if argument:
        session.change(num_draft_tokens=number("gamma", argument, int))
    show(session, "length")


def greedy(session: ChatSession, argument: str) -> None:
    """/greedy: always generate the most likely token (temperature 0)."""
    no_argument("greedy", argument)
    session.set(temperature=0.0)
    show(session, "temperature")


def _sampling(name: str, kind: type, usage: str) -> Command:
    """A command that sets a sampling parameter, or shows it."""
    parameter = name.replace("-", "_")

    def command(session: ChatSession, argument: str) -> None:
        if argument:
            session.set(**{parameter: number(name, argument, kind)})
        show(session, name)
        warn_if_idle(session, name, bool(argument))

    command.__doc__ = f"/{name} {usage}"
    return command


def warn_if_idle(session: ChatSession, name: str, changed: bool) -> None:
    """Print a note when the parameter that was just set has no effect at temperature 0."""
    if changed and session.params.greedy and idle(session.params).get(name):
        session.screen.note("(has no effect while decoding is greedy; /temperature 0.7 samples)")


temperature = _sampling(
    "temperature", float, "X: sample, from a distribution sharper below 1 and flatter above; 0 is greedy."
)
top_k = _sampling("top-k", int, "N: sample from the N most likely tokens; 0 is all.")
top_p = _sampling("top-p", float, "X: sample from the most likely tokens of this total probability, up to 1.")
min_p = _sampling("min-p", float, "X: sample from tokens at least this fraction as likely as the most likely.")
max_new_tokens = _sampling("max-new-tokens", int, "N: end an answer after N tokens.")


def seed(session: ChatSession, argument: str) -> None:
    """/seed N: sample every answer from this seed; /seed random draws one for each."""
    if argument:
        session.set(seed=None if argument == "random" else number("seed", argument, int, " or random"))
    show(session, "seed")
    warn_if_idle(session, "seed", bool(argument))


def template(session: ChatSession, argument: str) -> None:
    """/template on|off: use the model's chat template, or continue the conversation as one text."""
    wanted = switch("template", argument, session.template)
    if wanted and not session.has_template:
        raise ConfigError("this model has no chat template")
    session.template = wanted
    show(session, "template")


def system(session: ChatSession, argument: str) -> None:
    """/system TEXT: the system message of this conversation, past answers included; /system none removes it."""
    if argument:
        session.system = None if argument == "none" else argument
    show(session, "system")


def trace(session: ChatSession, argument: str) -> None:
    """/trace on|off: colour each token by its origin."""
    session.trace = switch("trace", argument, session.trace)
    show(session, "trace")
    if session.trace:
        session.screen.line(legend())
        if session.screen.out.color_system is None:
            session.screen.note("(this terminal shows no colours)")


def store(session: ChatSession, argument: str) -> None:
    """/store: show which drafters learn from earlier answers; /store reset makes them forget."""
    if argument not in ("", "reset"):
        raise ConfigError(f"/store {argument!r} must be reset, or nothing")
    kept = [entry for entry in leaves(parse(session.generator.drafter_name)) if entry[1]]
    if argument:
        session.generator.forget()
        session.screen.line("forgotten" if kept else "nothing to forget")
        return
    for text, _ in kept:
        session.screen.line(f"{text}: learns from earlier answers")
    if not kept:
        session.screen.line(
            f"{session.generator.drafter_name} learns nothing from earlier answers; "
            "suffix(keep=true) and ngram_store(keep=true) do"
        )


def leaves(call: Call) -> list[tuple[str, bool]]:
    """(drafter with all its settings, True if it learns across requests) of each member of a cascade."""
    if call.name == "cascade":
        members = [v if isinstance(v, Call) else Call(str(v)) for k, v in call.values if k is None]
        return [leaf for member in members for leaf in leaves(member)]
    make: Any = DRAFTERS[call.name].make if call.name in DRAFTERS else None
    if make is None:
        return []
    parameters = inspect.signature(make).parameters
    given = {k or list(parameters)[i]: v for i, (k, v) in enumerate(call.values)}
    default = parameters["keep"].default if "keep" in parameters else False
    return [(signature(call.name, make, given), bool(given.get("keep", default)))]


def number(name: str, text: str, kind: type, otherwise: str = "") -> Any:
    """Return the value as an int or a float; its range is checked where it is used."""
    try:
        value = kind(text)
    except ValueError:
        allowed = "an integer" if kind is int else "a number"
        raise ConfigError(f"/{name} {text!r} must be {allowed}{otherwise}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"/{name} {text!r} must be a finite number")
    return value


def switch(name: str, text: str, now: bool) -> bool:
    """True for on, False for off, `now` for an empty text. Raises ConfigError for other texts."""
    if text not in ("", "on", "off"):
        raise ConfigError(f"/{name} {text!r} must be on or off")
    return now if not text else text == "on"


def no_argument(name: str, argument: str) -> None:
    """Raise ConfigError for a value of a command that takes none."""
    if argument:
        raise ConfigError(f"/{name} takes no value; drop {argument!r}")
