"""`foresay generate --lines`: many prompts, decoded as one batch."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from foresay.cli.common import as_prompt, as_record, progress_bar
from foresay.errors import PromptError

if TYPE_CHECKING:
    from foresay.decoding.sampling_params import SamplingParams
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
    began = perf_counter()
    with _Progress(len(requests)) as progress:
        done = generator.generate(requests, params, on_chunk=progress)
    seconds = perf_counter() - began
    for i, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
        typer.echo(json.dumps({"prompt": prompt} | as_record(one), ensure_ascii=False) if as_json else one.text)
        if not as_json and i + 1 < len(prompts):
            typer.echo()
    tokens = sum(len(one.token_ids) for one in done)
    if sys.stderr.isatty():
        typer.echo(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", err=True)
    return 0


class _Progress:
    """A bar of finished prompts on stderr; nothing when stderr is no terminal."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
        self._progress = progress_bar(*columns)
        self._task = self._progress.add_task("", total=total, tokens=0)
        self._tokens = 0

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()

    def __call__(self, chunk: Chunk) -> None:
        self._tokens += len(chunk.step.token_ids)
        self._progress.update(self._task, advance=chunk.generation is not None, tokens=self._tokens)
