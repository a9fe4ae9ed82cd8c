"""The table of commands. Importing it imports no command."""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = {
    "Run": {
        "generate": "Generate a continuation of one prompt.",
        "chat": "Talk with a model; change how it decodes while it runs.",
        "serve": "Serve a model through an OpenAI-compatible API.",
        "demo": "Decode a few prompts with and without speculation.",
    },
    "Measure": {
        "record": "Record a model's outputs, for replaying drafters.",
        "replay": "Measure drafters on a recording, without the model.",
        "check": "Check that outputs and tokens per pass did not change.",
        "profile": "Time a model's forward passes on this machine.",
        "simulate": "Predict throughput and latency under load.",
        "bench": "Time methods against plain decoding and other engines.",
        "tune": "Find the fastest settings here; write foresay.toml.",
        "report": "Write a report of benchmark results.",
    },
    "Train": {
        "distill": "Train or make a draft: a head, a model, an n-gram table, ...",
        "export": "Write a draft in another engine's format.",
    },
    "Other": {
        "drafts": "List the drafts that exist for a model, and what each costs.",
        "memory": "Show the texts that a server keeps; add those of others.",
        "info": "Show versions, methods, or what a model or a table is.",
        "prepare": "Compile kernels and convert a model's weights in advance.",
        "vllm-config": "Print vLLM's arguments for a drafter or settings file.",
    },
}
"""First line of each command's docstring, by heading and name, in the order of the help page."""
SUMMARIES = {name: text for commands in COMMANDS.values() for name, text in commands.items()}
REMOVED = {
    "compare": "generate --compare",
    "methods": "info --methods",
    "prune": "distill --kind pruned",
    "ngram": "distill --kind ngram, info TABLE",
    "acceptance-head": "distill --kind acceptance",
}
"""Commands of earlier versions, and what does their work now."""


def load(name: str) -> click.Command:
    """Import a command's module and return the command."""
    command: click.Command = import_module(f"foresay.cli.{name.replace('-', '_')}").run
    return command
