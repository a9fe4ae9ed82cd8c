"""`foresay chat`: a conversation in the terminal, with commands that change how it is decoded."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from foresay.cli.common import load_generator, sampled
from foresay.cli.console.commands import FLAGS, handle, words
from foresay.cli.console.input import LineReader, reader
from foresay.cli.console.screen import Screen
from foresay.cli.console.session import ChatSession
from foresay.cli.options import (
    DrafterOption,
    DraftOption,
    MachineOptions,
    MethodOptions,
    ModelChoice,
    ModelOptions,
    SamplingOptions,
    SamplingSourceOption,
    TraceOption,
)
from foresay.cli.typed_errors import as_typed
from foresay.decoding.acceptance import RULES
from foresay.errors import ForesayError, PromptError
from foresay.spec.expressions import to_expression


def run(
    *,
    which: ModelChoice,
    draft: DraftOption = None,
    drafter: DrafterOption = "auto",
    methods: MethodOptions,
    options: SamplingOptions,
    sampling: SamplingSourceOption = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    trace: TraceOption = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Do not store what is entered.")] = False,
    machine: MachineOptions,
) -> int:
    """Talk with a model; change how it decodes while it runs.

    /help lists the commands of the console.
    """
    params = options.params(sampling)
    generator = load_generator(ModelOptions(which.name, draft), drafter, methods, machine, sampling=sampling)
    params = sampled(params, generator)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    rule = to_expression(generator.rule, RULES)
    session = ChatSession(generator, params, Screen(), interactive, system, rule=rule, length=methods.length)
    session.trace = trace
    session.template = session.has_template
    if session.interactive:
        session.screen.note(generator.description)
        session.screen.note("/help lists the commands, Ctrl-D leaves")
    return _loop(session, reader(words(), keep_history=not no_history))


def _loop(session: ChatSession, reader: LineReader) -> int:
    """Read entries and act on them until the end of the input or /quit."""
    while session.running:
        try:
            entered = reader.read()
        except EOFError:
            break
        except PromptError as error:
            session.screen.error(str(error))
            continue
        except KeyboardInterrupt:
            if not session.interactive:
                raise
            if not reader.left:
                session.screen.note("(Ctrl-D or /quit leaves)")
            continue
        try:
            handle(session, entered)
        except ForesayError as error:
            session.screen.error(as_typed(str(error), FLAGS))
        except RuntimeError as error:  # PyTorch's, such as no memory: keep the conversation
            session.screen.error(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            if not session.interactive:
                raise
            session.screen.note("(stopped)")
    return 0
