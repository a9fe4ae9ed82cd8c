"""`foresay generate --lines`: many prompts, decoded as one batch."""

from __future__ import annotations

import json
import sys
from time import perf_counter

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from foresay.cli.common import as_prompt, as_record
from foresay.cli.progress import progress_bar
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import PromptError
from foresay.generation.generator import Generator
from foresay.generation.result import Chunk


def split_lines(text: str) -> list[str]:
    """One prompt per line; empty lines are left out."""
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise PromptError("--lines was given, but the input has no line with a prompt")
    return prompts


def run(generator: Generator, prompts: list[str], params: SamplingParams, *, raw: bool, as_json: bool) -> int:
    """Decode all prompts together and print them in order: a JSON object each, or the texts with a blank line between."""
    requests = [as_prompt(text, generator, raw=raw) for text in prompts]
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    seen = 0
    began = perf_counter()
    with progress_bar(*columns, total=len(requests), tokens=0) as update:

        def show(chunk: Chunk) -> None:
            nonlocal seen
            seen += len(chunk.step.token_ids)
            update(advance=chunk.generation is not None, tokens=seen)

        done = generator.generate(requests, params, on_chunk=show)
    seconds = perf_counter() - began
    for i, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
        typer.echo(json.dumps({"prompt": prompt} | as_record(one), ensure_ascii=False) if as_json else one.text)
        if not as_json and i + 1 < len(prompts):
            typer.echo()
    tokens = sum(len(one.token_ids) for one in done)
    if sys.stderr.isatty():
        typer.echo(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", err=True)
    return 0
