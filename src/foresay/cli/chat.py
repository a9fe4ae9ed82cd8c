"""`foresay chat`: a conversation, and everything that can be changed during it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from foresay.cli.common import load_generator
from foresay.cli.console.commands import handle, words
from foresay.cli.console.input import LineReader, reader
from foresay.cli.console.screen import Screen
from foresay.cli.console.session import ChatSession
from foresay.cli.options import DrafterOption, MachineOptions, MethodOptions, ModelOptions, SamplingOptions, TraceOption
from foresay.decoding.acceptance import RULES
from foresay.errors import ForesayError, PromptError
from foresay.spec.expressions import written


def run(
    *,
    models: ModelOptions,
    drafter: DrafterOption = "auto",
    methods: MethodOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    trace: TraceOption = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep what is entered for the next time.")
    ] = False,
    machine: MachineOptions,
) -> int:
    """Talk with a model, and change how it decodes while it runs."""
    params = sampling.params()
    generator = load_generator(models, drafter, methods, machine)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    rule = written(generator.rule, RULES)
    session = ChatSession(generator, params, Screen(), interactive, system, rule=rule, length=methods.length)
    session.trace = trace
    session.template = session.has_template
    if session.interactive:
        session.screen.note(generator.description)
        session.screen.note("/help lists the commands, Ctrl-D leaves")
    return _loop(session, reader(words(), keep_history=not no_history))


def _loop(session: ChatSession, reader: LineReader) -> int:
    """Read and do, until the end."""
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
            session.screen.error(str(error))
        except RuntimeError as error:  # PyTorch's, such as no memory: the conversation is not lost for it
            session.screen.error(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            if not session.interactive:
                raise
            session.screen.note("(stopped)")
    return 0
