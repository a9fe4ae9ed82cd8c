"""`foresay generate`: one prompt, streamed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.cli import batch
from foresay.cli.common import (
    DeviceOption,
    DtypeOption,
    ThreadsOption,
    TrustOption,
    as_prompt,
    as_record,
    loading,
    read_prompt,
    use_threads,
)

if TYPE_CHECKING:
    from foresay.core import SamplingParams
    from foresay.generator import Generation, Generator


def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file.")] = None,
    model: Annotated[str, typer.Option(help="Alias, hub id, folder or GGUF file.")] = "smollm2-135m",
    draft: Annotated[str | None, typer.Option(help="A draft model, named the same way.")] = None,
    drafter: Annotated[str, typer.Option(help="auto, none, model or prompt_lookup.")] = "auto",
    num_draft_tokens: Annotated[int | None, typer.Option(help="Tokens guessed per pass; 0 is plain decoding.")] = None,
    rule: Annotated[str, typer.Option(help="speculative, block, match or coupled.")] = "speculative",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to write at most.")] = 256,
    min_new_tokens: Annotated[int, typer.Option(help="Tokens to write at least.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this share as likely as the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Once per token already written.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Per occurrence already written.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled output reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write past the end token.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and of this many others.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line is a prompt; all are decoded as one batch.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="With --lines: prompts decoded at a time.")] = 32,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it is.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Colour each token by who wrote it.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too and compare; 1 if they differ.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
) -> int:
    """Write a continuation of one prompt, faster and unchanged."""
    from foresay.core import SamplingParams
    from foresay.errors import ConfigError
    from foresay.loading import load

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    _refuse_unused(params)
    _refuse_contradictions(
        {
            "--trace": trace,
            "--compare": compare,
            "--lines": lines,
            "--json": as_json,
            "--logprobs": logprobs is not None,
        }
    )
    if batch_size != 32 and not lines:
        raise ConfigError("--batch-size needs --lines")
    if compare and not params.greedy and rule != "coupled":
        raise ConfigError("--compare needs --temperature 0, or --rule coupled, under which a seed gives one output")
    use_threads(threads)
    text = read_prompt(prompt, file)
    prompts = batch.split_lines(text) if lines else []
    with loading(f"Loading {model}") as progress:
        generator = load(
            model,
            draft,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            dtype=dtype,
            device=device,
            max_batch_size=batch_size,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if lines:
        return batch.run(generator, prompts, params, raw=raw, as_json=as_json)
    return _one(generator, as_prompt(text, generator, raw=raw), params, trace=trace, compare=compare, as_json=as_json)


def _one(
    generator: Generator, request: Any, params: SamplingParams, *, trace: bool, compare: bool, as_json: bool
) -> int:
    """Decode one prompt, and plainly too when asked."""
    from foresay.core import SamplingParams

    if params.seed is None and not params.greedy:
        params = SamplingParams.of(params, seed=_fresh_seed())
    if compare:
        generator.generate(request, SamplingParams(max_new_tokens=4))  # neither side pays for the first passes
    fast, seconds = (_quiet if as_json else _stream)(generator, request, params, trace)
    plain = _plain(generator, request, params) if compare else None
    if as_json:
        typer.echo(json.dumps(_record(fast, seconds, plain), ensure_ascii=False))
    else:
        _sum_up(generator, fast, seconds, plain, trace)
    return 1 if plain is not None and plain[0].token_ids != fast.token_ids else 0


def _refuse_contradictions(flags: dict[str, bool]) -> None:
    """Flags that exclude each other, and flags that need another."""
    from foresay.errors import ConfigError

    if flags["--trace"] and flags["--json"]:
        raise ConfigError("--trace and --json contradict; give one of them")
    if flags["--lines"] and (flags["--trace"] or flags["--compare"]):
        raise ConfigError("--lines decodes a batch; --trace and --compare show one prompt")
    if flags["--logprobs"] and not flags["--json"]:
        raise ConfigError("--logprobs needs --json")


def _refuse_unused(params: SamplingParams) -> None:
    """A greedy output does not depend on these: whoever gives one has forgotten the temperature."""
    from foresay.errors import ConfigError

    if not params.greedy:
        return
    unused = {
        "--seed": params.seed is not None,
        "--top-k": params.top_k,
        "--top-p": params.top_p < 1,
        "--min-p": params.min_p,
    }
    for flag, given in unused.items():
        if given:
            raise ConfigError(f"{flag} changes nothing at temperature 0; add --temperature")


def _fresh_seed() -> int:
    import secrets

    return secrets.randbelow(2**32)


def _quiet(generator: Generator, request: Any, params: SamplingParams, trace: bool) -> tuple[Generation, float]:
    began = perf_counter()
    return generator.generate(request, params), perf_counter() - began


def _stream(generator: Generator, request: Any, params: SamplingParams, trace: bool) -> tuple[Generation, float]:
    """Print what comes as it comes; Ctrl-C leaves what was printed."""
    from foresay.cli.trace import coloured, console

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
    record = as_record(fast) | {"seconds": seconds, "tokens_per_s": len(fast.token_ids) / seconds}
    if plain is not None:
        record["plain_seconds"] = plain[1]
        record["speed_up"] = plain[1] / seconds
        record["identical"] = plain[0].token_ids == fast.token_ids
    return record


def _sum_up(
    generator: Generator, fast: Generation, seconds: float, plain: tuple[Generation, float] | None, trace: bool
) -> None:
    """What a terminal's reader wants to know; nothing on stdout unless it was asked for."""
    from rich.console import Console

    from foresay.cli.trace import comparison, console, first_difference, legend, percent

    out = console()
    if trace:
        out.print()
        out.print(legend())
    if plain is not None:
        out.print()
        out.print(comparison(plain[1], plain[0].stats, seconds, fast.stats, out.width))
        where = first_difference(plain[0], fast, generator.tokenizer)
        out.print("identical output: yes" if where is None else f"identical output: no, at {where}")
    notes = Console(file=sys.stderr, highlight=False)
    if notes.is_terminal:
        stats = fast.stats
        seed = "" if fast.seed is None else f", seed {fast.seed}"
        notes.print(
            f"{stats.num_tokens} tokens in {seconds:.2f} s, {stats.num_tokens / seconds:.1f} tokens/s, "
            f"{stats.block_efficiency or 0:.2f} tokens/pass, accepted {percent(stats.acceptance_rate)}{seed}",
            style="dim",
        )
