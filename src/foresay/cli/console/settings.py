"""The commands that show and change how the console decodes.

A command is a function of the session and of what follows its name; its docstring is its help: "/usage: what it does."
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
    """The settings of these names, all unless some are given, a line each."""
    settings = described(session)
    for name in names or settings:
        session.screen.line(f"{name}: {settings[name]}")


def described(session: ChatSession) -> dict[str, str]:
    """Every setting in words, by the command that changes it."""
    params, exact = session.params, session.generator.rule.exact
    method = session.method
    sampling = "greedy" if params.greedy else f"{params.temperature:g}"
    out = {
        "model": session.generator.target.name,
        "drafter": method["drafter"],
        "length": method["length"],
        "rule": f"{session.rule} ({'exact' if exact else 'lossy: the output may differ from the model alone'})",
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
    for name in extra:  # options of the program: they are shown when they do something
        value, default = getattr(params, name), type(params).__dataclass_fields__[name].default
        if value != default:
            out[name.replace("_", "-")] = shown(list(value) if isinstance(value, tuple) else value)
    return out


def settings(session: ChatSession, argument: str) -> None:
    """/settings: show every setting."""
    nothing("settings", argument)
    show(session)


def drafter(session: ChatSession, argument: str) -> None:
    """/drafter EXPRESSION: use another drafter, such as suffix(scale=3); it drafts at its own length.

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
    """/rule EXPRESSION: accept by another rule; lenience(2) and typical are lossy."""
    if argument:
        session.change(rule=argument)
    show(session, "rule")


def length(session: ChatSession, argument: str) -> None:
    """/length EXPRESSION: how many tokens to draft: a number, heuristic, confidence(0.4), entropy, throughput."""
    if argument:
        session.change(length=argument)
    show(session, "length")


def gamma(session: ChatSession, argument: str) -> None:
    """/gamma N: draft N tokens per pass; 0 is plain decoding."""
    if argument:
        session.change(num_draft_tokens=number("gamma", argument, int))
    show(session, "length")


def greedy(session: ChatSession, argument: str) -> None:
    """/greedy: always write the likeliest token (temperature 0)."""
    nothing("greedy", argument)
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
    "temperature", float, "X: sample, from the law sharpened below 1 and flattened above; 0 is greedy."
)
top_k = _sampling("top-k", int, "N: sample among the N likeliest tokens; 0 is all.")
top_p = _sampling("top-p", float, "X: sample among the likeliest tokens of this mass, up to 1.")
min_p = _sampling("min-p", float, "X: sample among tokens at least this share as likely as the likeliest.")
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
    """/trace on|off: colour each token by who wrote it."""
    session.trace = switch("trace", argument, session.trace)
    show(session, "trace")
    if session.trace:
        session.screen.line(legend())
        if session.screen.out.color_system is None:
            session.screen.note("(there are no colours here, so nothing will look different)")


def store(session: ChatSession, argument: str) -> None:
    """/store: what the drafter keeps from earlier answers; /store reset forgets it."""
    if argument not in ("", "reset"):
        raise ConfigError(f"/store {argument}: reset is the only value it takes")
    kept = [entry for entry in leaves(parse(session.generator.drafter_name)) if entry[1]]
    if argument:
        session.generator.forget()
        session.screen.line("forgotten" if kept else "nothing was kept")
        return
    for text, _ in kept:
        session.screen.line(f"{text}: keeps what it learns from one answer to the next")
    if not kept:
        session.screen.line(
            f"{session.generator.drafter_name} keeps nothing between answers; suffix(keep=true) and ngram_store(keep=true) do"
        )


def leaves(call: Call) -> list[tuple[str, bool]]:
    """(the drafter with all its settings, whether it keeps anything between requests), of each member of a cascade."""
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
    """A value as an int or a float; SamplingParams and the policies know its bounds."""
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"/{name} takes {what}{otherwise}, not {text!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"/{name} takes a finite number, not {text!r}")
    return value


def switch(name: str, text: str, now: bool) -> bool:
    """True for on, False for off, `now` for an empty text. Raises ConfigError for other texts."""
    if text not in ("", "on", "off"):
        raise ConfigError(f"/{name} takes on or off, not {text!r}")
    return now if not text else text == "on"


def nothing(name: str, argument: str) -> None:
    """Refuse a value where none belongs."""
    if argument:
        raise ConfigError(f"/{name} takes no value, but {argument!r} was given")
