"""`foresay generate`: generate from one prompt, streamed, or from many lines as one batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import click

from foresay.checks import check_int
from foresay.cli import sharing
from foresay.cli.colours import coloured, console, legend, notes
from foresay.cli.command import Given
from foresay.cli.common import fresh_seed, load_arguments, load_generator, read_prompt, sampled, sampling_params
from foresay.cli.console import table
from foresay.cli.drafts import found_draft, suggest
from foresay.cli.progress import advancing, loading, note
from foresay.cli.tables import sum_up
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, PromptError
from foresay.generation.generator import Generator
from foresay.generation.method import Method, methods
from foresay.generation.result import Chunk, Generation
from foresay.lab.data.items import PromptItem
from foresay.models.sources.catalogue import PUBLISHED
from foresay.spec.expressions import parse
from foresay.text.prompts import as_chat
from foresay.workers.messages import check_sendable
from foresay.workers.pool import Pool, in_order


def run(given: Given) -> int:
    """Run the command."""
    params = sampling_params(given)
    _refuse_contradictions(given)
    chosen = given.drafter if given.compare and given.drafter not in ((), ("auto",)) else ()
    lengths, rule = [given.length] if given.length else [], given.rule or "speculative"
    chosen = [found_draft(given) if one == PUBLISHED else str(parse(one)) for one in chosen]
    named = methods(chosen, lengths, rule) if chosen else []
    text = read_prompt(given.prompt, given.file)
    prompts = split_lines(text) if given.lines else []
    given.drafter = given.drafter[0] if given.drafter else "auto"
    if sharing.wanted(given):
        load = load_arguments(given, max_batch_size=given.batch_size)
        setup = {"kind": "generate", "load": load, "params": check_sendable(params), "raw": given.raw}
        with sharing.pool(given, setup) as pool:
            return _lines_shared(pool, prompts, as_json=given.json)
    generator = load_generator(given, max_batch_size=given.batch_size)
    if not given.json:
        suggest(generator)
    params = sampled(params, generator)
    if given.lines:
        return _lines(generator, prompts, params, given)
    if params.seed is None and not params.greedy:
        params = SamplingParams.of(params, seed=fresh_seed())
    return _one(generator, text, params, given, named)


def _refuse_contradictions(given: Given) -> None:
    """Raise ConfigError for options that exclude each other, and for an option without the one that it needs."""
    if given.trace and given.json:
        raise ConfigError("and --json contradict; drop one", param="trace")
    if given.lines and (given.trace or given.compare):
        shown = "--trace" if given.trace else "--compare"
        raise ConfigError(f"decodes a batch, and {shown} shows one prompt; drop one", param="lines")
    if given.logprobs is not None and not given.json:
        raise ConfigError("needs --json", param="logprobs", value=given.logprobs)
    for name, needed in (("batch_size", "lines"), ("workers", "lines"), ("ray", "workers"), ("repeats", "compare")):
        if name in given.typed and not getattr(given, needed):
            raise ConfigError(f"needs --{needed}; add it, or drop {given.typed[name]}", param=name)
    if len(given.drafter) > 1 and not given.compare:
        raise ConfigError(f"is given {len(given.drafter)} times; add --compare, or drop all but one", param="drafter")
    if given.compare and "none" in given.drafter:
        raise ConfigError("is plain decoding, which is always compared; drop it", param="drafter", value="none")
    check_int("repeats", given.repeats, 1, 1000)


def _one(generator: Generator, text: str, params: SamplingParams, given: Given, named: list[Method]) -> int:
    """Decode one prompt, with --compare also without speculation and with each of the methods."""
    request = as_chat(text, generator.tokenizer, raw=given.raw)
    began = perf_counter()
    done = generator.generate(request, params) if given.json else stream(generator, request, params, trace=given.trace)
    seconds = perf_counter() - began
    if not given.json:
        _sum_up(done, seconds, trace=given.trace)
    rows = []
    if given.compare:
        item, draft = PromptItem("", text, raw=given.raw), table.draft_of(generator)
        every = [replace(one, length=given.length or one.length) for one in table.methods(generator, draft, None)]
        with loading("Preparing the drafters") as progress:
            rows = table.compare(generator, item, named or every, draft, params, given.repeats, progress)
    if given.json:
        record = done.as_record() | {"seconds": seconds, "tokens_per_s": len(done.token_ids) / seconds}
        record |= (
            {"repeats": given.repeats, "methods": [table.record(row, table.plain_spread(rows)) for row in rows]}
            if rows
            else {}
        )
        click.echo(json.dumps(record, ensure_ascii=False))
    elif rows:
        console().print()
        table.show(rows, generator)
    return 1 if rows and (table.broken(rows) or not any(row.runs for row in rows[1:])) else 0


def stream(generator: Generator, request: Any, params: SamplingParams, *, trace: bool) -> Generation:
    """Print the text as it is committed. Ctrl-C keeps the text printed so far."""
    out = console()
    whole = None
    try:
        for chunk in generator.stream(request, params):
            if trace:
                out.print(coloured(chunk.pieces, out), end="")
            else:
                sys.stdout.write(chunk.text)
            sys.stdout.flush()
            whole = chunk.generation or whole
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        raise
    sys.stdout.write("\n")
    assert whole is not None
    return whole


def _sum_up(done: Generation, seconds: float, *, trace: bool) -> None:
    """Print counts and times of the text on stderr; on stdout only what an option requests."""
    out = console()
    if trace:
        out.print()
        out.print(legend(out))
    if notes().is_terminal:
        notes().print(sum_up(done.stats, seconds, done.seed, exact=done.exact), style="dim")


# -- many lines


def split_lines(text: str) -> list[str]:
    """Return one prompt per line, without empty lines. Raises PromptError if no line is left.

    A line ends with a newline, or a carriage return and a newline: other separators of Unicode may be part of a prompt.
    """
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise PromptError("--lines: the input has no line with a prompt", param="lines")
    return prompts


def _lines(generator: Generator, prompts: list[str], params: SamplingParams, given: Given) -> int:
    """Decode all prompts together; print the outputs in order, as JSON lines or as texts with a blank line between."""
    requests = [as_chat(text, generator.tokenizer, raw=given.raw) for text in prompts]
    seen, ended, began = 0, 0, perf_counter()
    with advancing("Decoding") as advance:

        def show(chunk: Chunk) -> None:
            nonlocal seen, ended
            seen, ended = seen + len(chunk.step.token_ids), ended + (chunk.generation is not None)
            advance(ended, len(requests), f"{seen} tokens")

        done = generator.generate(requests, params, on_chunk=show)
    for i, one in enumerate(done):
        _print(prompts, i, one.as_record(), as_json=given.json)
    _time(sum(len(one.token_ids) for one in done), perf_counter() - began)
    return 0


def _lines_shared(pool: Pool, prompts: list[str], *, as_json: bool) -> int:
    """Decode all prompts by workers; print each output once all earlier ones are printed."""
    tokens, began = 0, perf_counter()
    with advancing("Decoding", hidden=sys.stdout.isatty()) as advance:  # outputs would be written into the bar

        def counted() -> Iterator[tuple[int, dict[str, Any]]]:
            nonlocal tokens
            for done, (number, result) in enumerate(pool.run(dict(enumerate(prompts))), 1):
                tokens += len(result["token_ids"])
                advance(done, len(prompts), f"{tokens} tokens")
                yield number, result

        for i, result in enumerate(in_order(counted())):
            _print(prompts, i, result, as_json=as_json)
    _time(tokens, perf_counter() - began)
    return 0


def _print(prompts: list[str], i: int, record: dict[str, Any], *, as_json: bool) -> None:
    click.echo(json.dumps({"prompt": prompts[i]} | record, ensure_ascii=False) if as_json else record["text"])
    if not as_json and i + 1 < len(prompts):
        click.echo()


def _time(tokens: int, seconds: float) -> None:
    if sys.stderr.isatty():
        note(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")
