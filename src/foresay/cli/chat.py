"""`foresay chat`: a conversation in the terminal, with commands that change how it is decoded."""

from __future__ import annotations

import sys

from foresay.cli.command import Given
from foresay.cli.common import load_generator, sampled, sampling_params, shown_loading
from foresay.cli.console.commands import FLAGS, handle, words
from foresay.cli.console.input import Reader
from foresay.cli.console.screen import Screen
from foresay.cli.console.session import ChatSession
from foresay.cli.typed_errors import as_typed
from foresay.decoding.acceptance import RULES
from foresay.errors import ForesayError, PromptError
from foresay.spec.expressions import to_expression


def run(given: Given) -> int:
    """Run the command."""
    params = sampling_params(given)
    generator = load_generator(given)
    params = sampled(params, generator)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    rule = to_expression(generator.rule, RULES)
    more = {"system": given.system, "loading": shown_loading(given), "rule": rule, "length": given.length}
    session = ChatSession(generator, params, Screen(), interactive, **more)
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
            session.screen.error(error.worded(as_typed(FLAGS, {})))
        except RuntimeError as error:  # PyTorch's, such as no memory: keep the conversation
            session.screen.error(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            if not session.interactive:
                raise
            session.screen.note("(stopped)")
    return 0
