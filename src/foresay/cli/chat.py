"""`foresay chat`: a conversation in the terminal, with commands that change how it is decoded."""

from __future__ import annotations

import sys

from foresay.cli import options as opt
from foresay.cli.command import Given, command, option
from foresay.cli.common import load_generator, sampled
from foresay.cli.console.commands import FLAGS, handle, words
from foresay.cli.console.input import Reader
from foresay.cli.console.screen import Screen
from foresay.cli.console.session import ChatSession
from foresay.cli.options import sampling_params
from foresay.cli.typed_errors import as_typed
from foresay.decoding.acceptance import RULES
from foresay.errors import ForesayError, PromptError
from foresay.spec.expressions import to_expression


@command(
    opt.WHICH,
    option("--system TEXT", "The system message."),
    option("--no-history", "Do not store what is entered."),
    opt.METHOD,
    opt.ALL_SAMPLING,
    opt.ALL_MACHINE,
    examples="""
        foresay chat Qwen/Qwen2.5-0.5B-Instruct
        foresay chat -t 0.7 --system 'Answer in one sentence.'""",
)
def run(given: Given) -> int:
    """Talk with a model; change how it decodes while it runs.

    /help lists the commands of the console.
    """
    params = sampling_params(given)
    generator = load_generator(given)
    params = sampled(params, generator)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    rule = to_expression(generator.rule, RULES)
    session = ChatSession(generator, params, Screen(), interactive, given.system, rule=rule, length=given.length)
    session.template = session.has_template
    if session.interactive:
        session.screen.note(generator.description)
        session.screen.note("/help lists the commands, Ctrl-D leaves")
    return _loop(session, Reader(words(), keep_history=not given.no_history))


def _loop(session: ChatSession, reader: Reader) -> int:
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
