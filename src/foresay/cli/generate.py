"""`foresay generate`: generate from one prompt, streamed, or from many lines as one batch."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Annotated, Any

import typer

from foresay.cli import generate_lines
from foresay.cli.colours import coloured, console, legend, notes
from foresay.cli.common import fresh_seed, load_arguments, load_generator, read_prompt, sampled
from foresay.cli.options import (
    DrafterOption,
    FileOption,
    JsonOption,
    MachineOptions,
    MaxBatchOption,
    MethodOptions,
    ModelOptions,
    PromptArgument,
    RawOption,
    SamplingOptions,
    SamplingSourceOption,
    TraceOption,
)
from foresay.cli.sharing import SharingOptions
from foresay.cli.tables import comparison, first_difference, sum_up
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.result import Generation
from foresay.spec.recipes import read_rule
from foresay.text.prompts import as_chat
from foresay.workers.messages import check_sendable


def run(
    prompt: PromptArgument = None,
    file: FileOption = None,
    *,
    models: ModelOptions,
    drafter: DrafterOption = "auto",
    methods: MethodOptions,
    options: SamplingOptions,
    sampling: SamplingSourceOption = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and those of the N most likely tokens.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Decode each line as a prompt, all in one batch.")] = False,
    batch_size: MaxBatchOption = None,
    raw: RawOption = False,
    trace: TraceOption = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode without speculation too; exit code 1 if the outputs differ.")
    ] = False,
    as_json: JsonOption = False,
    sharing: SharingOptions,
    machine: MachineOptions,
) -> int:
    """Generate a continuation of one prompt.

    The output is the same as without speculation, unless the rule is lossy. A seed reproduces a sampled output.
    """
    params = options.params(sampling, logprobs=logprobs)
    _refuse_contradictions(
        {
            "--trace": trace,
            "--compare": compare,
            "--lines": lines,
            "--json": as_json,
            "--logprobs": logprobs is not None,
        }
    )
    if batch_size is not None and not lines:
        raise ConfigError("--batch-size needs --lines")
    if compare:
        _check_compared(params, methods)
    text = read_prompt(prompt, file)
    prompts = generate_lines.split_lines(text) if lines else []
    if sharing.wanted:
        if not lines:
            raise ConfigError("--workers distributes many prompts; add --lines")
        load = load_arguments(models, drafter, methods, machine, max_batch_size=batch_size, sampling=sampling)
        setup = {"kind": "generate", "load": load, "params": check_sendable(params), "raw": raw}
        with sharing.pool(setup, machine) as pool:
            return generate_lines.run_shared(pool, prompts, as_json=as_json)
    generator = load_generator(models, drafter, methods, machine, max_batch_size=batch_size, sampling=sampling)
    params = sampled(params, generator)
    if compare:
        _check_compared(params, methods)
    if lines:
        return generate_lines.run(generator, prompts, params, raw=raw, as_json=as_json)
    return _one(
        generator, as_chat(text, generator.tokenizer, raw=raw), params, trace=trace, compare=compare, as_json=as_json
    )


def _check_compared(params: SamplingParams, methods: MethodOptions) -> None:
    if not params.greedy and not read_rule(methods.rule_name).needs.shares_noise:
        raise ConfigError("--compare needs --temperature 0, or --rule coupled, under which a seed gives one output")


def _one(
    generator: Generator, request: Any, params: SamplingParams, *, trace: bool, compare: bool, as_json: bool
) -> int:
    """Decode one prompt, with --compare also without speculation."""
    if params.seed is None and not params.greedy:
        params = SamplingParams.of(params, seed=fresh_seed())
    if compare:
        generator.generate(request, SamplingParams(max_new_tokens=4))  # the first passes are slow: time neither side's
        generator.forget()  # the drafter must not know this output
    fast, seconds = (_quiet if as_json else _stream)(generator, request, params, trace)
    plain = _plain(generator, request, params) if compare else None
    if as_json:
        typer.echo(json.dumps(_record(fast, seconds, plain), ensure_ascii=False))
    else:
        _sum_up(generator, fast, seconds, plain, trace)
    return 1 if plain is not None and fast.exact and plain[0].token_ids != fast.token_ids else 0


def _refuse_contradictions(flags: dict[str, bool]) -> None:
    """Raise ConfigError for flags that exclude each other, and for a flag without the one that it needs."""
    if flags["--trace"] and flags["--json"]:
        raise ConfigError("--trace and --json contradict; drop one")
    if flags["--lines"] and (flags["--trace"] or flags["--compare"]):
        shown = "--trace" if flags["--trace"] else "--compare"
        raise ConfigError(f"--lines decodes a batch, and {shown} shows one prompt; drop one")
    if flags["--logprobs"] and not flags["--json"]:
        raise ConfigError("--logprobs needs --json")


def _quiet(generator: Generator, request: Any, params: SamplingParams, trace: bool) -> tuple[Generation, float]:
    began = perf_counter()
    return generator.generate(request, params), perf_counter() - began


def _stream(generator: Generator, request: Any, params: SamplingParams, trace: bool) -> tuple[Generation, float]:
    """Print the text as it is committed. Ctrl-C keeps the text printed so far."""
    out = console()
    began = perf_counter()
    whole = None
    try:
        for chunk in generator.stream(request, params):
            if trace:
                out.print(coloured(chunk.pieces), end="")
            else:
                sys.stdout.write(chunk.text)
            sys.stdout.flush()
            whole = chunk.generation or whole
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        raise
    seconds = perf_counter() - began
    sys.stdout.write("\n")
    assert whole is not None
    return whole, seconds


def _plain(generator: Generator, request: Any, params: SamplingParams) -> tuple[Generation, float]:
    began = perf_counter()
    return generator.plain().generate(request, params), perf_counter() - began


def _record(fast: Generation, seconds: float, plain: tuple[Generation, float] | None) -> dict[str, Any]:
    record = fast.as_record() | {"seconds": seconds, "tokens_per_s": len(fast.token_ids) / seconds}
    if plain is not None:
        record["plain_seconds"] = plain[1]
        record["speed_up"] = plain[1] / seconds
        record["identical"] = plain[0].token_ids == fast.token_ids
    return record


def _sum_up(
    generator: Generator, fast: Generation, seconds: float, plain: tuple[Generation, float] | None, trace: bool
) -> None:
    """Print counts and times on stderr; on stdout only what an option requests."""
    out = console()
    if trace:
        out.print()
        out.print(legend())
    if plain is not None:
        out.print()
        out.print(comparison(plain[1], plain[0].stats, seconds, fast.stats, out), soft_wrap=not out.is_terminal)
        where = first_difference(plain[0], fast, generator.tokenizer)
        lossy = "" if fast.exact else " (the rule is lossy)"
        out.print("identical output: yes" if where is None else f"identical output: no, at {where}{lossy}")
    if notes().is_terminal:
        notes().print(sum_up(fast.stats, seconds, fast.seed, exact=fast.exact), style="dim")
