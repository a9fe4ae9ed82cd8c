"""`foresay generate`: generate from one prompt, streamed, or from many lines as one batch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any

import click

from foresay.checks import check_int
from foresay.cli.colours import coloured, console, legend, notes
from foresay.cli.command import Given
from foresay.cli.commands import feature
from foresay.cli.common import (
    draft_of,
    fresh_seed,
    load_generator,
    read_prompt,
    sampled,
    sampling_params,
    shown_loading,
)
from foresay.cli.drafts import found_draft, suggest
from foresay.cli.progress import advancing, note
from foresay.cli.tables import sum_up
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, PromptError
from foresay.generation.generator import Generator
from foresay.generation.method import Method, methods
from foresay.generation.result import Chunk, Generation
from foresay.models.sources.catalogue import PUBLISHED
from foresay.spec.expressions import parse
from foresay.text.prompts import as_chat


def run(given: Given) -> int:
    """Run the command."""
    params = SamplingParams.of(sampling_params(given), keep_prompt=given.keep_prompts is not None)
    _refuse_contradictions(given)
    chosen = given.drafter if given.compare and given.drafter not in ((), ("auto",)) else ()
    lengths, rule = [given.length] if given.length else [], given.rule or "speculative"
    chosen = [found_draft(given) if one == PUBLISHED else str(parse(one)) for one in chosen]
    named = methods(chosen, lengths, rule) if chosen else []
    text = read_prompt(given.prompt, given.file)
    prompts = split_lines(text) if given.lines else []
    given.drafter = given.drafter[0] if given.drafter else "auto"
    if given.workers is not None:
        done: int = feature("workers").generate(given, prompts, params)
        return done
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
    for name in ("compare", "workers"):
        if given.keep_prompts is not None and getattr(given, name):
            text = "and {" + name + "} contradict: what a run reads would depend on those before; drop one"
            raise ConfigError(text, param="keep_prompts", value=given.keep_prompts, **{name: ...})
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
        _sum_up(done, seconds, trace=given.trace, figures=not given.compare)
    rows = []
    if given.compare:
        table, draft = feature("compare"), draft_of(generator)
        every = [replace(one, length=given.length or one.length) for one in table.methods(generator, draft, None)]
        with advancing("Comparing") as advance:
            chosen = (named or every, draft, params, given.repeats)
            rows = table.compare(generator, text, *chosen, advance, raw=given.raw)
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
        table.show(rows, generator, shown_loading(given))
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


def _sum_up(done: Generation, seconds: float, *, trace: bool, figures: bool) -> None:
    """Print counts and times of the text on stderr, with `figures`; on stdout only what an option requests."""
    out = console()
    if trace:
        out.print()
        out.print(legend(out))
    if figures and notes().is_terminal:
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
        show_output(prompts, i, one.as_record(), as_json=given.json)
    show_speed(sum(len(one.token_ids) for one in done), perf_counter() - began)
    return 0


def show_output(prompts: list[str], i: int, record: dict[str, Any], *, as_json: bool) -> None:
    """Print one of many outputs, as a JSON line or as text."""
    click.echo(json.dumps({"prompt": prompts[i]} | record, ensure_ascii=False) if as_json else record["text"])
    if not as_json and i + 1 < len(prompts):
        click.echo()


def show_speed(tokens: int, seconds: float) -> None:
    """Note the speed of a batch on a terminal."""
    if sys.stderr.isatty():
        note(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")
