"""The command tree, and what becomes of errors, Ctrl-C and closed pipes."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from foresay.cli.lazy import Entry, LazyGroup, build
from foresay.errors import ForesayError

CLOSED_PIPE = 141
"""128 + SIGPIPE, what a shell reports for a program that the signal ended."""

COMMANDS = {
    "generate": Entry("Write a continuation of one prompt, faster and unchanged.", "generate:run"),
    "chat": Entry("Talk with a model, and change how it decodes while it runs.", "chat:run"),
    "serve": Entry(
        "Serve a model to OpenAI's clients, with continuous batching.", "serve:run", variables="FORESAY_SERVE"
    ),
    "compare": Entry("Decode one prompt with each method, and set them side by side.", "compare:run"),
    "demo": Entry("Decode a few prompts with and without speculation, and compare.", "demo:run"),
    "methods": Entry("List the drafters, rules and lengths with their settings.", "methods:run"),
    "models": Entry("List the built-in model names, and whether each is ready.", "models:run"),
    "info": Entry("Say what a model supports, or why it is not supported.", "info:run"),
    "compile": Entry(
        "Compile what a model's passes run on, convert its weights, and keep that for later.", "compile:run"
    ),
    "version": Entry("Print the versions of foresay and of what it runs on.", "version:run"),
    "record": Entry(
        "Write down what a model answers to each prompt, to replay drafters against it without the model.", "record:run"
    ),
    "replay": Entry("Say how much of each drafter's work a recorded target would have used.", "replay:run"),
    "load": Entry("Foretell throughput and waiting under load, with and without speculation.", "load:run"),
    "bench": Entry("Time methods against plain decoding and other engines, and keep every result.", "bench:run"),
    "tune": Entry("Find what decodes fastest here, by replay and profile, and confirm the best live.", "tune:run"),
    "report": Entry("Write a report of benchmarks: report.html, report.md and the figures.", "report:run"),
    "prune": Entry("Cut a smaller model of the same family out of a model's weights.", "prune:run"),
    "distill": Entry(
        "Train a draft on what a target writes: a head on its hidden states, or a smaller model.", "distill:run"
    ),
    "export": Entry(
        "Write a head on hidden states as other engines read it, the output layer it shares with its target included.",
        "export:run",
    ),
    "vllm-config": Entry(
        "Print vLLM's arguments for a settings file or a drafter: foresay's look-ups inside vLLM.", "vllm_config:run"
    ),
    "head": Entry(
        "Train what predicts whether draft tokens are accepted, and judge it.",
        commands={
            "data": Entry(
                "Draft behind what a target writes, and keep what the draft thought and how likely each token is accepted.",
                "acceptance:data",
            ),
            "train": Entry(
                "Train a head on the output of `foresay head data`; the last tenth of the tokens is held out.",
                "acceptance:train",
            ),
            "eval": Entry("Say how well a head's predictions fit what was accepted.", "acceptance:evaluate"),
        },
    ),
    "ngram": Entry(
        "Make n-gram tables from text, and look into them.",
        commands={
            "build": Entry("Count a corpus; write the likeliest next tokens.", "ngram:build"),
            "show": Entry("Say what a table holds; with --model, in words.", "ngram:show"),
        },
    ),
    "profile": Entry(
        "Time a model's passes over batch, columns and context, with the floor that memory sets.",
        "profile:model",
        {"shapes": Entry("Time draft models of equal size from deep to wide, with random weights.", "profile:shapes")},
    ),
}
"""Every command, with its line of the help, so that listing them imports none."""


class _Program(LazyGroup):
    """All commands; a reader that has gone ends any of them quietly."""

    def invoke(self, ctx: Any) -> Any:
        """Run what was chosen."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            raise typer.Exit(CLOSED_PIPE) from None
        return code


_PURPOSE = "Exact speculative decoding: language models that write faster and write the same."
app = build("foresay", Entry(_PURPOSE, commands=COMMANDS), _Program)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?" instead of ending the run
    sys.exit(_run(args))


def _run(args: list[str] | None) -> int:
    try:
        result: Any = app(args, prog_name="foresay", standalone_mode=False)
    except ForesayError as error:
        return _fail(str(error))
    except typer.TyperException as error:  # a usage error
        format_message = getattr(error, "format_message", None)
        return _fail(format_message() if format_message is not None else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        _discard_stdout()
        where = "" if error.filename is None else f"{str(error.filename)!r}: "
        return _fail(f"{where}{error.strerror or error}")
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print("foresay: " + " ".join(message.split()), file=sys.stderr)  # noqa: T201
    return 2


def _discard_stdout() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
