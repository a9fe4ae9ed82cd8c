"""`foresay generate --lines`: many prompts as one batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from foresay.cli.progress import progress_bar
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import PromptError
from foresay.generation.generator import Generator
from foresay.generation.result import Chunk
from foresay.text.prompts import as_chat
from foresay.workers.pool import Pool, in_order


def split_lines(text: str) -> list[str]:
    """Return one prompt per line, without empty lines. Raises PromptError if no line is left.

    A line ends with a newline, or a carriage return and a newline: other separators of Unicode may be part of a prompt.
    """
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise PromptError("--lines: the input has no line with a prompt")
    return prompts


def run(generator: Generator, prompts: list[str], params: SamplingParams, *, raw: bool, as_json: bool) -> int:
    """Decode all prompts together; print the outputs in order, as JSON lines or as texts with a blank line between."""
    requests = [as_chat(text, generator.tokenizer, raw=raw) for text in prompts]
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
        _print(prompt, one.as_record(), as_json=as_json, last=i + 1 == len(prompts))
    _sum_up(sum(len(one.token_ids) for one in done), seconds)
    return 0


def run_shared(pool: Pool, prompts: list[str], *, as_json: bool) -> int:
    """Decode all prompts by workers; print each output once all earlier ones are printed."""
    tasks = dict(enumerate(prompts))
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    tokens, began = 0, perf_counter()
    with progress_bar(*columns, total=len(prompts), tokens=0) as update:

        def counted() -> Iterator[tuple[int, dict[str, Any]]]:
            nonlocal tokens
            for number, result in pool.run(tasks):
                tokens += len(result["token_ids"])
                update(advance=1, tokens=tokens)
                yield number, result

        for i, result in enumerate(in_order(counted())):
            _print(prompts[i], result, as_json=as_json, last=i + 1 == len(prompts))
    _sum_up(tokens, perf_counter() - began)
    return 0


def _print(prompt: str, record: dict[str, Any], *, as_json: bool, last: bool) -> None:
    typer.echo(json.dumps({"prompt": prompt} | record, ensure_ascii=False) if as_json else record["text"])
    if not as_json and not last:
        typer.echo()


def _sum_up(tokens: int, seconds: float) -> None:
    if sys.stderr.isatty():
        typer.echo(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", err=True)
